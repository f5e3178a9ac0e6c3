"""The manifest where it lies: read, and changed by compare and swap, so that no entry is lost.

On S3 by If-Match. In a local root under a lock, but not by the lock alone: every new content is
first recorded as *the* successor of the one before, by an exclusive create. Where locks do nothing
(some network file systems) a second successor is refused, and a late rename is undone by the next
look. Programs that know nothing of this may still write the file at any time; what they wrote is
read again and kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from castore import AlreadyExistsError, BackendError, FormatError, ObjectNotFoundError
from castore.backend import MISSING, Backend
from castore.backends import open_backend
from castore_experiments.files import Files
from castore_experiments.layout import MANIFEST, OWN
from castore_experiments.local_files import LocalFiles
from castore_experiments.manifest import Change, Manifest, merge, parse, render

_FOLDER = f"{OWN}/manifest"
_GLANCES = (0.02, 0.05, 0.1, 0.2)  # seconds: another program may be in the midst of writing it
_KEPT = 8
"""Successors that stay, of at most twice as many: a rename may come late by as many writes."""

_LAPSED = 600.0
"""Seconds after which a successor counts no more: a content may come back, from a backup."""


class Swap(Protocol):
    """One document that many change at once."""

    def get(self) -> tuple[bytes | None, str]:
        """Content (None: there is none) and its version."""

    def swap(self, data: bytes, if_version: str) -> str:
        """Put ``data`` in place of ``if_version``; `AlreadyExistsError` if that is gone."""


class RemoteSwap:
    """By the store's own conditions."""

    def __init__(self, files: Files):
        self._files = files

    def get(self) -> tuple[bytes | None, str]:
        try:
            return self._files.get_versioned(MANIFEST)
        except ObjectNotFoundError:
            return None, MISSING

    def swap(self, data: bytes, if_version: str) -> str:
        return self._files.replace(MANIFEST, data, if_version)


class LocalSwap:
    """By a lock, and by successors: ``.castore/manifest/next-<SHA-256>`` is what follows a content.

    The version is the content's SHA-256. Whoever finds a successor that is not in place yet puts it
    there, so a writer may die, or sleep, at any point.
    """

    def __init__(self, files: LocalFiles, timeout: float):
        self._files, self._timeout = files, timeout
        self._locks: Backend = open_backend(f"{files.url}/{_FOLDER}")
        self._ready = False

    def get(self) -> tuple[bytes | None, str]:
        try:
            data = self._files.get(MANIFEST)
        except ObjectNotFoundError:
            return None, MISSING
        return self._follow(data)

    def swap(self, data: bytes, if_version: str) -> str:
        self._prepare()
        with self._locks.lock(exclusive=True, timeout=self._timeout):
            if self.get()[1] != if_version:
                raise AlreadyExistsError(f"{self._files.url}/{MANIFEST} was changed meanwhile")
            self._claim(data, if_version)
            self._publish(data)
            self._prune()
        return _version(data)

    def _prepare(self) -> None:
        if not self._ready:
            self._locks.prepare(shared=False)
            self._ready = True

    def _claim(self, data: bytes, if_version: str) -> None:
        """Make ``data`` the one successor; where another is, see that it gets its place."""
        name = _successor(if_version)
        try:
            self._files.create(name, data)
        except AlreadyExistsError:
            other = self._claimed(if_version)
            if other is None:  # lapsed
                self._files.delete(name)
                self._files.create(name, data)
            else:
                self._publish(other)
                raise

    def _publish(self, data: bytes) -> None:
        """Put ``data`` in place, and then what followed it meanwhile."""
        newest, version = self._follow(data)
        while True:
            self._files.put(MANIFEST, newest)
            after, last = self._follow(newest)
            if last == version:
                return
            newest, version = after, last

    def _follow(self, data: bytes) -> tuple[bytes, str]:
        """The last of the successors of ``data``, and its version."""
        version, seen = _version(data), set[str]()
        while version not in seen and (after := self._claimed(version)) is not None:
            seen.add(version)
            data, version = after, _version(after)
        return data, version

    def _claimed(self, version: str) -> bytes | None:
        """The successor of a version, unless there is none or it lapsed."""
        name = _successor(version)
        try:
            lapsed = self._files.stat(name).modified + _LAPSED < time.time()
            return None if lapsed else self._files.get(name)
        except ObjectNotFoundError:
            return None

    def _prune(self) -> None:
        found = sorted(self._files.list(_FOLDER), key=lambda s: s.modified)
        names = [s.name for s in found if s.name.startswith(f"{_FOLDER}/next-")]
        if len(names) > 2 * _KEPT:
            for name in names[:-_KEPT]:
                self._files.delete(name)


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _successor(version: str) -> str:
    return f"{_FOLDER}/next-{version or 'none'}"


class ManifestFile:
    """The ``manifest.yaml`` of one root.

    Parameters
    ----------
    files : Files
    rebuild : callable
        Gives the manifest anew from snapshots: asked when there is none, or a damaged one.
    report : callable
        Told one line when a damaged manifest was kept aside.
    clock : callable
        Seconds since the epoch.
    timeout : float
        Seconds to wait for other writers.

    Notes
    -----
    Local: makes ``<root>/.castore/manifest/`` at the first write. A repository that is to lie at
    ``<root>/.castore`` must be made before that. Safe for many threads and processes.
    """

    def __init__(
        self,
        files: Files,
        rebuild: Callable[[], Manifest],
        *,
        report: Callable[[str], None],
        clock: Callable[[], float],
        timeout: float = 60.0,
    ):
        self._files, self._url = files, f"{files.url}/{MANIFEST}"
        self._rebuild, self._report, self._clock = rebuild, report, clock
        self._timeout = timeout
        self._swap: Swap = (
            LocalSwap(files, timeout) if isinstance(files, LocalFiles) else RemoteSwap(files)
        )
        self._known: tuple[str, Manifest] | None = None

    def read(self) -> Manifest:
        """What stands there now (another process's write is seen), or what `rebuild` gives.

        Writes nothing.

        Raises
        ------
        FormatError
            It is damaged or newer, also after a moment's wait: `update` keeps it aside.
        BackendError
        """
        manifest = self._parsed()[1]
        return self._rebuild() if manifest is None else manifest

    def update(self, change: Change) -> Manifest:
        """Merge ``change`` into what stands there; durable on return, gives the result.

        A damaged or newer file is kept as ``manifest.yaml.damaged-<time>-<hash>``, told, and
        replaced by ``rebuild()`` with ``change``. Nothing is written if nothing changes.

        Raises
        ------
        BackendError
            The store refuses, or other writers did not leave room within ``timeout``: local lock
            holders are named.
        """
        deadline = time.monotonic() + self._timeout
        seen = self._known or self._sound()
        while True:
            version, manifest = seen
            merged = merge(self._rebuild() if manifest is None else manifest, change)
            if merged == manifest and self._parsed()[0] == version:
                return merged
            try:
                version = self._swap.swap(render(merged), version)
            except AlreadyExistsError as e:
                self._pause(deadline, e)
                seen = self._sound()
            else:
                self._known = version, merged
                return merged

    # -- within

    def _pause(self, deadline: float, e: AlreadyExistsError) -> None:
        if time.monotonic() > deadline:
            raise BackendError(
                f"{self._url}: other writers left no room for {self._timeout:.0f} s: call again"
            ) from e
        time.sleep(random.uniform(0.0, 0.05))

    def _sound(self) -> tuple[str, Manifest | None]:
        """What stands there; a damaged one is kept aside first, and is then to be rebuilt."""
        try:
            return self._parsed()
        except FormatError:
            return self._set_aside()

    def _parsed(self) -> tuple[str, Manifest | None]:
        """What stands there, with its version; a damaged one is looked at several times."""
        waits = iter(_GLANCES)
        while True:
            data, version = self._swap.get()
            if data is None:
                return version, None
            if self._known is not None and self._known[0] == version:
                return self._known
            try:
                self._known = version, parse(data, self._url)
                return self._known
            except FormatError:
                wait = next(waits, None)
                if wait is None:
                    raise
                time.sleep(wait)

    def _set_aside(self) -> tuple[str, Manifest | None]:
        """Keep a damaged manifest under another name; the version it has where it stands.

        Just before, it is looked at once more: another process may have mended it meanwhile.
        """
        data, version = self._swap.get()
        if data is None:
            return version, None
        try:
            return version, parse(data, self._url)
        except FormatError as e:
            stamp = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y%m%dT%H%M%S%f")
            name = f"{MANIFEST}.damaged-{stamp}-{_version(data)[:8]}"
            with contextlib.suppress(AlreadyExistsError):  # another process was faster
                self._files.create(name, data)
            self._report(f"{e}; it is kept as {name} and rebuilt from the snapshots")
        return version, None
