"""Digests of objects that must not change, leaf by leaf."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np

from castore import InvalidInputError

Leaves: TypeAlias = Mapping[str, str]
"""Digest by path; a path reads like the expression that leads to the leaf."""

Seen: TypeAlias = "dict[int, tuple[str, Any]]"
"""Where an object was met first; the object is held so that its id is not given to another."""

_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE

_MOST = 1_000_000
_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic, PurePath, range)
_NAMED = (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def leaves(watched: Mapping[str, Any]) -> dict[str, str]:
    """The digest of every leaf of every watched object.

    Objects are gone through by their content: arrays and tensors by dtype, shape and bytes,
    modules by parameters and buffers (those not saved included), dataclasses and other objects
    by fields, containers by elements. An object met again is told by where it was met first.

    Raises
    ------
    InvalidInputError
        A leaf of a kind that has no content to compare (an open file, say), with its path.
    """
    found: dict[str, str] = {}
    for name, thing in watched.items():
        for path, data in _walk(thing, name, {}):
            found[path] = hashlib.sha256(data).hexdigest()
            if len(found) > _MOST:
                raise InvalidInputError(f"{name}: over {_MOST} leaves are not watched")
    return found


def digest(found: Leaves) -> str:
    """One digest of all leaves."""
    lines = "".join(f"{path!r}\t{found[path]}\n" for path in sorted(found))
    return hashlib.sha256(b"castore-watch/1\n" + lines.encode(errors="surrogatepass")).hexdigest()


def of_object(found: Leaves, name: str) -> str:
    """The digest of one watched object's leaves."""
    own = {p: d for p, d in found.items() if p == name or p.startswith((f"{name}.", f"{name}["))}
    return digest(own)


def assert_same(before: Leaves, now: Leaves, when: str) -> None:
    """`AssertionError` that names every leaf (ten at most) that changed, came or went."""
    changed = sorted(p for p in before.keys() | now.keys() if before.get(p) != now.get(p))
    if changed:
        some = ", ".join(changed[:10]) + (", ..." if len(changed) > 10 else "")
        raise AssertionError(
            f"watched objects changed {when}: {some}: {len(changed)} of {len(before)} leaves differ"
            " from the reference taken at the start of training; nothing was published"
        )


def _walk(thing: Any, path: str, seen: Seen) -> Iterator[tuple[str, bytes]]:
    if isinstance(thing, _SCALARS) and not isinstance(thing, enum.Enum):
        yield path, f"{type(thing).__name__}:{thing!r}".encode(errors="surrogatepass")
    elif isinstance(thing, _NAMED):
        yield path, f"name:{_name(thing)}".encode()
    elif id(thing) in seen:
        yield path, f"same as {seen[id(thing)][0]}".encode(errors="surrogatepass")
    else:
        seen[id(thing)] = path, thing
        yield path, f"{_name(type(thing))}".encode()
        yield from _inside(thing, path, seen)


def _inside(thing: Any, path: str, seen: Seen) -> Iterator[tuple[str, bytes]]:
    if isinstance(thing, np.ndarray):
        yield from _array(thing, path, seen)
    elif isinstance(thing, Mapping):
        yield f"{path}[]", repr(list(thing)).encode(errors="surrogatepass")
        for key, value in thing.items():
            yield from _walk(value, f"{path}[{key!r}]", seen)
    elif isinstance(thing, Sequence):
        yield f"{path}[]", str(len(thing)).encode()
        for i, value in enumerate(thing):
            yield from _walk(value, f"{path}[{i}]", seen)
    elif isinstance(thing, Set):
        yield f"{path}[]", repr(sorted(map(repr, thing))).encode(errors="surrogatepass")
    elif isinstance(thing, bytearray | memoryview):
        yield f"{path}[]", bytes(thing)
    elif isinstance(thing, np.random.Generator | np.random.RandomState):
        yield from _walk(_stream(thing), f"{path}.state", seen)
    elif not (yield from _torch(thing, path, seen)):
        yield from _fields(thing, path, seen)


def _stream(thing: Any) -> Any:
    generator = isinstance(thing, np.random.Generator)
    return thing.bit_generator.state if generator else thing.get_state(legacy=False)


def _array(array: Any, path: str, seen: Seen) -> Iterator[tuple[str, bytes]]:
    yield f"{path}.shape", f"{array.dtype.str}{array.shape}".encode()
    if array.dtype.hasobject:
        yield from _walk(array.tolist(), f"{path}.items", seen)
    else:
        yield f"{path}.data", np.ascontiguousarray(array).tobytes()


def _torch(thing: Any, path: str, seen: Seen) -> Any:
    """Tensors and modules, where torch is loaded at all; gives whether it was one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if isinstance(thing, torch.Tensor):
        from castore_receipts.tensors import from_torch

        held = from_torch(thing, path)
        yield f"{path}.shape", f"{held.dtype}{held.shape}".encode()
        yield f"{path}.data", bytes(held.data)
        return True
    if isinstance(thing, torch.nn.Module):
        yield from _module(thing, path, seen, frozenset(vars(torch.nn.Module())))
        return True
    if isinstance(thing, torch.Generator):
        yield from _walk(thing.get_state().numpy(), f"{path}.state", seen)
        return True
    return False


def _module(module: Any, path: str, seen: Seen, internal: Set[str]) -> Iterator[tuple[str, bytes]]:
    for kind in ("parameters", "buffers"):
        for name, value in getattr(module, f"named_{kind}")():
            yield from _walk(value.detach(), f"{path}.{name}", seen)
    for name, part in module.named_modules():
        at = f"{path}.{name}" if name else path
        yield f"{at}()", f"{_name(type(part))} {part.training}".encode()
        for field in vars(part).keys() - internal:
            yield from _walk(vars(part)[field], f"{at}.{field}", seen)


def _fields(thing: Any, path: str, seen: Seen) -> Iterator[tuple[str, bytes]]:
    names = [f.name for f in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    names += [n for n in getattr(thing, "__dict__", ()) if n not in names]
    slots = [s for c in type(thing).__mro__ for s in _slots(c)]
    names += [n for n in slots if n not in names]
    if (not names and not hasattr(thing, "__dict__") and not slots) or _native(type(thing)):
        raise InvalidInputError(
            f"{path} is a {_name(type(thing))}, whose content cannot be compared: watch the arrays"
            " and settings it consists of"
        )
    for name in names:
        if hasattr(thing, name):
            yield from _walk(getattr(thing, name), f"{path}.{name}", seen)


def _native(cls: type) -> bool:
    """Whether a class of the interpreter itself holds content that its fields do not show."""
    return any(c.__flags__ & _IMMUTABLE for c in cls.__mro__ if c is not object)


def _slots(cls: type) -> Sequence[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [n for n in names if n not in ("__dict__", "__weakref__")]


def _name(thing: Any) -> str:
    if isinstance(thing, enum.Enum):
        return f"{_name(type(thing))}.{thing.name}"
    home = getattr(thing, "__module__", "")
    return f"{home}.{getattr(thing, '__qualname__', getattr(thing, '__name__', '?'))}"
