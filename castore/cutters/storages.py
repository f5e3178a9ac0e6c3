"""How wide the elements of torch's storages are, read off the pickle without running it.

``torch.save`` pickles a storage as the persistent id ``("storage", <class>, <key>, <device>,
<count>)`` (torch/serialization.py, ``_save``). `pickletools.genops` lists a pickle's operations
and executes none; those that build such a tuple are followed, everything else is passed over.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator

_OPERATIONS = 500_000
_MEMO = 10_000
_WINDOW = 8
_LONGEST = 256
_WIDTHS = {
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexDoubleStorage"), 8),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage", "ComplexFloatStorage"), 4),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("CharStorage", "ByteStorage", "BoolStorage"), 1),
    **dict.fromkeys(("QInt8Storage", "QUInt8Storage"), 1),
}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}
_NO_VALUE = {"PROTO", "FRAME"}


def widths(pickle: bytes | bytearray, keys: set[str]) -> dict[str, int]:
    """Width in bytes for those of ``keys`` that the pickle, whole or cut short, gives a type.

    A hint: what cannot be followed is left out. `UntypedStorage` has no width.
    """
    found: dict[str, int] = {}
    missing = set(keys)
    if not missing:
        return found
    try:
        for kind, key in _storages(pickle):
            width = _WIDTHS.get(kind)
            if key in missing and width:
                found[key] = width
            missing.discard(key)
            if not missing:
                break
    # All that the argument readers of pickletools raise; a warning where those are errors.
    except (ValueError, OverflowError, IndexError, AssertionError, Warning):
        pass
    return found


def _storages(pickle: bytes | bytearray) -> Iterator[tuple[str, str]]:
    """Class name and key of each storage, in order."""
    followed = _Followed()
    for n, (operation, argument, _) in enumerate(pickletools.genops(pickle)):
        if n >= _OPERATIONS or len(followed.memo) >= _MEMO:
            return
        if operation.name == "BINPERSID":
            yield from followed.storage()
        else:
            followed.step(operation.name, argument)


class _Followed:
    """The texts among the values a pickle pushed since its last MARK, the first few of them."""

    def __init__(self) -> None:
        self.memo: dict[int, str] = {}
        self._window: list[str | None] = []
        self._last: str | None = None
        self._memoized = 0

    def storage(self) -> Iterator[tuple[str, str]]:
        match self._window:
            case ["storage", str(kind), str(key), *_]:
                yield kind.rpartition(" ")[2], key
        self._window.clear()
        self._last = None

    def step(self, name: str, argument: object) -> None:
        if name in _PUT:
            self._remember(argument)
        elif name == "MEMOIZE":
            self._remember(self._memoized)
        elif name == "MARK":
            self._window.clear()
        elif name == "TUPLE":
            self._last = None
        elif name == "STACK_GLOBAL":
            text = " ".join(str(part) for part in self._window[-2:])
            del self._window[-2:]
            self._push(text)
        elif name not in _NO_VALUE:
            self._push(self._recall(argument) if name in _GET else argument)

    def _recall(self, place: object) -> str | None:
        return self.memo.get(place) if isinstance(place, int) else None

    def _push(self, value: object) -> None:
        # A longer text is no part of an id; kept, it would let a pickle decide what is allocated.
        self._last = value if isinstance(value, str) and len(value) <= _LONGEST else None
        if len(self._window) < _WINDOW:
            self._window.append(self._last)

    def _remember(self, place: object) -> None:
        """Keep what a storage's id can refer to, and only that."""
        self._memoized += 1
        value = self._last
        if not isinstance(place, int):
            return
        if value and (value == "storage" or value.startswith("torch") or "Storage" in value):
            self.memo[place] = value
        else:
            self.memo.pop(place, None)
