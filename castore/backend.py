"""The storage contract: named bytes, durable, all or nothing.

Everything above knows only this page. ``castore.backends`` holds what implements it (local
folders, S3, any other fsspec file system) and is the only place that knows fsspec.

Names are relative, ``/``-separated, made of ``[A-Za-z0-9._@+=~-]`` elements; see `check_name`.
Errors: a missing name is `ObjectNotFoundError`, a taken one `AlreadyExistsError`; permission,
network, disk and any other trouble is `BackendError` with the original as ``__cause__``. An
outage is never reported as "missing" or "empty". Reads may be retried inside; writes are not
retried blindly where that could turn success into a refusal. Safe to call from many threads,
after ``fork`` and in spawned processes; a backend pickles without secrets.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from castore.digest import Buffer
from castore.errors import BackendError, InvalidInputError

MISSING = ""
"""The version of a name that does not exist, for `Backend.replace`."""

MAX_OBJECT = (64 << 20) + 4096
"""Bytes of the largest thing `create` takes: one blob in its frame, one PutObject."""

MAX_REPLACE = 5 << 30
"""Bytes of the largest thing `replace` takes, which is also a root's real files: one PutObject."""

_ELEMENT = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._@+=~-]{1,255}"
_NAME = re.compile(rf"{_ELEMENT}(?:/{_ELEMENT})*")


class UnansweredError(BackendError):
    """A write was sent and no answer came: it may have happened, may not, or may happen yet."""


class ExpiredError(BackendError):
    """A delete that carried an end was refused, or given up, because the end has passed."""


@dataclass(frozen=True, slots=True)
class Stat:
    """One stored name.

    ``size`` in bytes, ``modified`` in seconds since the epoch by the store's clock, ``version``
    an opaque token that changes whenever the content does (ETag; inode, mtime and size).
    """

    name: str
    size: int
    modified: float
    version: str


class Backend(Protocol):
    """Named bytes on one file system."""

    url: str
    """Where it is, without secrets."""
    kind: str
    """``local``, ``s3`` or the fsspec protocol."""
    parallel: int
    """How many calls at once pay off."""

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes of ``name`` (or of ``[start, stop)``, cut at its end), in one request."""

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        """The bytes of ``name`` and their version, from one and the same answer."""

    def create(self, name: str, data: Buffer) -> str:
        """Store ``data`` under a new name; durable on return; gives the version.

        Whole or nothing. `AlreadyExistsError` when the name is taken: the caller looks.
        `UnansweredError` when no answer came. Sent at most once.
        """

    def create_many(self, items: Sequence[tuple[str, Buffer]]) -> list[str | None]:
        """`create` for many content-addressed names at once, in any order.

        Gives a version for each name created and None for each that was there already (not an
        error: equal names hold equal content). May be retried inside. Durable on return, the
        folders of names found present included. Raises the first failure after all have ended.
        """

    def write_many(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> list[str | None]:
        """`create_many` in two steps: what it names is durable only once `sync` was told so.

        Each content is given in parts, which are stored one after the other. No name appears
        before its content is durable, so a crash before `sync` may take names, never bytes of
        one that stays. Pays off where many calls are followed by one `sync` (local; elsewhere
        durable on return).
        """

    def sync(self, names: Iterable[str]) -> None:
        """Make names durable that were found present, or written by `write_many` (local)."""

    def replace(self, name: str, data: Buffer, if_version: str) -> str:
        """Compare and swap: store ``data`` if the version is ``if_version`` (`MISSING`: none yet).

        Gives the new version. `AlreadyExistsError` when another version is there;
        `UnansweredError` as for `create`.
        """

    def stat(self, name: str) -> Stat:
        """Size, time and version, never from a cache."""

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        """Every name under the folder ``prefix`` (recursive), sorted as text, in pages.

        ``after`` skips names up to and including it; ``limit=1`` is one request of one key.
        A missing folder is empty. A name that vanishes meanwhile may be missing or listed.
        """

    def folders(self, prefix: str) -> builtins.list[str]:
        """The names directly under ``prefix`` that have names below them, sorted."""

    def delete(self, name: str, expires: float | None = None) -> None:
        """Remove ``name``; a missing one is no error.

        With ``expires`` (the store's time) the store itself refuses later: `ExpiredError`.
        `UnansweredError` when no answer came.
        """

    def delete_many(
        self, names: Sequence[str], expires: float | None = None
    ) -> builtins.list[BaseException | None]:
        """`delete` for many, each with its own outcome. Durable on return."""

    def now(self) -> float:
        """Seconds since the epoch by the store's clock (S3: the server's ``Date``)."""

    def lock(self, *, exclusive: bool, timeout: float) -> AbstractContextManager[None]:
        """The repository's lock where processes of one machine share it (local only).

        Shared holders overlap; a waiting exclusive one makes new shared ones queue. Freed when
        the holder dies. `BackendError` naming the holders after ``timeout`` seconds. Elsewhere a
        context that does nothing.
        """

    def probe(self) -> bool:
        """Whether the store honours both conditions (exclusive create, compare and swap).

        Writes and removes names under ``tmp/``. Asked once before the first write.
        """

    def prepare(self, *, shared: bool) -> None:
        """Make the root (local: the folder, group-writable and setgid when ``shared``)."""


def check_name(name: str) -> str:
    """``name`` if it is a legal backend name, else `InvalidInputError`."""
    if len(name) > 1024 or not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{name!r} is not a legal stored name: expected elements of letters, digits and"
            " ._@+=~- joined by '/'"
        )
    return name
