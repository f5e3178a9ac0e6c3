"""What a root remembers of itself: its repository and namespace, and edits that wait to be written.

``.castore/root.json`` lets a manager open a root without any configuration, and tells a copied root
(which must not write into the namespace of its original) from one that was moved.
"""

from __future__ import annotations

import os
import platform
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from castore import (
    AlreadyExistsError,
    BackendError,
    CastoreError,
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
    Repository,
    RepositoryNotFoundError,
    document,
)
from castore.backend import MISSING
from castore.snapshot import check_namespace
from castore_experiments.files import Files, open_files
from castore_experiments.layout import COMPONENTS, PENDING, ROOT, is_hash
from castore_experiments.local_files import LocalFiles

Origin: TypeAlias = Literal["itself", "moved", "copied"]
T = TypeVar("T", "RootRecord", "Pending")

_TRIES = 20
_IF_DAMAGED = {
    ROOT: "If it is damaged: bring it back from a copy of the root. The snapshots are not touched:"
    " 'castore experiments list -r URL' shows them",
    PENDING: "If it is damaged: take it away; edits that nobody wrote yet are forgotten, no more",
}
_LONGEST = 91  # characters of a namespace's readable part: with "-", the token, suffixes: under 128


@dataclass(frozen=True, slots=True)
class RootRecord:
    """The document ``root.json``.

    ``repository`` is a URL, or a path below the root that begins with ``./`` (so that it moves
    along); ``id`` the repository's. ``url`` is where the root was, ``inode`` the number of its
    folder (0 on remote stores), ``machine`` the host that wrote it. ``forked_from`` is the
    namespace of the root this one was copied from.
    """

    repository: str
    id: str
    namespace: str
    scheme: str
    url: str
    inode: int = 0
    machine: str = ""
    forked_from: str | None = None

    def encode(self) -> bytes:
        """Canonical bytes."""
        return document.encode("experiment-root", asdict(self))

    @staticmethod
    def decode(data: bytes, where: str = ROOT) -> RootRecord:
        """The record in ``data``, or `FormatError`."""
        body = document.decode(data, "experiment-root", RootRecord.__slots__, where)
        return document.parsed(lambda: _checked_root(RootRecord(**body), where), where)


def _checked_root(record: RootRecord, where: str) -> RootRecord:
    texts = [record.repository, record.id, record.scheme, record.url, record.machine]
    spaces = [record.namespace, *([] if record.forked_from is None else [record.forked_from])]
    if not all(isinstance(t, str) for t in texts) or type(record.inode) is not int:
        raise FormatError(f"{where}: a field has a wrong type")
    if record.repository.startswith("./") and {"..", ""} & {*record.repository.split("/")}:
        raise FormatError(f"{where}: repository {record.repository!r} leads out of the root")
    if not record.repository or "\0" in record.repository:
        raise FormatError(f"{where}: repository {record.repository!r} is no URL or path")
    for namespace in spaces:
        check_namespace(namespace)
    return record


@dataclass(frozen=True, slots=True)
class Pending:
    """The document ``pending.json``: edits that were seen and not yet written.

    ``base`` is the last written hash (None: none yet), ``hash`` what the edits would make,
    ``changed`` which of ``hp``, ``model`` and ``data``, ``digests`` the full digests by component,
    ``since`` local ISO-8601 text.
    """

    base: str | None
    hash: str
    changed: tuple[str, ...]
    digests: Mapping[str, str]
    since: str

    def encode(self) -> bytes:
        """Canonical bytes."""
        return document.encode(
            "experiment-pending",
            {
                "base": self.base,
                "hash": self.hash,
                "changed": sorted(self.changed),
                "digests": dict(self.digests),
                "since": self.since,
            },
        )

    @staticmethod
    def decode(data: bytes, where: str = PENDING) -> Pending:
        """The document in ``data``, or `FormatError`."""
        body = document.decode(data, "experiment-pending", Pending.__slots__, where)
        return document.parsed(lambda: _checked_pending(body, where), where)


def _checked_pending(body: dict[str, Any], where: str) -> Pending:
    pending = Pending(**{**body, "changed": tuple(body["changed"])})
    digests = pending.digests
    sound = (
        is_hash(pending.hash)
        and (pending.base is None or is_hash(pending.base))
        and isinstance(body["changed"], list)
        and {*pending.changed} <= {*COMPONENTS}
        and isinstance(digests, dict)
        and digests.keys() <= {*COMPONENTS}
        and all(isinstance(d, str) for d in (*digests.values(), pending.since))
    )
    if not sound:
        raise FormatError(f"{where}: a field has a wrong type or value")
    return pending


# -- the record


def read_root(files: Files) -> RootRecord | None:
    """The root's record, None if there is none; `FormatError` if it is damaged or newer."""
    return _read(files, ROOT, RootRecord)[0]


def new_record(
    files: Files,
    repository: Repository,
    namespace: str,
    scheme: str,
    forked_from: str | None = None,
) -> RootRecord:
    """The record of the root at ``files`` as it is now; a local folder must be there."""
    inside = f"{files.url}/"
    url = repository.url
    return RootRecord(
        f"./{url.removeprefix(inside)}" if url.startswith(inside) else url,
        repository.id,
        check_namespace(namespace),
        scheme,
        files.url,
        _inode(files),
        platform.node(),
        forked_from,
    )


def claim_root(files: Files, record: RootRecord) -> RootRecord:
    """Write a fresh root's record; of several processes at once one wins, and all get its record.

    A repository that is to lie at ``<root>/.castore`` must be made before that.
    """
    try:
        files.create(ROOT, record.encode())
    except AlreadyExistsError:
        return read_root(files) or claim_root(files, record)
    return record


def replace_root(files: Files, old: RootRecord, new: RootRecord) -> RootRecord:
    """Put ``new`` in place of ``old``; gives what stands there, which may be another process's."""
    current, version = _read(files, ROOT, RootRecord)
    if current != old:
        return current or claim_root(files, new)
    try:
        files.replace(ROOT, new.encode(), version)
    except AlreadyExistsError:
        return read_root(files) or claim_root(files, new)
    return new


def origin(
    files: Files, record: RootRecord, storage_options: dict[str, Any] | None = None
) -> Origin:
    """Whether the root at ``files`` is the one that ``record`` was written for.

    Returns
    -------
    origin
        ``itself``: the URL is the same, or another name of the same folder. ``moved``: the former
        place holds this root no more. ``copied``: it does, or that cannot be known: another
        machine wrote the record, or no answer came.

    Notes
    -----
    A folder under the same URL with another inode number is a restored backup, or lies on a file
    system whose numbers do not last: it is ``itself``.
    """
    if record.url == files.url:
        return "itself"
    try:
        former = open_files(record.url, storage_options)
    except CastoreError:
        return "copied"
    local = isinstance(former, LocalFiles)
    if local and isinstance(files, LocalFiles) and _same_folder(former.url, files.url):
        return "itself"
    same_inode = record.inode != 0 and record.inode == _inode(files)
    try:
        there = read_root(former)
    except (BackendError, FormatError):
        return "copied"
    if there is not None and there.namespace == record.namespace:
        return "copied"
    reachable = not local or record.machine == platform.node()
    return "moved" if reachable or same_inode else "copied"


def open_repository(
    files: Files, record: RootRecord, storage_options: dict[str, Any] | None = None
) -> Repository:
    """The repository that ``record`` names.

    Raises
    ------
    BackendError
        It cannot be reached.
    RepositoryNotFoundError
        There is none any more.
    IntegrityError
        There is another one at that URL.
    """
    url = record.repository
    if url.startswith("./"):
        url = f"{files.url}/{url[2:]}"
    try:
        repository = Repository.open(url, storage_options=storage_options)
    except RepositoryNotFoundError as e:
        raise RepositoryNotFoundError(
            f"{files.url}: its snapshots are in the repository {url}, and there is none now: bring"
            f" it back, or take {ROOT} away to start afresh"
        ) from e
    if repository.id != record.id:
        raise IntegrityError(
            f"{files.url}: its snapshots are in the repository {record.id}, but at {url} there is"
            f" another, {repository.id}: bring the right one back, or take {ROOT} away to start"
            " afresh"
        )
    return repository


def new_namespace(url: str, token: str) -> str:
    """A namespace for a root at ``url``: the last part of its URL in plain letters, and ``token``.

    ``token`` is 8 random hexadecimal characters. At most 100 characters, so that suffixes fit.
    """
    last = url.rstrip("/").rpartition("/")[2]
    plain = unicodedata.normalize("NFKD", last).encode("ascii", "ignore").decode()
    readable = re.sub(r"[^A-Za-z0-9._=+]+", "-", plain).strip("-._=+")
    return check_namespace(f"{readable[:_LONGEST] or 'root'}-{token}")


def _inode(files: Files) -> int:
    return os.stat(files.url).st_ino if isinstance(files, LocalFiles) else 0


def _same_folder(a: str, b: str) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


# -- edits that wait


def read_pending(files: Files) -> Pending | None:
    """The edits that wait, None if there are none; `FormatError` for a damaged document."""
    return _read(files, PENDING, Pending)[0]


def write_pending(files: Files, pending: Pending) -> None:
    """Remember edits; durable on return. The last writer's stand."""
    for attempt in range(_TRIES):
        try:
            version = files.stat(PENDING).version
        except ObjectNotFoundError:
            version = MISSING
        try:
            files.replace(PENDING, pending.encode(), version)
            return
        except AlreadyExistsError as e:
            if attempt == _TRIES - 1:
                raise BackendError(f"{files.url}/{PENDING}: others keep changing it") from e


def clear_pending(files: Files) -> None:
    """Nothing waits any more; none there is no error."""
    files.delete(PENDING)


def _read(files: Files, name: str, kind: type[T]) -> tuple[T | None, str]:
    """A document and its version."""
    try:
        data, version = files.get_versioned(name)
    except ObjectNotFoundError:
        return None, MISSING
    try:
        return kind.decode(data, f"{files.url}/{name}"), version
    except FormatError as e:
        raise FormatError(f"{e}. {_IF_DAMAGED[name]}") from e
