"""Copy snapshots to another repository: only what it lacks, every byte verified.

May be interrupted and run again: what was sent stays and is found present, and a snapshot whose
document is already there is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from castore.checkout import lineages, workers
from castore.digest import Buffer
from castore.encode import encode
from castore.errors import IntegrityError, InvalidInputError, NotFoundError
from castore.frame import HEADER_SIZE, MAX_DEPTH, Header, Parts, parse_header
from castore.load import read_tree
from castore.repository import Repository
from castore.snapshot import Snapshot, SnapshotName
from castore.tree import Tree
from castore.walk import Walker
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
        for window in _windows(todo):
            _copy_window(source, target, window, report, progress)
    return report


def _windows(snapshots: Iterable[Snapshot]) -> Iterator[list[Snapshot]]:
    window: list[Snapshot] = []
    for snapshot in snapshots:
        window.append(snapshot)
        if sum(s.size for s in window) >= _WINDOW:
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
) -> None:
    with target.shared_lock():
        trees = {s.tree: read_tree(source.store, s.tree) for s in window}
        need = list(dict.fromkeys([*trees, *(b for t in trees.values() for b in t.blobs())]))
        present = target.store.current_headers(need)
        lacking = [d for d in need if present[d] is None]
        sender = _Sender(target, present, lacking, progress)
        with FrameWriter(target.store) as sender.writer:
            groups = [*lineages(_union(trees.values())), list(trees)]
            lengths = _union(trees.values()).blob_lengths()
            Walker(source.store, lacking, sender.send).run(
                groups, workers(source.backend), lambda d: lengths.get(d, 0)
            )
        report.objects += sender.writer.objects
        report.bytes += sender.writer.added
        for snapshot in window:
            needs = [snapshot.tree, *trees[snapshot.tree].blobs()]
            report.names.append(target.publish(snapshot, needs, lambda b: _heal(source, target, b)))
            report.snapshots += 1


def _union(trees: Iterable[Tree]) -> Tree:
    """All files of all trees, told apart by a number that sorts as the trees do."""
    return Tree({f"{i}/{p}": f for i, t in enumerate(trees) for p, f in t.files()})


class _Sender:
    """Sends a frame as it is where its base is, or goes, to the target; else without a base."""

    writer: FrameWriter

    def __init__(
        self,
        target: Repository,
        present: Mapping[str, Header | None],
        lacking: Iterable[str],
        progress: Callable[[int], None],
    ):
        self._target, self._progress = target, progress
        self._lacking = frozenset(lacking)
        self._headers: dict[str, Header | None] = {d: h for d, h in present.items() if h}

    def send(self, digest: str, content: Buffer, data: bytes) -> None:
        header = parse_header(data, digest)
        parts: Parts = data[:HEADER_SIZE], memoryview(data)[HEADER_SIZE:]
        if header.base and not self._usable(header):
            parts = encode(content, header.width, None, "auto")
        self._progress(sum(map(len, parts)))
        self.writer.put(digest, parts)

    def _usable(self, header: Header) -> bool:
        """The base is there with its chain, and no deeper than the delta's header says.

        One that this walk sends, before or after, is as good: with its own base or without one
        it is no deeper than in the source.
        """
        if header.base in self._lacking:
            return True
        chain = self._target.store.chain(header.base, self._headers)
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
