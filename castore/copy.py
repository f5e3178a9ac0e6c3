"""Copy snapshots to another repository: only what it lacks, every byte verified.

May be interrupted and run again: what was sent stays and is found present, and a snapshot whose
document is already there is skipped.

With an executor its workers read the source, verify, and put frames into the target; snapshots
are published here. That is as safe as sending from here: no mark of a commit protects an upload,
whoever sends it. What counts is that the publisher looks at every object and base after it has
announced itself (S3), or while it holds the lock (local, from before the first look at the target
until the last snapshot is durable), and puts back what is missing or broken. A worker that was
given up and goes on sending creates names exclusively, with the content that they promise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from castore import look
from castore.checkout import lineages, workers
from castore.digest import Buffer, digest_of
from castore.encode import encode
from castore.errors import CorruptObjectError, IntegrityError, InvalidInputError, NotFoundError
from castore.frame import HEADER_SIZE, MAX_DEPTH, Header, Parts, parse_header
from castore.load import read_tree
from castore.look import BATCH, BATCH_BYTES, Chains, forest
from castore.repository import Repository
from castore.snapshot import Snapshot, SnapshotName
from castore.table import Table, raw_of
from castore.tree import Tree
from castore.walk import Walker
from castore.workers import Lent, results, workers_of
from castore.write import FrameWriter

_WINDOW = 4 << 30  # logical bytes whose objects are sent in one walk


@dataclass(slots=True)
class CopyReport:
    """``snapshots`` copied, ``skipped`` (there already); ``objects`` and stored ``bytes`` sent."""

    snapshots: int = 0
    skipped: int = 0
    objects: int = 0
    bytes: int = 0
    names: list[SnapshotName] = field(default_factory=list)


def copy(
    source: Repository,
    target: Repository,
    *,
    namespaces: Sequence[str] | None = None,
    labels: Mapping[str, str] | None = None,
    since: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
    executor: Executor | None = None,
) -> CopyReport:
    """Copy snapshots, oldest first, under the same namespaces; their documents stay as they are.

    Parameters
    ----------
    namespaces : sequence of str, optional
        Only these; one that the source lacks is `NotFoundError`.
    labels : mapping, optional
        Only snapshots that carry all of these.
    since : int, optional
        Only snapshots from this time (microseconds) on.
    progress : callable
        Told stored bytes as they are sent.
    executor : concurrent.futures.Executor, optional
        Who sends the objects: threads, processes, or machines that reach both repositories.
        Secrets do not travel: see `castore.workers`.

    Raises
    ------
    CorruptObjectError, ObjectNotFoundError
        An object of a snapshot is damaged or missing, or is shorter than its tree wants: that
        snapshot is not copied, and none after it.
    """
    if source.id == target.id:
        raise InvalidInputError(f"{source.url} and {target.url} are one and the same repository")
    chosen = namespaces or source.namespaces()
    unknown = sorted(set(chosen) - set(source.namespaces()))
    if unknown:
        raise NotFoundError(f"{source.url} has no namespace {', '.join(unknown)}")
    report = CopyReport()
    _ = target.many_writers
    for namespace in chosen:
        there = {n.id for n in target.snapshots(namespace)}
        todo = []
        for name in reversed(list(source.snapshots(namespace))):
            if since is not None and name.time < since:
                continue
            snapshot = source.snapshot(name)
            if labels and not labels.items() <= dict(snapshot.labels).items():
                continue
            if name.id in there:
                report.skipped += 1
            else:
                todo.append(snapshot)
        for window in _windows(todo, _WINDOW * workers_of(executor)):
            _copy_window(source, target, window, report, progress, executor)
    return report


def _windows(snapshots: Iterable[Snapshot], size: int) -> Iterator[list[Snapshot]]:
    window: list[Snapshot] = []
    for snapshot in snapshots:
        window.append(snapshot)
        if sum(s.size for s in window) >= size:
            yield window
            window = []
    if window:
        yield window


def _copy_window(
    source: Repository,
    target: Repository,
    window: Sequence[Snapshot],
    report: CopyReport,
    progress: Callable[[int], None],
    executor: Executor | None,
) -> None:
    with target.shared_lock():
        trees = {s.tree: read_tree(source.store, s.tree) for s in window}
        need = list(dict.fromkeys([*trees, *(b for t in trees.values() for b in t.blobs())]))
        present = target.store.current_headers(need)
        lacking = [d for d in need if present[d] is None]
        lengths = {d: h.content_length for d, h in present.items() if h}
        if executor is None:
            sender = _Sender(target, present, lacking, progress)
            _send(source, sender, _by_lineage(trees), lacking)
            lengths |= sender.lengths
            report.objects += sender.writer.objects
            report.bytes += sender.writer.added
        else:
            for sent in _hand_over(source, target, lacking, executor, lengths):
                report.objects += sent.objects
                report.bytes += sent.bytes
                progress(sent.bytes)
        for snapshot in window:
            _refuse_short(source, snapshot, trees[snapshot.tree], lengths)
            needs = [snapshot.tree, *trees[snapshot.tree].blobs()]
            report.names.append(target.publish(snapshot, needs, lambda b: _heal(source, target, b)))
            report.snapshots += 1


def _refuse_short(
    source: Repository, snapshot: Snapshot, tree: Tree, lengths: Mapping[str, int]
) -> None:
    """No tree may want more of a blob than there is: its files could not be read anywhere."""
    for blob, wanted in tree.blob_lengths().items():
        if wanted > lengths[blob]:
            name = f"{snapshot.namespace}@{digest_of(snapshot.encode())[:16]}"
            raise CorruptObjectError(
                f"snapshot {name} of {source.url} cannot be copied: its tree {snapshot.tree} wants"
                f" {wanted} bytes of object {blob}, which has {lengths[blob]}: the tree is damaged."
                " Forget that snapshot, or leave it out by namespace, label or time",
                name=snapshot.tree,
            )


def _by_lineage(trees: Mapping[str, Tree]) -> Chains:
    """All that the trees need and themselves, so that a delta tends to follow its base."""
    union = _union(trees.values())
    return Chains([*lineages(union), list(trees)], union.blob_lengths())


def _send(source: Repository, sender: _Sender, chains: Chains, wanted: Collection[str]) -> None:
    """Send what is ``wanted`` of the chains; all of it has been put on return."""
    with FrameWriter(sender.target.store) as sender.writer:
        Walker(source.store, wanted, sender.send).run(
            chains.groups, workers(source.backend), lambda d: chains.lengths.get(d, 0)
        )


def _hand_over(
    source: Repository,
    target: Repository,
    lacking: Sequence[str],
    executor: Executor,
    lengths: dict[str, int],
) -> Iterator[Sent]:
    """Have workers send what is lacking, in whole chains, so that each base goes with its deltas.

    ``lengths`` learns how many bytes each content has.
    Names become durable when the snapshots that need them are published.
    """
    lent, to = Lent(source), Lent(target)
    digests = sorted(lacking)
    table = Table(raw_of(digests), np.zeros(len(digests), np.int64))
    cuts = [digests[i : i + BATCH] for i in range(0, len(digests), BATCH)]
    at = 0
    for looked in results(executor, look.headers, ((lent, cut) for cut in cuts)):
        places = np.arange(at, at + len(looked.found))
        # Whoever sends what cannot be read meets the error again, and ends the copy with it.
        table.learn(places, [h if isinstance(h, Header) else None for h in looked.found])
        at += len(places)
    table.sizes = table.lengths.astype(np.int64)
    lengths.update(zip(digests, table.sizes.tolist(), strict=True))
    whole = forest(table, np.arange(len(table)), BATCH, BATCH_BYTES)
    return results(executor, _transfer, ((lent, to, chains) for chains in whole))


@dataclass(frozen=True, slots=True)
class Sent:
    """Objects that a job sent, or found sent by a try before it, and their stored bytes."""

    objects: int
    bytes: int


def _transfer(source: Lent, target: Lent, chains: Chains) -> Sent:
    """A job: may be done twice, since what is there already is left alone."""
    sizes: list[int] = []
    sender = _Sender(target.repository, {}, chains.digests, sizes.append)
    _send(source.repository, sender, chains, chains.digests)
    return Sent(len(sizes), sum(sizes))


def _union(trees: Iterable[Tree]) -> Tree:
    """All files of all trees, told apart by a number that sorts as the trees do."""
    return Tree({f"{i}/{p}": f for i, t in enumerate(trees) for p, f in t.files()})


class _Sender:
    """Sends a frame as it is where its base is, or goes, to the target; else without a base."""

    writer: FrameWriter
    lengths: dict[str, int]  # of the contents sent

    def __init__(
        self,
        target: Repository,
        present: Mapping[str, Header | None],
        lacking: Iterable[str],
        progress: Callable[[int], None],
    ):
        self.target, self._progress = target, progress
        self._lacking, self.lengths = frozenset(lacking), {}
        self._headers: dict[str, Header | None] = {d: h for d, h in present.items() if h}

    def send(self, digest: str, content: Buffer, data: bytes) -> None:
        header = parse_header(data, digest)
        parts: Parts = data[:HEADER_SIZE], memoryview(data)[HEADER_SIZE:]
        if header.base and not self._usable(header):
            parts = encode(content, header.width, None, "auto")
        self._progress(sum(map(len, parts)))
        self.lengths[digest] = header.content_length
        self.writer.put(digest, parts)

    def _usable(self, header: Header) -> bool:
        """The base is there with its chain, and no deeper than the delta's header says.

        One that this walk sends, before or after, is as good: with its own base or without one
        it is no deeper than in the source.
        """
        if header.base in self._lacking:
            return True
        chain = self.target.store.chain(header.base, self._headers)
        base = self._headers.get(header.base)
        if chain is None or base is None:
            return False
        return (
            base.depth < header.depth <= MAX_DEPTH and base.content_length == header.content_length
        )


def _heal(source: Repository, target: Repository, broken: Sequence[str]) -> list[str]:
    lost = []
    for digest in broken:
        try:
            target.store.put_self_contained(digest, source.store.read(digest))
        except (NotFoundError, IntegrityError):
            lost.append(digest)
    return lost
