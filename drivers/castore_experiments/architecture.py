"""What a model is made of, without its weights: the content behind the MODEL segment.

Counted, all in the order of registration: every module's dotted name, class name and settings;
every parameter's and buffer's name, shape and element type, persistent or not; which names are
one tensor; and the step the model was initialised at.

A module's *settings* are the plain public values that its constructor sets and no other method of
its class changes, and those its class lists in ``__constants__``: ``Linear.in_features``,
``Conv2d.stride``, ``Dropout.p``, ``LeakyReLU.negative_slope``, or ``self.scale = 0.5`` of a class
of one's own. Plain are None, booleans, numbers, text, element types, enums, functions (by name),
and tuples and lists of them. So a counter that ``forward`` moves on does not count. Of torch's own
classes, arguments of the constructor alone count: what they derive from them changes with torch.

Not counted: weights, devices, gradients, training or evaluation mode, hooks, strides in memory,
the module a class was defined in, and the code of ``forward``. A change of code alone keeps the
digest; give the class another name, or a setting, to tell two such models apart. A value that the
*training loop* sets on a module counts if the constructor sets it too: begin its name with an
underscore.

Wrappers (compiled modules, data parallel ones) are looked through wherever they stand, so a model
has one digest in and out of them. The same class built twice, or moved, has one digest.
"""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from castore import FormatError, InvalidInputError
from castore_experiments import canonical

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_KIND, _FORMAT = "castore.architecture", 1
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
_DEVICE = re.compile(r"(?:cpu|cuda|mps|xpu|meta|hpu|xla)(?::[0-9]+)?")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
_LONGEST = 256
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
# They copy or unpickle a module; what they set was set by a constructor before.
_COPIERS = ("__setstate__", "__deepcopy__", "__copy__")


@dataclass(frozen=True)
class ModuleEntry:
    """One module: dotted name ('' for the model itself), class name, settings by name."""

    name: str
    kind: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class TensorEntry:
    """One parameter or buffer; ``role`` is ``parameter``, ``buffer`` or ``temporary buffer``."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Description:
    """An architecture and the step it was initialised at; equal ones have equal digests."""

    init_step: int
    modules: tuple[ModuleEntry, ...]
    tensors: tuple[TensorEntry, ...]
    ties: tuple[tuple[str, ...], ...]

    def encode(self) -> bytes:
        """Canonical text (see `canonical.spell`): equal bytes for equal descriptions."""
        return canonical.spell(
            {
                "kind": _KIND,
                "format": _FORMAT,
                "init_step": self.init_step,
                "modules": [[m.name, m.kind, dict(m.settings)] for m in self.modules],
                "tensors": [[t.name, t.role, list(t.shape), t.dtype] for t in self.tensors],
                "ties": [list(names) for names in self.ties],
            }
        )

    def digest(self) -> str:
        """Full digest of the MODEL segment: BLAKE3-256 of `encode`, 64 hex characters."""
        return blake3(self.encode()).hexdigest()

    @classmethod
    def decode(cls, data: bytes, where: str = "architecture") -> Description:
        """The description that `encode` wrote.

        Raises
        ------
        FormatError
            Not such a document, or of a newer format.
        """
        document = canonical.decode(data, where)
        if document.get("kind") != _KIND or document.get("format") != _FORMAT:
            raise FormatError(
                f"{where}: expected {_KIND} of format {_FORMAT}, found {document.get('kind')!r} "
                f"of format {document.get('format')!r}: upgrade castore if it is newer"
            )
        try:
            found = cls(
                init_step=document["init_step"],
                modules=tuple(ModuleEntry(*row) for row in document["modules"]),
                tensors=tuple(
                    TensorEntry(name, role, tuple(shape), dtype)
                    for name, role, shape, dtype in document["tensors"]
                ),
                ties=tuple(tuple(names) for names in document["ties"]),
            )
            again = found.encode()
        except (KeyError, TypeError, ValueError) as e:
            raise FormatError(f"{where}: malformed: {e!r}") from e
        if again != data:
            raise FormatError(f"{where}: unknown or missing keys")
        return found


def describe(model: object, init_step: int = 0) -> Description:
    """Describe ``model``, an ``nn.Module`` or an object that has one as its ``model``.

    Parameters
    ----------
    model : torch.nn.Module
        On any device, also ``meta``; wrapped or not.
    init_step : int
        The step it was initialised at, 0 or more.

    Raises
    ------
    InvalidInputError
        It is no module; it has lazy parameters that no forward pass has sized yet; it is scripted;
        it holds itself; or ``init_step`` is no step. The message names the module.
    """
    if isinstance(init_step, bool) or not isinstance(init_step, int) or init_step < 0:
        raise InvalidInputError(f"init_step: expected a step of 0 or more, found {init_step!r}")
    modules, tensors = [], []
    owners: dict[object, list[str]] = {}
    scanned: dict[type, frozenset[str]] = {}
    for name, module in _walk(_module_of(model), "", ()):
        kind = type(module)
        if kind not in scanned:
            scanned[kind] = _set_by_constructor(kind)
        modules.append(ModuleEntry(name, kind.__name__, _settings(module, scanned[kind])))
        for entry, tensor in _tensors(name, module):
            tensors.append(entry)
            owners.setdefault(_place(tensor), []).append(entry.name)
    ties = tuple(tuple(names) for names in owners.values() if len(names) > 1)
    return Description(init_step, tuple(modules), tuple(tensors), ties)


def _module_of(model: object) -> Module:
    from torch.nn import Module

    inner = model if isinstance(model, Module) else getattr(model, "model", None)
    if not isinstance(inner, Module) or isinstance(model, type):
        raise InvalidInputError(
            f"model: expected a torch.nn.Module (or an object with one as .model), found "
            f"{type(model).__qualname__}"
        )
    return inner


def _walk(module: Module, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, Module]]:
    """Each module under each of its names, outermost first, wrappers left out."""
    module = _unwrapped(module, name)
    if id(module) in above:
        raise InvalidInputError(f"model: module {name!r}: it holds itself")
    yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, _join(name, child_name), (*above, id(module)))


def _unwrapped(module: Module, name: str) -> Module:
    from torch.jit import ScriptModule

    while not isinstance(module, ScriptModule):
        children = module._modules
        inner = children.get("_orig_mod")
        if inner is None and {c.__name__ for c in type(module).__mro__} & {*_WRAPPERS}:
            inner = children.get("module") or children.get("_fsdp_wrapped_module")
        if inner is None:
            return module
        module = inner
    raise InvalidInputError(
        f"model: module {name!r}: a scripted or traced module does not show its settings: watch "
        "the module it was made of"
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _tensors(prefix: str, module: Module) -> Iterator[tuple[TensorEntry, Tensor]]:
    """The module's own parameters, then its buffers, in the order they were registered."""
    from torch.nn.parameter import is_lazy

    temporary = module._non_persistent_buffers_set
    own: list[tuple[str, Tensor | None, str]]
    own = [(n, t, "parameter") for n, t in module._parameters.items()]
    own += [
        (n, t, "temporary buffer" if n in temporary else "buffer")
        for n, t in module._buffers.items()
    ]
    for name, tensor, role in own:
        if tensor is None:
            continue
        full = _join(prefix, name)
        if is_lazy(tensor):
            raise InvalidInputError(
                f"model: {full} has no shape yet: run one batch through the lazy module first"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield TensorEntry(full, role, tuple(map(int, tensor.shape)), dtype), tensor


def _place(tensor: Tensor) -> object:
    """Equal for tensors that are the same memory seen the same way.

    Views of different parts of one buffer are not ties: recurrent layers lay their weights out like
    that on some devices only.
    """
    try:
        storage = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return id(tensor)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


_SKIP = object()


def _settings(module: Module, names: frozenset[str]) -> dict[str, Any]:
    found = {n: _plain(v) for n, v in vars(module).items() if n in names and n[:1] != "_"}
    return canonical.normal({n: v for n, v in found.items() if v is not _SKIP})


def _plain(value: Any) -> Any:
    """``value`` as something a setting may be, or `_SKIP` if it does not tell an architecture."""
    import torch

    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, str):
        return _SKIP if _DEVICE.fullmatch(value) or _ADDRESS.search(value) else value
    if value is None or isinstance(value, bool | int | float | complex | np.generic | torch.dtype):
        return value
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return {"function": value.__name__}
    if isinstance(value, list | tuple):
        return _plain_sequence(value)
    return _SKIP


def _plain_sequence(value: list[Any] | tuple[Any, ...]) -> Any:
    items = [_plain(v) for v in value]
    if any(v is _SKIP for v in items):
        return _SKIP
    if len(items) > _LONGEST:
        return {"values": len(items), "blake3": blake3(canonical.encode({"": items})).hexdigest()}
    return tuple(items) if isinstance(value, tuple) else items


def _set_by_constructor(kind: type) -> frozenset[str]:
    """Names of attributes that a constructor of ``kind`` assigns and no other method does."""
    from torch.nn import Module

    first, later, constants = set[str](), set[str](), set[str]()
    for base in kind.__mro__:
        if base in (Module, object):
            continue
        found = {n: set(_assigned(_code(m))) for n, m in vars(base).items() if n not in _COPIERS}
        mine = set[str]().union(*(found.get(name, ()) for name in _CONSTRUCTORS))
        if base.__module__.startswith("torch."):
            # What they derive from their arguments differs from one torch to the next.
            mine &= _arguments(_code(vars(base).get("__init__")))
        else:
            constants.update(vars(base).get("__constants__", ()))
        first |= mine
        later.update(*(names for name, names in found.items() if name not in _CONSTRUCTORS))
    return frozenset((first - later) | constants) - {"training"}


def _arguments(code: types.CodeType | None) -> set[str]:
    return (
        set()
        if code is None
        else set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    )


def _code(member: object) -> types.CodeType | None:
    """The code of a method, class method or property's getter, seen through its decorators."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _assigned(code: types.CodeType | None) -> Iterator[str]:
    """Names of attributes that ``code``, or a function within it, assigns."""
    if code is None:
        return
    for step in dis.get_instructions(code):
        if step.opname == "STORE_ATTR":
            yield str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _assigned(constant)
