"""How wide the elements of torch's storages are, read off the pickle without running it.

``torch.save`` pickles a storage as the persistent id ``("storage", <class>, <key>, <device>,
<count>)`` (torch/serialization.py, ``_save``), by protocol 1 or later. The operations of the pickle
are passed one by one, none is executed; those that build such a tuple are followed. `pickletools`
says how long each is; its `genops` makes an object of every argument and takes six times as long.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator

_OPERATIONS = 500_000
_MEMO = 10_000
_WINDOW = 8
_LONGEST = 256
_WIDTHS = {
    **dict.fromkeys((b"DoubleStorage", b"LongStorage", b"ComplexDoubleStorage"), 8),
    **dict.fromkeys((b"FloatStorage", b"IntStorage", b"QInt32Storage", b"ComplexFloatStorage"), 4),
    **dict.fromkeys((b"HalfStorage", b"BFloat16Storage", b"ShortStorage"), 2),
    **dict.fromkeys((b"CharStorage", b"ByteStorage", b"BoolStorage"), 1),
    **dict.fromkeys((b"QInt8Storage", b"QUInt8Storage"), 1),
}

_CODES = {o.name: ord(o.code) for o in pickletools.opcodes}
_FIXED = {  # bytes of the argument
    o.name: o.arg.n if o.arg else 0
    for o in pickletools.opcodes
    if o.name != "STOP" and (o.arg is None or o.arg.n >= 0)
}


def _take(*names: str) -> dict[int, int]:
    """Of operations whose argument has a fixed length, that length by code; takes them away."""
    return {_CODES[n]: _FIXED.pop(n) for n in names}


_PUT = _take("BINPUT", "LONG_BINPUT", "MEMOIZE")
_GET = _take("BINGET", "LONG_BINGET")
_NO_VALUE = _take("MARK", "TUPLE", "PROTO", "FRAME")
_take("BINPERSID", "STACK_GLOBAL")
_OTHER = _take(*_FIXED)
_COUNTED = {  # bytes of the count that stands before the argument
    **{_CODES[n]: 1 for n in ("SHORT_BINUNICODE", "SHORT_BINSTRING", "SHORT_BINBYTES", "LONG1")},
    **{_CODES[n]: 4 for n in ("BINUNICODE", "BINSTRING", "BINBYTES", "LONG4")},
    **{_CODES[n]: 8 for n in ("BINUNICODE8", "BINBYTES8", "BYTEARRAY8")},
}
_LINES = {_CODES[n] for n in ("INT", "LONG", "FLOAT")}
_MARK, _TUPLE, _MEMOIZE, _GLOBAL = (_CODES[n] for n in ("MARK", "TUPLE", "MEMOIZE", "GLOBAL"))
_PERSISTENT, _STACK_GLOBAL = _CODES["BINPERSID"], _CODES["STACK_GLOBAL"]


def widths(pickle: bytes | bytearray, keys: set[str]) -> dict[str, int]:
    """Width in bytes for those of ``keys`` that the pickle, whole or cut short, gives a type.

    A hint: what cannot be followed is left out. `UntypedStorage` has no width.
    """
    found: dict[str, int] = {}
    missing = set(keys)
    for kind, name in _storages(bytes(pickle)) if missing else ():
        key, width = name.decode("utf-8", "replace"), _WIDTHS.get(kind)
        if key in missing and width:
            found[key] = width
        missing.discard(key)
        if not missing:
            break
    return found


def _storages(pickle: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Class name and key of each storage, in order, up to what is not understood.

    One loop, almost without calls: a torch file has thousands of operations.
    """
    memo: dict[int, bytes] = {}
    window: list[bytes | None] = []  # texts and other values since the last MARK, the first few
    value: bytes | None = None
    at, end, memoized = 0, len(pickle), 0
    for _ in range(_OPERATIONS):
        if at >= end or len(memo) >= _MEMO:
            return
        code = pickle[at]
        at += 1
        if code in _OTHER:
            at += _OTHER[code]
            value = None
        elif code in _PUT:
            stop = at + _PUT[code]
            place = memoized if code == _MEMOIZE else int.from_bytes(pickle[at:stop], "little")
            at = stop
            memoized += 1
            if value and (value.startswith(b"torch") or b"torage" in value):  # an id's, no more
                memo[place] = value
            elif place in memo:
                del memo[place]
            continue
        elif code in _GET:
            stop = at + _GET[code]
            value = memo.get(int.from_bytes(pickle[at:stop], "little"))
            at = stop
        elif code in _NO_VALUE:
            at += _NO_VALUE[code]
            if code == _MARK:
                window.clear()
            elif code == _TUPLE:
                value = None
            continue
        elif code == _PERSISTENT:
            if len(window) > 2 and window[0] == b"storage" and window[1] and window[2]:
                yield (window[1].split() or [b""])[-1], window[2]
            window.clear()
            value = None
            continue
        elif code == _STACK_GLOBAL:
            value = b" ".join(part or b"" for part in window[-2:])
            del window[-2:]
        else:
            start, at = _stretch(pickle, code, at)
            if not start <= at <= end:
                return
            value = pickle[start:at]
        if value and len(value) > _LONGEST:  # it would let the pickle decide what is allocated
            value = None
        if len(window) < _WINDOW:
            window.append(value)


def _stretch(pickle: bytes, code: int, start: int) -> tuple[int, int]:
    """Where an argument of no fixed length lies; backwards where it does not end.

    What is in no table, no pickle with the id of a storage has.
    """
    if code == _GLOBAL:
        return start, pickle.find(b"\n", pickle.find(b"\n", start) + 1) + 1
    if code in _LINES:
        return start, pickle.find(b"\n", start) + 1
    if code not in _COUNTED:
        return start, -1
    first = start + _COUNTED[code]
    return first, first + int.from_bytes(pickle[start:first], "little")
