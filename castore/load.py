"""Documents and files out of the store, verified."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from castore.digest import digest_of
from castore.errors import CorruptObjectError
from castore.objects import ObjectStore
from castore.snapshot import Snapshot, SnapshotName
from castore.tree import File, Tree

_KEPT = 64 << 20  # bytes of a file's blobs: small things between its tensors share one
_LARGE = 2 << 20  # bytes of a tree that is decoded anew each time


def read_snapshot(data: bytes, name: SnapshotName) -> Snapshot:
    """A snapshot's document, checked against the digest in its name."""
    actual = digest_of(data)[:16]
    if actual != name.id:
        raise CorruptObjectError(
            f"snapshot {name}: its bytes have the digest {actual}: the document is damaged",
            name=name.path,
            expected=name.id,
            actual=actual,
        )
    return Snapshot.decode(data, f"snapshot {name}")


def read_tree(store: ObjectStore, digest: str, *, keep: bool = True) -> Tree:
    """A tree by digest: read and verified each time, decoded where it is not kept from before.

    Without ``keep`` it is decoded and not kept: who goes through all trees has no use for it.
    """
    data = store.read(digest)
    if len(data) > _LARGE or not keep:
        return Tree.decode(bytes(data), f"tree {digest}")
    kept = store.trees.get(digest, lambda: Tree.decode(bytes(data), f"tree {digest}"))
    return Tree(dict(kept.entries))  # the caller's own, whatever it does to it


def read_file(
    store: ObjectStore, file: File, start: int = 0, stop: int | None = None
) -> Iterator[bytes]:
    """Bytes ``[start, stop)`` of a file, slice by slice; only the blobs it touches are read.

    A blob that several slices share is read once, unless `_KEPT` bytes of others came between.
    """
    stop = file.size if stop is None else min(stop, file.size)
    at = 0
    kept: OrderedDict[str, memoryview] = OrderedDict()
    for s in file.slices:
        a, b = max(start, at), min(stop, at + s.length)
        if a < b:
            content = _content(store, s.blob, kept)
            if s.offset + s.length > len(content):
                raise CorruptObjectError(
                    f"object {s.blob} has {len(content)} bytes, the tree wants"
                    f" {s.offset + s.length}: the tree is damaged",
                    name=s.blob,
                )
            yield bytes(content[s.offset + a - at : s.offset + b - at])
        at += s.length


def _content(store: ObjectStore, blob: str, kept: OrderedDict[str, memoryview]) -> memoryview:
    """A blob's content, from ``kept`` where it is; what was used longest ago makes room."""
    content = kept.get(blob)
    if content is None:
        content = memoryview(store.read(blob))
        room = _KEPT - len(content)
        while kept and sum(map(len, kept.values())) > room:
            kept.popitem(last=False)
        kept[blob] = content
    kept.move_to_end(blob)
    return content
