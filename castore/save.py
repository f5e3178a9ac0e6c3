"""From a draft to stored objects and a snapshot's document, ready to be published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from castore.commit import Committer, Options
from castore.digest import digest_of
from castore.encode import encode
from castore.errors import FormatError, IntegrityError, InvalidInputError, NotFoundError
from castore.frame import MAX_CONTENT
from castore.objects import ObjectStore
from castore.snapshot import Snapshot
from castore.source import BaseFile, DiskFile, Draft, MemoryFile
from castore.tree import Entry, File, Link, Tree, build_tree, check_target


@dataclass(frozen=True, slots=True)
class Saved:
    """A document whose objects are stored, and the tree it names.

    ``need`` lists the digests it needs, ``heal`` puts broken ones back and gives those it could
    not, ``added`` counts the bytes newly stored.
    """

    snapshot: Snapshot
    tree: Tree
    need: list[str]
    heal: Callable[[Sequence[str]], list[str]]
    added: int


def precheck(draft: Draft, namespace: str) -> None:
    """Refuse what the snapshot or tree would refuse, before anything is read or stored."""
    stand_in = File(0, "0" * 64)
    build_tree(
        {
            p: stand_in if isinstance(e, DiskFile | MemoryFile) else e
            for p, e in draft.entries.items()
        }
    )
    for path, entry in draft.entries.items():
        if isinstance(entry, Link):
            try:
                check_target(entry.target, repr(path))
            except FormatError as e:
                raise InvalidInputError(str(e)) from e
    _document(draft, namespace, "0" * 64, 0, 0, 0).encode()


def save(
    store: ObjectStore,
    draft: Draft,
    namespace: str,
    earlier: Mapping[str, File],
    hint: Callable[[str], File | None],
    options: Options,
    progress: Callable[[int], None],
) -> Saved:
    """Store all files of ``draft``, then its tree; see `Committer` for the parameters."""
    named = draft.base.values() if isinstance(draft.base, Mapping) else ()
    at_hand = [b for b in named if isinstance(b, BaseFile)]
    committer = Committer(store, options, earlier, hint, progress, at_hand)
    sources = {p: e for p, e in draft.entries.items() if isinstance(e, DiskFile | MemoryFile)}
    files = committer.store(sources)
    entries: dict[str, Entry] = {
        p: files[p] if isinstance(e, DiskFile | MemoryFile) else e for p, e in draft.entries.items()
    }
    tree = build_tree(entries)
    content = tree.encode()
    if len(content) > MAX_CONTENT:
        raise InvalidInputError(
            f"a list of {len(entries)} files takes {len(content)} bytes, at most {MAX_CONTENT}:"
            " commit in several snapshots"
        )
    digest = digest_of(content)
    store.sync(tree.blobs())  # before the tree that names them
    added = _put_tree(store, digest, content, options.verify_hits)

    def heal(broken: Sequence[str]) -> list[str]:
        if digest in broken:
            store.put_self_contained(digest, content)
        return committer.heal(d for d in broken if d != digest)

    time = int(store.backend.now() * 1_000_000)
    count = sum(isinstance(e, File) for e in entries.values())
    snapshot = _document(draft, namespace, digest, time, count, tree.size)
    return Saved(snapshot, tree, [digest, *tree.blobs()], heal, committer.writer.added + added)


def _put_tree(store: ObjectStore, digest: str, content: bytes, verify_hits: bool) -> int:
    """Gives the bytes newly stored; one that is there is read back, and healed, on request."""
    frame = b"".join(encode(content, 1, None, "auto"))
    if store.create_many([(digest, frame)])[0]:
        return len(frame)
    if verify_hits:
        try:
            store.read(digest)
        except (IntegrityError, NotFoundError):
            store.put_self_contained(digest, content)
    return 0


def _document(
    draft: Draft, namespace: str, tree: str, time: int, files: int, size: int
) -> Snapshot:
    return Snapshot(
        tree,
        time,
        namespace,
        draft.driver,
        draft.key,
        draft.labels,
        draft.facts,
        draft.parents,
        files,
        size,
    )
