"""Write a tree to a folder: verified blobs only, nothing outside the target, all or nothing.

Everything is written into a fresh folder, beside a target that is not there yet and within one
that is, and then moved into place, so a failure leaves nothing half-written, and no link that
waits in the target is ever followed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from castore import bases
from castore.backend import Backend
from castore.digest import Buffer
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    CastoreError,
    CorruptObjectError,
    InvalidInputError,
    ObjectNotFoundError,
)
from castore.objects import ObjectStore
from castore.tree import File, Folder, Link, Tree
from castore.walk import Walker

_LARGE, _RUN = 1 << 20, 8  # below this many bytes, a group has no more blobs than that
_FLUSH = 128 << 20  # bytes written before what is there so far goes to the disk
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


@dataclass(frozen=True, slots=True)
class _Place:
    path: str
    at: int
    offset: int
    length: int


def checkout(
    store: ObjectStore,
    tree: Tree,
    target: str,
    *,
    force: bool,
    sha256: bool,
    progress: Callable[[int], None],
) -> None:
    """Write ``tree`` into the folder ``target``, which is made if missing.

    Raises
    ------
    AlreadyExistsError
        An entry of the tree is there already and ``force`` is not set.
    ObjectNotFoundError, CorruptObjectError
        A blob is missing or damaged; nothing was written.
    BackendError
        The file system refused.
    """
    target = os.path.abspath(target)
    _refuse_existing(tree, target, force)
    # A folder that is there may be a mount, somebody's working folder, or all we may write to.
    parent = target if os.path.isdir(target) else os.path.dirname(target)
    staging = os.path.join(parent, f".castore-{secrets.token_hex(8)}.part")
    moved: list[str] = []
    try:
        os.makedirs(parent, exist_ok=True)
        os.mkdir(staging, 0o700)
        _prepare(tree, staging)
        _fill(store, tree, staging, progress)
        _finish(tree, staging, sha256)
        os.chmod(staging, 0o777 & ~_umask())
        fresh = _missing_folders(tree, target)
        try:
            _move(tree, staging, target, force, moved)
        except BaseException:
            if not force:  # else some may have taken the place of others
                _take_back(target, moved, fresh)
            raise
    except OSError as e:
        if isinstance(e, BackendError | AlreadyExistsError):
            raise
        left = f"{len(moved)} of {len(tree.entries)} entries are" if moved else "nothing was"
        raise BackendError(
            f"checkout to {target} failed, {left} left there: {e.strerror or e}"
            f" ({e.filename or target})"
        ) from e
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _refuse_existing(tree: Tree, target: str, force: bool) -> None:
    if os.path.lexists(target) and not os.path.isdir(target):
        raise AlreadyExistsError(f"{target} exists and is not a folder: choose another target")
    if not os.path.isdir(target):
        return
    _refuse_obstacles(tree, target)
    if force:
        return
    there = [
        p
        for p, e in tree.entries.items()
        if os.path.lexists(os.path.join(target, p))
        and not (isinstance(e, Folder) and os.path.isdir(os.path.join(target, p)))
    ]
    if there:
        raise AlreadyExistsError(
            f"{target} already holds {len(there)} of the names to write, {there[0]!r} for one:"
            " choose another target or pass --force to replace them"
        )


def _refuse_obstacles(tree: Tree, target: str) -> None:
    """`InvalidInputError` where a file or link stands in for a folder, or the other way round.

    Asked before anything is moved, so that what is refused is left as it was.
    """
    folders: set[str] = set()
    for path, entry in tree.entries.items():
        folders.add(path if isinstance(entry, Folder) else "")
        parts = path.split("/")
        folders.update("/".join(parts[:i]) for i in range(1, len(parts)))
        full = os.path.join(target, path)
        if not isinstance(entry, Folder) and os.path.isdir(full) and not os.path.islink(full):
            raise InvalidInputError(f"{full} is a folder: move it away or choose another target")
    for folder in sorted(folders - {""}):
        full = os.path.join(target, folder)
        if os.path.lexists(full) and (os.path.islink(full) or not os.path.isdir(full)):
            raise InvalidInputError(
                f"{full} is there and is no folder (a link is not followed): move it away or"
                " choose another target"
            )


def _prepare(tree: Tree, root: str) -> None:
    for path, entry in tree.entries.items():
        full = os.path.join(root, path)
        os.makedirs(full if isinstance(entry, Folder) else os.path.dirname(full), exist_ok=True)
        if isinstance(entry, Link):
            os.symlink(entry.target, full)
        elif isinstance(entry, File):
            fd = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.ftruncate(fd, entry.size)
            finally:
                os.close(fd)


def _fill(store: ObjectStore, tree: Tree, root: str, progress: Callable[[int], None]) -> None:
    places: dict[str, list[_Place]] = defaultdict(list)
    for path, file in tree.files():
        at = 0
        for s in file.slices:
            places[s.blob].append(_Place(path, at, s.offset, s.length))
            at += s.length
    with _Flusher(root) as flusher:

        def sink(digest: str, content: Buffer, _: bytes) -> None:
            view = memoryview(content)
            for p in places[digest]:
                if p.offset + p.length > len(view):
                    raise CorruptObjectError(
                        f"object {digest} has {len(view)} bytes, the tree wants"
                        f" {p.offset + p.length} for {p.path!r}: the tree is damaged",
                        name=digest,
                    )
                _write_at(os.path.join(root, p.path), p.at, view[p.offset : p.offset + p.length])
                progress(p.length)
                flusher.wrote(p.path, p.length)

        lengths = tree.blob_lengths()
        walker = Walker(store, places.keys(), sink)
        try:
            walker.run(lineages(tree), workers(store.backend), lengths.__getitem__)
        except (CorruptObjectError, ObjectNotFoundError) as e:
            raise _explained(e, sorted({p.path for p in places.get(walker.culprit, [])})) from e


def _explained(error: CastoreError, paths: list[str]) -> CastoreError:
    """The same error, with the files it keeps from being written and what to do."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    text = (
        f"{error}; needed for {paths[0]!r}{more}: nothing was written. 'castore check"
        " --read-data' tells what else is damaged, 'castore check --repair-from URL' mends it"
        if paths
        else str(error)
    )
    if isinstance(error, CorruptObjectError):
        return CorruptObjectError(
            text, name=error.name, expected=error.expected, actual=error.actual
        )
    return type(error)(text)


def workers(backend: Backend) -> int:
    """Threads that read objects: two cores decode; elsewhere more, to wait for answers at once."""
    return 2 if backend.kind == "local" else backend.parallel


def lineages(tree: Tree) -> list[list[str]]:
    """The tree's blobs, grouped so that a delta tends to follow its base (n-th of a series)."""
    groups: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for path, file in sorted(tree.files(), key=lambda f: bases.natural_key(f[0])):
        series = bases.series_of(path)
        for i, found in enumerate(bases.blob_sequence(file)):
            groups[series, i].append(found)
    return [run for group in groups.values() for run in _runs(group)]


def _runs(group: list[tuple[str, int]]) -> Iterator[list[str]]:
    """A thousand small files of one series are waited for at once: their root stays cached.

    The first run is one longer. So with chains of 8, 4, 2 or 1 each later run begins with a delta
    to the root, not in the middle of a chain that another thread has in hand.
    """
    blobs = [blob for blob, _ in group]
    step = len(blobs) if max(length for _, length in group) >= _LARGE else _RUN
    starts = [0, *range(step + 1, len(blobs), step)]
    for start, stop in pairwise([*starts, len(blobs)]):
        yield blobs[start:stop]


class _Flusher:
    """Sends what was written so far to the disk while the rest is decoded."""

    def __init__(self, root: str):
        self._root, self._dirty, self._bytes = root, set[str](), 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def wrote(self, path: str, n: int) -> None:
        with self._lock:
            self._dirty.add(path)
            self._bytes += n
            idle = self._running is None or self._running.done()
            if self._bytes < _FLUSH or not idle:
                return
            batch, self._dirty, self._bytes = self._dirty, set(), 0
            self._running = self._pool.submit(self._flush, batch)

    def _flush(self, paths: set[str]) -> None:
        for path in paths:
            _fsync(os.path.join(self._root, path))

    def __enter__(self) -> _Flusher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        if self._running:
            self._running.result()


def _finish(tree: Tree, root: str, sha256: bool) -> None:
    """Modes, then every file and folder durable; on request each file's SHA-256 once more."""
    mask = _umask()
    folders = {root}
    for path, file in tree.files():
        full = os.path.join(root, path)
        if sha256:
            _check_sha256(full, path, file)
        os.chmod(full, (0o777 if file.executable else 0o666) & ~mask)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_fsync, [os.path.join(root, p) for p, _ in tree.files()]))
    for folder, _, _ in os.walk(root):
        folders.add(folder)
    for folder in folders:
        _fsync(folder)


def _check_sha256(full: str, path: str, file: File) -> None:
    with open(full, "rb") as f:
        actual = hashlib.file_digest(f, "sha256").hexdigest()
    if actual != file.sha256:
        raise CorruptObjectError(
            f"{path!r}: SHA-256 {actual}, the tree says {file.sha256}: the tree is damaged",
            name=path,
            expected=file.sha256,
            actual=actual,
        )


def _move(tree: Tree, staging: str, target: str, force: bool, moved: list[str]) -> None:
    """Put everything where it belongs; ``moved`` is told each entry that has its place."""
    if not os.path.isdir(target):
        os.rename(staging, target)
        _fsync(os.path.dirname(target))
        return
    if os.listdir(target) == [os.path.basename(staging)]:
        below: dict[str, list[str]] = defaultdict(list)
        for path, entry in tree.entries.items():
            below[path.partition("/")[0]] += [] if isinstance(entry, Folder) else [path]
        fd = _open_folder(target, "")
        try:
            for name in sorted(below):
                _give_name(os.path.join(staging, name), name, fd, force, f"{target}/{name}")
                moved += below[name]
            os.fsync(fd)
        finally:
            os.close(fd)
        return
    for path, entry in tree.entries.items():
        folder = path if isinstance(entry, Folder) else os.path.dirname(path)
        fd = _open_folder(target, folder)
        try:
            if not isinstance(entry, Folder):
                name = os.path.basename(path)
                _give_name(os.path.join(staging, path), name, fd, force, f"{target}/{path}")
                moved.append(path)
            os.fsync(fd)
        finally:
            os.close(fd)


def _give_name(staged: str, name: str, fd: int, force: bool, shown: str) -> None:
    """Give what is staged its ``name`` in the folder ``fd``, which must be free without ``force``.

    A rename would replace a file that appeared after the last look, a link does not. A folder's
    rename replaces nothing but an empty folder.
    """
    folder = os.path.isdir(staged) and not os.path.islink(staged)
    try:
        if force or folder or not _link(staged, name, fd):
            os.replace(staged, name, dst_dir_fd=fd)
    except OSError as e:
        if e.errno in _TAKEN and not force:
            raise AlreadyExistsError(f"{shown} appeared meanwhile: not replaced") from e
        raise


def _link(staged: str, name: str, fd: int) -> bool:
    """False where no link can be made, however that is told, and the name was free just now."""
    try:
        os.link(staged, name, dst_dir_fd=fd, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as e:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(name, dir_fd=fd)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from e
        return False
    return True


def _missing_folders(tree: Tree, target: str) -> list[str]:
    """Folders of the tree that the target lacks, those within others first."""
    folders: set[str] = set()
    for path, entry in tree.entries.items():
        parts = path.split("/")
        until = len(parts) + isinstance(entry, Folder)
        folders.update("/".join(parts[:i]) for i in range(1, until))
    missing = (f for f in folders if not os.path.lexists(os.path.join(target, f)))
    return sorted(missing, reverse=True)


def _take_back(target: str, moved: list[str], fresh: list[str]) -> None:
    """Remove the entries that were moved and, once empty, the folders made for them."""
    while moved:
        fd = _open_folder(target, os.path.dirname(moved[-1]))
        try:
            os.unlink(os.path.basename(moved[-1]), dir_fd=fd)
        finally:
            os.close(fd)
        moved.pop()
    for folder in fresh:
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(target, folder))


def _open_folder(target: str, folder: str) -> int:
    """A descriptor of ``target/folder``, made if missing; no link below the target is followed."""
    fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    for part in folder.split("/") if folder else []:
        try:
            try:
                os.mkdir(part, dir_fd=fd)
            except FileExistsError:
                pass
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        except OSError as e:
            raise InvalidInputError(
                f"{target}/{folder}: {part!r} is there and is no folder (a link is not followed):"
                " move it away or choose another target"
            ) from e
        finally:
            os.close(fd)
        fd = below
    return fd


def _write_at(path: str, at: int, data: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        while data:
            n = os.pwrite(fd, data, at)
            data, at = data[n:], at + n
    finally:
        os.close(fd)


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _umask() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as f:
        for line in f:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)  # the only other way to ask, and not safe beside other threads
    os.umask(mask)
    return mask
