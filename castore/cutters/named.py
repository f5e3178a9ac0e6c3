"""What a torch file's pickle may name, and what each name stands for here.

Nothing is imported or called by name: each entry of `ALLOWED` is a function of this module that
makes plain data. Source of the arguments: torch/_utils.py (``_rebuild_*``), torch/_tensor.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from castore.cutters import Malformed
from castore.errors import UntrustedPickleError

STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
DTYPES = {
    **{f"torch {d}": d for d in STORAGES.values()},
    **{f"torch uint{n}": f"uint{n}" for n in (16, 32, 64)},
    **{
        f"torch float8_{k}": f"float8_{k}"
        for k in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
    },
}


class Global(NamedTuple):
    """A name that is on the list; it stands for itself and is never looked up."""

    name: str


class Storage(NamedTuple):
    """A persistent id: elements of ``dtype`` (of bytes where it is ``""``) under ``key``."""

    dtype: str
    key: str
    elements: int


class View(NamedTuple):
    """A tensor: a view of a storage; ``offset`` and ``strides`` in elements.

    ``but`` is what torch does to the stored elements before it shows them (``conj``, ``neg``);
    empty for nearly all.
    """

    dtype: str
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    but: str = ""


def named(name: str) -> Any:
    if name in DTYPES:
        return Global(name)
    kind = name.removeprefix("torch ").removesuffix("Storage")
    if name == f"torch {kind}Storage" and kind in STORAGES:
        return Global(name)
    if name not in ALLOWED:
        shown = name.replace(" ", ".")[:200]
        raise UntrustedPickleError(
            f"the pickle names {shown!r}, which is not on the list of what tensors and plain values"
            " need: nothing was run; if you trust its origin, save it again with plain values only"
        )
    return Global(name)


def call(function: Global, arguments: tuple[Any, ...]) -> Any:
    maker = ALLOWED.get(function.name)
    if maker is None:
        raise Malformed(f"pickle: a call of {function.name!r}")
    return maker(*arguments)


def checked_key(value: Any) -> Any:
    """A text or a number below 2^60: hashing nested tuples recurses, large integers collide."""
    if isinstance(value, str) or (isinstance(value, int) and abs(value) < 1 << 60):
        return value
    raise Malformed(f"a key that is a {type(value).__name__}, expected text or a small integer")


def _view(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any = False,
    hooks: Any = None,
    bits: Any = None,
    *_: Any,
) -> View:
    if not isinstance(storage, Storage):
        raise Malformed("pickle: a tensor without a storage")
    but = _bits(bits)
    return View(storage.dtype, storage, _count(offset), _counts(shape), _counts(strides), but)


def _bits(bits: Any) -> str:
    """The names that are set in what torch keeps of a tensor beside its storage."""
    if not isinstance(bits, dict | None):
        raise Malformed("pickle: a tensor with strange metadata")
    return ", ".join(sorted(str(name)[:100] for name, is_set in (bits or {}).items() if is_set))


def _view_as(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    bits: Any = None,
    *_: Any,
) -> View:
    """``_rebuild_tensor_v3``: the storage is of bytes, the dtype stands beside it."""
    if not isinstance(dtype, Global) or dtype.name not in DTYPES:
        raise Malformed("pickle: a tensor of an unknown dtype")
    view = _view(storage, offset, shape, strides, grad, hooks, bits)
    return view._replace(dtype=DTYPES[dtype.name])


def _with_attributes(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """``_rebuild_from_type_v2``: a tensor with attributes of its own, which are left out."""
    if not isinstance(function, Global) or not isinstance(arguments, tuple):
        raise Malformed("pickle: a call of what is no function")
    return _same(call(function, arguments))


def _same(value: Any, *_: Any) -> View:
    if not isinstance(value, View):
        raise Malformed("pickle: a parameter without a tensor")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Malformed(f"pickle: {type(value).__name__} where a count was expected")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > 64:
        raise Malformed("pickle: no shape")
    return tuple(map(_count, value))


def _ordered(*arguments: Any) -> OrderedDict[Any, Any]:
    if arguments:
        raise Malformed("pickle: an OrderedDict with arguments")
    return OrderedDict()


def _set(items: Any = ()) -> set[Any]:
    if not isinstance(items, list | tuple):
        raise Malformed("pickle: a set of no list")
    return set(map(checked_key, items))


def _encoded(text: Any, encoding: Any) -> bytes:
    """How bytes are written before protocol 3."""
    if not isinstance(text, str) or encoding != "latin1":
        raise Malformed("pickle: encoded text")
    return text.encode("latin1")


def _device(kind: Any, *index: Any) -> str:
    if not isinstance(kind, str):
        raise Malformed("pickle: a device without a kind")
    return ":".join([kind, *map(str, map(_count, index))])


ALLOWED: dict[str, Callable[..., Any] | None] = {
    "torch._utils _rebuild_tensor": _view,
    "torch._utils _rebuild_tensor_v2": _view,
    "torch._utils _rebuild_tensor_v3": _view_as,
    "torch._utils _rebuild_parameter": _same,
    "torch._utils _rebuild_parameter_with_state": _same,
    "torch._tensor _rebuild_from_type_v2": _with_attributes,
    "torch Size": _counts,
    "torch device": _device,
    "torch Tensor": None,
    "torch.nn.parameter Parameter": None,
    "torch.storage UntypedStorage": None,
    "collections OrderedDict": _ordered,
    "_codecs encode": _encoded,
    "builtins set": _set,
    "__builtin__ set": _set,
}
"""What a pickle may name, and what it stands for here; None for what is never called."""
