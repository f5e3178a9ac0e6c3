"""What a torch file's pickle says, its operations interpreted here; nothing is unpickled.

The few operations that ``torch.save`` writes for dicts, lists, texts, numbers and tensors are
followed with a stack of our own. A function is never called and a class never imported: a name
that is not in `castore.cutters.named` ends the reading with `UntrustedPickleError`. Work and
memory are proportional to the pickle's bytes, and nothing here recurses.

Operations: https://docs.python.org/3/library/pickletools.html; what torch writes:
torch/serialization.py (``_save``, persistent ids) and torch/_utils.py (``_rebuild_*``).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from castore.cutters import Malformed
from castore.cutters.named import STORAGES, Global, Storage, call, checked_key, named

_LONG = 64  # bytes of an integer


def interpret(pickle: bytes | bytearray) -> Any:
    """The value that ``pickle`` describes: dict, list, tuple, set, text, number, bytes, `View`.

    An ``OrderedDict`` keeps the ``_metadata`` that a state dict carries. Containers may be shared
    and may hold one another: who walks them bounds depth and count.

    Raises
    ------
    UntrustedPickleError
        The pickle names something that is not on the list; the message says what.
    Malformed
        It is damaged, or uses an operation that torch does not write.
    """
    machine = _Machine(pickle)
    try:
        return machine.run()
    except (struct.error, IndexError, KeyError, TypeError, ValueError, OverflowError) as e:
        if isinstance(e, Malformed):
            raise
        raise Malformed(f"pickle, byte {machine.at}: {type(e).__name__}") from e


class _Machine:
    def __init__(self, data: bytes | bytearray):
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, table = self.data, _TABLE
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                if self.marks or len(self.stack) != 1:
                    raise Malformed("pickle: values left over")
                return self.stack[0]
            operation = table.get(code)
            if operation is None:
                raise Malformed(f"pickle, byte {self.at - 1}: operation {code:#04x}")
            operation(self)

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise Malformed("pickle: cut short")
        self.at += count
        return bytes(self.data[self.at - count : self.at])

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        if end - self.at > 1024:
            raise Malformed("pickle: a name over 1024 bytes")
        text = self.take(end - self.at).decode()
        self.at += 1
        return text

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def container(self, kind: type) -> Any:
        found = self.stack[-1]
        if not isinstance(found, kind):
            raise Malformed(f"pickle, byte {self.at}: no {kind.__name__} to fill")
        return found


# -- operations: numbers, texts, containers, memo

_U1, _U2, _I4, _U4, _U8, _F8 = (struct.Struct(f) for f in ("<B", "<H", "<i", "<I", "<Q", ">d"))
_STOP = 0x2E


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


def _numbered(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.number(form))


def _text(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.take(m.number(form)).decode("utf-8", "surrogatepass"))


def _bytes(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.take(m.number(form)))


def _long(form: struct.Struct) -> Callable[[_Machine], None]:
    def push(m: _Machine) -> None:
        count = m.number(form)
        if not 0 <= count <= _LONG:
            raise Malformed(f"pickle: an integer of {count} bytes")
        m.stack.append(int.from_bytes(m.take(count), "little", signed=True))

    return push


def _put(form: struct.Struct) -> Callable[[_Machine], None]:
    def remember(m: _Machine) -> None:
        m.memo[m.number(form)] = m.stack[-1]

    return remember


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _get(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.memo[m.number(form)])


def _mark(m: _Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _tuple(count: int) -> Callable[[_Machine], None]:
    def pack(m: _Machine) -> None:
        if count > len(m.stack):
            raise Malformed("pickle: too few values for a tuple")
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return pack


def _marked_tuple(m: _Machine) -> None:
    items = tuple(m.since_mark())
    m.stack.append(items)


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    m.container(list).append(value)


def _appends(m: _Machine) -> None:
    items = m.since_mark()
    m.container(list).extend(items)


def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.container(dict)[checked_key(key)] = value


def _set_items(m: _Machine) -> None:
    items = m.since_mark()
    if len(items) % 2:
        raise Malformed("pickle: a key without a value")
    target = m.container(dict)
    for i in range(0, len(items), 2):
        target[checked_key(items[i])] = items[i + 1]


def _add_items(m: _Machine) -> None:
    items = m.since_mark()
    m.container(set).update(map(checked_key, items))


# -- names, calls, persistent ids


def _global(m: _Machine) -> None:
    module, name = m.line(), m.line()
    m.stack.append(named(f"{module} {name}"))


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise Malformed("pickle: a name that is no text")
    m.stack.append(named(f"{module} {name}"))


def _reduce(m: _Machine) -> None:
    arguments, function = m.stack.pop(), m.stack.pop()
    if not isinstance(function, Global) or not isinstance(arguments, tuple):
        raise Malformed(f"pickle, byte {m.at}: a call of what is no function")
    m.stack.append(call(function, arguments))


def _build(m: _Machine) -> None:
    """State given to an object: a state dict's ``_metadata``; everything else is refused."""
    state, target = m.stack.pop(), m.stack[-1]
    if not isinstance(target, OrderedDict) or not isinstance(state, dict):
        raise Malformed(f"pickle, byte {m.at}: state for a {type(target).__name__}")
    if isinstance(state.get("_metadata"), dict):
        target._metadata = state["_metadata"]  # type: ignore[attr-defined]


def _persistent(m: _Machine) -> None:
    match m.stack.pop():
        case ("storage", Global(name), str(key), str(), int(count), *_) if count >= 0:
            kind = name.rpartition(" ")[2].removesuffix("Storage")
            if kind != "Untyped" and kind not in STORAGES:
                raise Malformed(f"pickle: a storage of {name!r}")
            m.stack.append(Storage(STORAGES.get(kind, ""), key, count))
        case _:
            raise Malformed(f"pickle, byte {m.at}: an unknown persistent id")


_TABLE: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda m: m.number(_U1),  # PROTO
    0x95: lambda m: m.number(_U8),  # FRAME
    ord("("): _mark,
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("J"): _numbered(_I4),
    ord("K"): _numbered(_U1),
    ord("M"): _numbered(_U2),
    ord("G"): _numbered(_F8),
    0x8A: _long(_U1),
    0x8B: _long(_I4),
    0x8C: _text(_U1),
    ord("X"): _text(_U4),
    0x8D: _text(_U8),
    ord("C"): _bytes(_U1),
    ord("B"): _bytes(_U4),
    0x8E: _bytes(_U8),
    ord("]"): lambda m: m.stack.append([]),
    ord("}"): lambda m: m.stack.append({}),
    ord(")"): _constant(()),
    0x8F: lambda m: m.stack.append(set()),
    ord("t"): _marked_tuple,
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _set_item,
    ord("u"): _set_items,
    0x90: _add_items,
    ord("q"): _put(_U1),
    ord("r"): _put(_U4),
    0x94: _memoize,
    ord("h"): _get(_U1),
    ord("j"): _get(_U4),
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _reduce,
    ord("b"): _build,
    ord("Q"): _persistent,
}
