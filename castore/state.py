"""What a check has verified so far, in a text file, so that an interrupted run can go on."""

from __future__ import annotations

from pathlib import Path

from castore.errors import InvalidInputError


class VerifiedState:
    """A text file of what was verified: repository id, then digest and version a line."""

    _END = "complete"

    def __init__(self, path: str | None, repository: str):
        self._path, self._head = Path(path) if path else None, f"castore check {repository}"
        self._done: set[str] = set()

    def __enter__(self) -> VerifiedState:
        if self._path is None:
            return self
        try:
            lines = self._path.read_text().splitlines() if self._path.exists() else []
        except (OSError, UnicodeDecodeError) as e:
            raise InvalidInputError(f"{self._path} cannot be read as a state file: {e}") from e
        if lines and lines[0] != self._head:
            raise InvalidInputError(
                f"{self._path} is not the state of a check of this repository: choose another file"
            )
        going_on = bool(lines) and lines[-1] != self._END
        self._done = set(lines[1:]) if going_on else set()
        self._file = self._path.open("a" if going_on else "w")
        if not going_on:
            self._file.write(self._head + "\n")
        return self

    def has(self, digest: str, version: str) -> bool:
        return f"{digest} {version}" in self._done

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
