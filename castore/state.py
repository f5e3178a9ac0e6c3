"""What a check has verified so far, in a text file, so that an interrupted run can go on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from castore.errors import InvalidInputError


class VerifiedState:
    """A text file of what was verified: repository id (and part), then digest and version a line.

    In memory 16 bytes a line. ``going_on``: an interrupted run left it.
    """

    _END = "complete"

    def __init__(self, path: str | None, repository: str):
        self._path, self._head = Path(path) if path else None, f"castore check {repository}"
        self._done = _marks([])
        self.going_on = False

    def __enter__(self) -> VerifiedState:
        if self._path is None:
            return self
        try:
            head, last = self._read(self._path)
        except (OSError, UnicodeDecodeError) as e:
            raise InvalidInputError(f"{self._path} cannot be read as a state file: {e}") from e
        if head not in ("", self._head):
            raise InvalidInputError(
                f"{self._path} is not the state of a check of this repository, or of this part:"
                " choose another file"
            )
        self.going_on = head != "" and last != self._END
        self._file = self._path.open("a" if self.going_on else "w")
        if not self.going_on:
            self._file.write(self._head + "\n")
        return self

    def _read(self, path: Path) -> tuple[str, str]:
        """The file's first and last line; what is between is kept as marks."""
        if not path.exists():
            return "", ""
        last = ""
        with path.open() as file:
            head = file.readline().rstrip("\n")
            marks = bytearray()
            for line in file:
                last = line.rstrip("\n")
                marks += _mark(last)
        self._done = np.frombuffer(bytes(marks), "S16")
        return head, last or head

    def has(self, lines: Iterable[tuple[str, str]]) -> NDArray[np.bool_]:
        """Which of these digests and versions were verified already."""
        return np.isin(_marks(f"{digest} {version}" for digest, version in lines), self._done)

    def add(self, digest: str, version: str) -> None:
        if self._path is not None:
            self._file.write(f"{digest} {version}\n")

    def finish(self) -> None:
        """The run is complete: the next one begins anew."""
        if self._path is not None:
            self._file.write(self._END + "\n")

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._file.close()


def _mark(line: str) -> bytes:
    return xxhash.xxh3_128_digest(line.encode())


def _marks(lines: Iterable[str]) -> NDArray[Any]:
    return np.frombuffer(b"".join(map(_mark, lines)), "S16")
