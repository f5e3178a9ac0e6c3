"""Repositories with chains, shared and lone objects, and every way to damage one."""

from __future__ import annotations

import random
from collections.abc import Callable

import xxhash

from castore.digest import digest_of
from castore.objects import digest_of_name, object_name
from castore.repository import Repository
from castore.snapshot import Snapshot, SnapshotName, name_of
from castore.tree import File, Slice, build_tree
from tests.helpers import (
    draft,
    encode_delta,
    encode_raw,
    flip,
    flip_object,
    headers,
    noise,
    overwrite,
    series,
)


def fill(repository: Repository) -> list[SnapshotName]:
    """Chains of eight and of three, shared and lone objects, some of nobody any more."""
    names = []
    for i, (file, other) in enumerate(zip(series(9), series(9, 17_000), strict=True)):
        files = {"m": file, "shared": b"s" * 100, f"own{i}": noise(300, i)}
        if i < 3:
            files["n"] = other
        names.append(repository.commit(draft(files), namespace="ab"[i % 2]).name)
    repository.forget(names.pop())
    return names


def sealed(data: bytes, **at: int) -> bytes:
    """A frame with header bytes changed and the header's checksum put right."""
    changed = bytearray(data)
    for offset, value in at.items():
        changed[int(offset[1:])] = value
    changed[56:64] = xxhash.xxh3_64_digest(bytes(changed[:56]))
    return bytes(changed)


def put(repository: Repository, content: bytes) -> str:
    digest = digest_of(content)
    repository.store.create_many([(digest, encode_raw(content))])
    return digest


def publish(repository: Repository, tree: str, time: int = 5) -> SnapshotName:
    data = Snapshot(tree, time, "a").encode()
    name = name_of(data, "a", "snapshot", time)
    repository.backend.create(name.path, data)
    return name


class Damage:
    """One repository and the ways to damage it; each picks its victim by ``rng``."""

    def __init__(self, repository: Repository, names: list[SnapshotName], rng: random.Random):
        self.repository, self.rng = repository, rng
        self.names = sorted(names)
        self.found = sorted(headers(repository).items())
        self.trees = sorted({repository.snapshot(n).tree for n in names})
        files = [file for n in names for _, file in repository.tree(n).files()]
        self.needed = {blob for file in files for blob in file.blobs()}
        self.deltas = [d for d, h in self.found if h.base]
        self.bases = sorted({h.base for _, h in self.found if h.base})
        self.lone = [d for d, h in self.found if not h.base and d in self.needed - {*self.bases}]

    def data(self, digest: str) -> bytes:
        return self.repository.backend.get(object_name(digest))

    def write(self, digest: str, data: bytes) -> None:
        overwrite(self.repository, object_name(digest), data)

    def still(self, digests: list[str]) -> str:
        """One of these that is still there."""
        there = {digest_of_name(s.name) for s in self.repository.store.list()}
        return self.rng.choice([d for d in digests if d in there])

    def missing_blob(self) -> None:
        self.repository.backend.delete(object_name(self.still(self.lone)))

    def missing_base(self) -> None:
        self.repository.backend.delete(object_name(self.still(self.bases)))

    def corrupt_payload(self) -> None:
        flip_object(self.repository, self.still([d for d, _ in self.found]), 70)

    def corrupt_base(self) -> None:
        flip_object(self.repository, self.still(self.bases), -1)

    def wrong_header(self) -> None:
        flip_object(self.repository, self.still([d for d, _ in self.found]), 8)

    def wrong_header_of_a_base(self) -> None:
        flip_object(self.repository, self.still(self.bases), 60)

    def cut(self) -> None:
        digest = self.still(self.deltas)
        self.write(digest, self.data(digest)[:100])

    def cut_base(self) -> None:
        digest = self.still(self.bases)
        self.write(digest, self.data(digest)[:-1])

    def cut_and_without_its_base(self) -> None:
        digest = self.still(self.deltas)
        self.write(digest, self.data(digest)[:100])
        self.repository.backend.delete(object_name(dict(self.found)[digest].base))

    def corrupt_delta_and_base(self) -> None:
        for digest in self.above_one_another():
            flip_object(self.repository, digest)

    def cut_above_a_corrupt_base(self) -> None:
        """What needs the delta needs the base, though nobody reads the delta, or one above it."""
        tops = [d for d in self.deltas if d in self.needed and d not in self.bases]
        pairs = [(dict(self.found)[d].base, d) for d in tops]
        base, delta = next(p for p in pairs if p[0][0] != p[1][0])
        flip_object(self.repository, base)
        self.write(delta, self.data(delta)[:100])

    def corrupt_and_nobodys_above_a_missing_base(self) -> None:
        """Its base is needed elsewhere, which only one part knows."""
        tops = [d for d in self.deltas if d not in self.needed]
        pairs = [(dict(self.found)[d].base, d) for d in tops]
        base, delta = next(p for p in pairs if p[0] in self.needed and p[0][0] != p[1][0])
        self.repository.backend.delete(object_name(base))
        flip_object(self.repository, delta)

    def above_one_another(self) -> tuple[str, str]:
        """A base and what stands on it, in parts of their own where there are many."""
        above = [(h.base, d) for d, h in self.found if h.base and h.depth > 1]
        return self.rng.choice([pair for pair in above if pair[0][0] != pair[1][0]])

    def longer(self) -> None:
        digest = self.still([d for d, _ in self.found])
        self.write(digest, self.data(digest) + b"more")

    def wrong_object(self) -> None:
        self.write(self.still(self.lone), encode_raw(b"something else"))

    def newer_frame(self) -> None:
        digest = self.still(self.bases)
        self.write(digest, sealed(self.data(digest), _4=2))

    def no_less_depth(self) -> None:
        digest = self.still(self.deltas)
        self.write(digest, sealed(self.data(digest), _7=1 + self.rng.randrange(3)))

    def ring(self) -> None:
        """A base stands on its own delta."""
        digest = self.rng.choice([d for d in self.deltas if dict(self.found)[d].depth > 1])
        base = dict(self.found)[digest].base
        above = {f"_{16 + i}": b for i, b in enumerate(bytes.fromhex(digest))}
        self.write(base, sealed(self.data(base), **above))

    def missing_tree(self) -> None:
        self.repository.backend.delete(object_name(self.still(self.trees)))

    def corrupt_tree(self) -> None:
        flip_object(self.repository, self.still(self.trees))

    def junk_tree(self) -> None:
        """A tree that is none, and a delta of nobody's that stands on it."""
        junk = put(self.repository, b"<html>")
        publish(self.repository, junk)
        above = b"<HTML>"
        frame = encode_delta(above, b"<html>", junk, 1, 1)
        self.repository.store.create_many([(digest_of(above), frame)])

    def damaged_tree_as_a_base(self) -> None:
        flip_object(self.repository, self.tree_as_a_base(), self.rng.choice([3, 66]))

    def missing_tree_as_a_base(self) -> None:
        self.repository.backend.delete(object_name(self.tree_as_a_base()))

    def tree_as_a_base(self) -> str:
        """A tree that somebody's blob stands on."""
        tree = build_tree({"x": File(0, "0" * 64)}).encode()
        base = put(self.repository, tree)
        above = tree[:-1] + b"!"
        frame = encode_delta(above, tree, base, 1, 1)
        self.repository.store.create_many([(digest_of(above), frame)])
        slices = (Slice(digest_of(above), 0, len(above)),)
        root = build_tree({"up": File(len(above), "0" * 64, False, slices)}).encode()
        publish(self.repository, base, 6)
        publish(self.repository, put(self.repository, root), 7)
        return base

    def short_tree(self) -> None:
        """A tree wants more than its blobs have, and has other blobs that are damaged."""
        one, two = self.rng.sample(self.lone, 2)
        entries = {
            "x": File(900, "0" * 64, False, (Slice(one, 400, 900),)),
            "y": File(9, "0" * 64, False, (Slice(two, 0, 9),)),
        }
        publish(self.repository, put(self.repository, build_tree(entries).encode()))
        if self.rng.random() < 0.5:
            flip_object(self.repository, self.still([two]))

    def damaged_document(self) -> None:
        name = self.names.pop(self.rng.randrange(len(self.names)))
        overwrite(self.repository, name.path, flip(self.repository.backend.get(name.path), 30))

    def newer_document(self) -> None:
        data = self.repository.backend.get(self.names[0].path)
        data = data.replace(b'"format":1', b'"format":2')
        self.repository.backend.create(name_of(data, "a", "snapshot", 8).path, data)

    def fence(self) -> None:
        """A snapshot is no more: its objects may lack their bases."""
        overwrite(self.repository, self.names.pop().path, b"")
        self.repository.backend.delete(object_name(self.still(self.bases)))

    def malformed_names(self) -> None:
        for name in (
            *("snapshots/a/README", "snapshots/notes", f"objects/ab/{'cd' * 32}"),
            *("objects/00/x", "objects/ff/y", "objects/ab/deep/er", "objects/abc", "objects/g"),
            *("objects/0", "objects/ff0", "objects/zz/strange", "objects/zz/deep/er"),
            *("objects/AB/cd", "objects/README", "objects/ab-x", "objects/ab-y/one"),
            *("objects/ab.x/y", "objects/~"),
        ):
            self.repository.backend.create(name, b"?")


HELP = {"data", "write", "still", "above_one_another", "tree_as_a_base"}
WAYS: list[Callable[[Damage], None]] = [
    way for name, way in vars(Damage).items() if not name.startswith("_") and name not in HELP
]
