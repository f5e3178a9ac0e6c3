"""Every error castore raises, grouped by what a handler does.

    CastoreError                      1
      NotFoundError (LookupError)
        ObjectNotFoundError
        SnapshotNotFoundError
        RepositoryNotFoundError      10
      AlreadyExistsError (FileExistsError)
      IntegrityError                 11
        CorruptObjectError
        ReceiptMismatchError
      FormatError (ValueError)
      LayoutError (ValueError)
      InvalidInputError (ValueError)
      UntrustedPickleError           12
      BackendError (OSError)         13

The number is the exit code of the command line. A message says what happened, where, what was
expected and found, and what to do next. The tree is pinned by ``tests/test_errors.py``.
"""

from __future__ import annotations

from typing import ClassVar


class CastoreError(Exception):
    """Base of all errors of this package."""

    exit_code: ClassVar[int] = 1


class NotFoundError(CastoreError, LookupError):
    """Something that was asked for by name is not there, and the store said so."""


class ObjectNotFoundError(NotFoundError):
    """A named object (a blob, a tree, a document) is missing from the repository."""


class SnapshotNotFoundError(NotFoundError):
    """No snapshot, or more than one, matches what was asked for."""


class RepositoryNotFoundError(NotFoundError):
    """There is no repository at this URL."""

    exit_code: ClassVar[int] = 10


class AlreadyExistsError(CastoreError, FileExistsError):
    """An exclusive create, or a compare-and-swap, met something else under the name."""


class IntegrityError(CastoreError):
    """Stored bytes are not what their name or record promises."""

    exit_code: ClassVar[int] = 11


class CorruptObjectError(IntegrityError):
    """An object's bytes do not match its digest or its frame is damaged.

    Parameters
    ----------
    message : str
        What is damaged and what to do next.
    name : str
        The object's digest (or document name).
    expected, actual : str
        Digest or checksum promised and found; empty where it does not apply.
    """

    def __init__(self, message: str, *, name: str = "", expected: str = "", actual: str = ""):
        super().__init__(message)
        self.name, self.expected, self.actual = name, expected, actual

    def __reduce__(self) -> tuple[object, ...]:
        return _corrupt, (self.args[0], self.name, self.expected, self.actual)


def _corrupt(message: str, name: str, expected: str, actual: str) -> CorruptObjectError:
    return CorruptObjectError(message, name=name, expected=expected, actual=actual)


class ReceiptMismatchError(IntegrityError):
    """A receipt's numbers do not follow from the bytes beside it."""


class FormatError(CastoreError, ValueError):
    """A document is malformed, or of a newer format than this version reads."""


class LayoutError(CastoreError, ValueError):
    """A folder does not follow the layout a driver was asked to read."""


class InvalidInputError(CastoreError, ValueError):
    """The caller asked for something that cannot be stored or done."""


class UntrustedPickleError(CastoreError):
    """A pickle was met and the caller did not allow it."""

    exit_code: ClassVar[int] = 12


class BackendError(CastoreError, OSError):
    """The environment failed: network, permission, disk. The original is ``__cause__``."""

    exit_code: ClassVar[int] = 13


def lacks(error: ModuleNotFoundError) -> str:
    """What is not installed, and what installs it."""
    if "pip install" in str(error):
        return str(error)
    return (
        f"the module {error.name!r} is not installed: install the extra of what you use ("
        "'castore[experiments]', 'castore[receipts]', 'castore[pools]'), or 'castore[all]', by pip"
    )
