"""A look at a pickle before torch's restricted reader has it: does it ask for memory by a number?

That reader calls ``bytearray`` with whatever the pickle gives, and ``bytearray(10**10)`` takes
40 bytes to write. What `pickletools` says of each operation is followed; nothing is run.
"""

from __future__ import annotations

import pickletools
from typing import Any

from castore import FormatError

_NUMBERS = {"int", "long", "int_or_bool"}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}


def check(pickle: bytes, where: str) -> None:
    """`FormatError` where a ``bytearray`` is made of a number, or the pickle cannot be followed."""
    if b"bytearray" not in pickle:
        return
    try:
        _Followed(where).run(pickle)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as e:
        if isinstance(e, FormatError):
            raise
        raise FormatError(f"{where}: its pickle cannot be followed: {e}") from e


class _Followed:
    """A stack of what matters: "int", "bytearray", tuples of these, and None for all else."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, pickle: bytes) -> None:
        for operation, argument, _ in pickletools.genops(pickle):
            self._step(operation, argument)

    def _step(self, operation: Any, argument: Any) -> None:
        name = operation.name
        if name in _PUT:
            self._memo[argument] = self._stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in _GET:
            self._stack.append(self._memo[argument])
        elif name == "MARK":
            self._marks.append(self._stack)
            self._stack = []
        else:
            taken = self._take(operation)
            if name in ("REDUCE", "NEWOBJ"):
                self._called(*taken)
            self._stack += [self._made(operation, argument, taken)] * len(operation.stack_after)

    def _take(self, operation: Any) -> list[Any]:
        """What the operation takes off the stack."""
        before = operation.stack_before
        if pickletools.markobject in before:
            items, self._stack = self._stack, self._marks.pop()
            count = before.index(pickletools.markobject)
        else:
            items, count = [], len(before)
        first = len(self._stack) - count
        if first < 0:
            raise ValueError("it takes more than there is")
        items, self._stack = self._stack[first:] + items, self._stack[:first]
        return items

    def _made(self, operation: Any, argument: Any, taken: list[Any]) -> Any:
        if operation.name.startswith("TUPLE"):
            return tuple(taken)
        if operation.name == "GLOBAL" and str(argument).endswith(" bytearray"):
            return "bytearray"
        kinds = {kind.name for kind in operation.stack_after}
        return "int" if kinds & _NUMBERS and type(argument) is int else None

    def _called(self, function: Any, arguments: Any) -> None:
        if function == "bytearray" and (not isinstance(arguments, tuple) or "int" in arguments):
            raise FormatError(
                f"{self._where}: it asks for memory by a number, which no writer does"
            )
