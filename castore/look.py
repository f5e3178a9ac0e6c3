"""The jobs of a check: each looks at a batch of names and tells what it found there.

They change nothing, so one that is done twice does no harm. What is wrong with a single name is
told as a `Fault`; a store that gives nothing at all makes the same faults everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, TypeVar

import numpy as np

from castore.checkout import workers
from castore.digest import Buffer
from castore.driver import find_driver
from castore.errors import (
    BackendError,
    CastoreError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    lacks,
)
from castore.frame import Header, parse_header
from castore.load import read_snapshot, read_tree
from castore.objects import ObjectStore, object_name
from castore.parts import Part
from castore.repository import Repository
from castore.snapshot import MAX_DOCUMENT, Snapshot, SnapshotName
from castore.table import Digests, Places, Table, raw_of
from castore.walk import Walker
from castore.workers import Lent

T = TypeVar("T")
R = TypeVar("R")
Kind = Literal["missing", "corrupt", "unreadable", "malformed", "layout"]

BATCH, BATCH_BYTES = 1000, 256 << 20
"""Names, and stored bytes, that one job looks at: what is done again when its worker dies."""

ALONE, ALONE_BYTES = 8000, 4 << 30
"""The same where nothing is handed over: fewer ends to wait for."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one name."""

    kind: Kind
    detail: str


@dataclass(frozen=True, slots=True)
class Looked(Generic[T]):
    """What was found under each name of a batch, and which of them read wrong once, then right."""

    found: list[T]
    unstable: list[str]


def kind_of(error: BaseException) -> Kind:
    """In the words of a check."""
    if isinstance(error, ObjectNotFoundError):
        return "missing"
    if isinstance(error, FormatError):
        return "malformed"
    return "corrupt" if isinstance(error, IntegrityError) else "unreadable"


def fault_of(error: BaseException) -> Fault:
    return Fault(kind_of(error), str(error))


def documents(lent: Lent, names: Sequence[SnapshotName]) -> Looked[str | Fault | None]:
    """The tree that each snapshot names; None for one that has gone."""
    repository, unstable = lent.repository, list[str]()

    def read(name: SnapshotName) -> Snapshot:
        return read_snapshot(repository.backend.get(name.path, 0, MAX_DOCUMENT + 1), name)

    def one(name: SnapshotName) -> str | Fault | None:
        try:
            document = _twice(name.path, partial(read, name), unstable)
        except ObjectNotFoundError:
            return None
        except (IntegrityError, FormatError, BackendError) as e:
            return fault_of(e)
        if document.namespace != name.namespace:
            return Fault("malformed", f"says namespace {document.namespace!r}")
        return document.tree

    return Looked(_each(repository, one, names), unstable)


def trees(lent: Lent, digests: Sequence[str], part: Part) -> Looked[tuple[Digests, Places] | Fault]:
    """The blobs of a part that each tree needs, and how many bytes of each."""
    repository, unstable = lent.repository, list[str]()

    def one(digest: str) -> tuple[Digests, Places] | Fault:
        try:
            tree = _twice(digest, lambda: read_tree(repository.store, digest, keep=False), unstable)
        except (CastoreError, OSError) as e:
            return fault_of(e)
        lengths = tree.blob_lengths()
        raw, wanted = raw_of(lengths), np.fromiter(lengths.values(), np.int64, len(lengths))
        own = part.among(raw)
        return raw[own], wanted[own]

    return Looked(_each(repository, one, digests), unstable)


def headers(lent: Lent, digests: Sequence[str]) -> Looked[Header | Fault | None]:
    """The header of each object; None for one that has gone."""
    repository, unstable = lent.repository, list[str]()
    return Looked(_each(repository, partial(_header, repository, unstable), digests), unstable)


@dataclass(frozen=True, slots=True)
class Unlisted:
    """What a listing would have told of an object, its frame's ``size``, and its header."""

    size: int
    header: Header | Fault


def elsewhere(lent: Lent, digests: Sequence[str]) -> Looked[Unlisted | None]:
    """Header and size of objects that were not listed; None for one that is not there."""
    repository, unstable = lent.repository, list[str]()

    def one(digest: str) -> Unlisted | None:
        header = _header(repository, unstable, digest)
        if header is None:
            return None
        if isinstance(header, Fault):
            return Unlisted(0, header)
        try:
            return Unlisted(repository.backend.stat(object_name(digest)).size, header)
        except ObjectNotFoundError:
            return None
        except (CastoreError, OSError) as e:
            return Unlisted(0, fault_of(e))

    return Looked(_each(repository, one, digests), unstable)


def layout(lent: Lent, name: SnapshotName) -> list[tuple[str, str, str]]:
    """What the snapshot's driver finds broken: object, what is wrong, and the path it hurts."""
    found: list[tuple[str, str, str]] = []
    try:
        driver = find_driver(lent.repository.snapshot(name).driver)
        for path, detail in driver.verify(lent.repository, name):
            found.append((path, detail, path))
    except InvalidInputError as e:
        found.append((name.path, str(e), ""))
    except (IntegrityError, NotFoundError, FormatError) as e:
        found.append((name.path, f"could not be verified: {e}", ""))
    except ModuleNotFoundError as e:
        found.append((name.path, f"could not be verified: {lacks(e)}", ""))
    return found


def out_of_reach(store: ObjectStore, digests: Iterable[str]) -> str | None:
    """The first of these objects that the store does not give."""
    for digest in digests:
        try:
            store.frame(digest)
        except (CastoreError, OSError):
            return digest
    return None


def _header(repository: Repository, unstable: list[str], digest: str) -> Header | Fault | None:
    name = object_name(digest)
    try:
        return _twice(
            name, lambda: parse_header(repository.backend.get(name, 0, 64), digest), unstable
        )
    except ObjectNotFoundError:
        return None
    except (CastoreError, OSError) as e:
        return fault_of(e)


def _twice(what: str, read: Callable[[], T], unstable: list[str]) -> T:
    """``read()``, once more if it gave something damaged: a bad read is not a bad object."""
    try:
        return read()
    except (IntegrityError, FormatError):
        result = read()
        unstable.append(what)
        return result


def _each(repository: Repository, one: Callable[[T], R], names: Sequence[T]) -> list[R]:
    """``one`` of each name; where one waits for answers, for many at once."""
    backend = repository.backend
    if backend.kind == "local" or len(names) < 2:
        return [one(name) for name in names]
    with ThreadPoolExecutor(min(backend.parallel, len(names))) as pool:
        return list(pool.map(one, names))


# -- data


@dataclass(frozen=True, slots=True)
class Chains:
    """Objects whose data is to be read, in groups; ``lengths`` of their contents in bytes."""

    groups: list[list[str]]
    lengths: dict[str, int]

    @property
    def digests(self) -> list[str]:
        return [digest for group in self.groups for digest in group]


def forest(table: Table, chosen: Places, most: int, most_bytes: int) -> Iterator[Chains]:
    """Whole chains, so many that they are about ``most`` objects or ``most_bytes`` stored bytes."""
    groups, count, size = list[Places](), 0, 0
    for group in table.chains(chosen):
        groups.append(group)
        count, size = count + len(group), size + int(table.sizes[group].sum())
        if count >= most or size >= most_bytes:
            yield _spelled(table, groups)
            groups, count, size = [], 0, 0
    if groups:
        yield _spelled(table, groups)


def _spelled(table: Table, groups: Sequence[Places]) -> Chains:
    named = [table.named(group) for group in groups]
    lengths = (int(n) for group in groups for n in table.lengths[group])
    return Chains(named, dict(zip((d for g in named for d in g), lengths, strict=True)))


@dataclass(frozen=True, slots=True)
class Read:
    """The objects that are good, each with the bytes of its frame, and those that met trouble."""

    good: list[tuple[str, int]]
    trouble: list[str]


def _unheard(_: str, __: int) -> None:
    """Nobody wants to know before the end."""


def data(lent: Lent, chains: Chains, told: Callable[[str, int], None] = _unheard) -> Read:
    """Decode and hash every object of the chains once; ``told`` hears of each good one at once."""
    store, good, trouble = lent.repository.store, list[tuple[str, int]](), list[str]()

    def sink(digest: str, content: Buffer, frame: bytes) -> None:
        told(digest, len(frame))
        good.append((digest, len(frame)))

    walker = Walker(store, chains.digests, sink, lambda digest, _: trouble.append(digest))
    walker.run(chains.groups, workers(store.backend), lambda digest: chains.lengths.get(digest, 0))
    return Read(good, trouble)
