"""Repositories that somebody else filled to mislead, exhaust or escape: each operation ends with a
value or one of castore's errors, nothing is written outside a target, no pickle runs, and what
is good beside the bad stays.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from typer.testing import CliRunner

from castore import document, frame
from castore.cli import app
from castore.copy import copy
from castore.digest import digest_of
from castore.errors import (
    AlreadyExistsError,
    CastoreError,
    CorruptObjectError,
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
)
from castore.objects import object_name
from castore.prune import prune
from castore.repository import CONFIG, Repository
from castore.snapshot import Snapshot, SnapshotName, name_of
from castore.tensors import describe
from castore.tree import Tree
from castore.usage import usage
from tests.helpers import (
    clocked,
    contents,
    draft,
    encode_delta,
    encode_raw,
    folder,
    new_repository,
    noise,
    problems,
    raw,
    series,
)

kinds = pytest.mark.parametrize("kind", ["local", "memory"])
GOOD = {"m": series(1)[0], "sub/x": b"good" * 100}
MIB = 1 << 20


# -- putting in place what no castore writes


def put(repository: Repository, content: bytes, made: bytes | None = None) -> str:
    """An object whatever its frame says of it."""
    digest = digest_of(content)
    try:
        repository.backend.create(object_name(digest), made or encode_raw(content))
    except AlreadyExistsError:
        pass
    return digest


def publish(repository: Repository, tree: str, time: int = 1_700_000_000_000_000) -> SnapshotName:
    """A snapshot of whatever ``tree`` is."""
    data = Snapshot(tree, time, "evil").encode()
    name = name_of(data, "evil", "snapshot", time)
    repository.backend.create(name.path, data)
    return name


def publish_text(repository: Repository, text: bytes) -> SnapshotName:
    name = name_of(text, "evil", "snapshot", 1_700_000_000_000_000)
    repository.backend.create(name.path, text)
    return name


def planted(repository: Repository, entries: dict[str, Any]) -> SnapshotName:
    """A snapshot of a tree with these entries, as they are."""
    return publish(repository, put(repository, document.encode("tree", {"entries": entries})))


def packed(blobs: list[str], slices: list[list[int]]) -> dict[str, Any]:
    size = sum(n for _, _, n in slices)
    return {
        "type": "file", "size": size, "sha256": "0" * 64, "executable": False,
        "blobs": blobs, "slices": slices,
    }  # fmt: skip


def small(repository: Repository, content: bytes = b"x" * 1000) -> dict[str, Any]:
    return packed([put(repository, content)], [[0, 0, len(content)]])


def sealed(head: bytes, payload: bytes) -> bytes:
    """A frame of these fields (bytes 0 to 47) and payload, with right checksums."""
    head = head[:48] + xxhash.xxh3_64_digest(payload)
    return head + xxhash.xxh3_64_digest(head) + payload


def as_delta(content: bytes, base: bytes, base_digest: str, depth: int = 1) -> bytes:
    made = encode_delta(content, base, base_digest, 0, 1)
    return sealed(made[:7] + bytes([depth]) + made[8:48], made[64:])


# -- names


def evil_path(path: str) -> Callable[[Repository], SnapshotName]:
    return lambda repository: planted(repository, {path: small(repository)})


def escaping_link(repository: Repository) -> SnapshotName:
    """A link to outside, and a file that would lie below it."""
    entries = {"a": {"type": "link", "target": "../.."}, "a/escaped": small(repository)}
    return planted(repository, entries)


def colliding(repository: Repository) -> SnapshotName:
    file = small(repository)
    return planted(repository, {"Readme": file, "README": file})


def colliding_folders(repository: Repository) -> SnapshotName:
    """On a file system that ignores case, the file would be written through the link."""
    entries = {"A": {"type": "link", "target": "/tmp"}, "a/escaped": small(repository)}
    return planted(repository, entries)


def nested_names(repository: Repository) -> SnapshotName:
    """Each folder on the way was once remembered with its whole path: 400 times the input."""
    deep = "/".join(["d"] * 2000)
    return planted(repository, {f"{chr(0x4E00 + i)}/{deep}": {"type": "folder"} for i in range(60)})


# -- chains


def delta_loop(repository: Repository) -> SnapshotName:
    a, b = b"a" * 1000, b"b" * 1000
    put(repository, a, as_delta(a, b, digest_of(b), 2))
    put(repository, b, as_delta(b, a, digest_of(a), 1))
    return planted(repository, {"f": packed([digest_of(a), digest_of(b)], [[0, 0, 9], [1, 0, 9]])})


def delta_of_itself(repository: Repository) -> SnapshotName:
    a = b"c" * 1000
    put(repository, a, as_delta(a, a, digest_of(a)))
    return planted(repository, {"f": packed([digest_of(a)], [[0, 0, 1000]])})


def chain(repository: Repository, length: int, depth: Callable[[int], int]) -> SnapshotName:
    before = noise(1000, 0)
    digest = put(repository, before)
    for i in range(1, length + 1):
        content = noise(1000, i)
        put(repository, content, as_delta(content, before, digest, depth(i)))
        before, digest = content, digest_of(content)
    return planted(repository, {"f": packed([digest], [[0, 0, 1000]])})


def too_deep(repository: Repository) -> SnapshotName:
    return chain(repository, 60, lambda i: min(i, frame.MAX_DEPTH))


def deeper_than_it_says(repository: Repository) -> SnapshotName:
    return chain(repository, 60, lambda _: 1)


def delta_bomb(repository: Repository) -> SnapshotName:
    """A few kilobytes that are 64 MiB, on a base that is, used for a file of 40 GB."""
    zeros, ones = bytes(frame.MAX_CONTENT), b"\1" * frame.MAX_CONTENT
    base = put(repository, zeros, b"".join(frame.packed(zeros, 1)))
    bomb = put(repository, ones, as_delta(ones, zeros, base))
    return planted(repository, {"f": packed([bomb], [[0, 0, frame.MAX_CONTENT]] * 640)})


def missing_base(repository: Repository) -> SnapshotName:
    a = b"e" * 1000
    put(repository, a, as_delta(a, a, "12" * 32))
    return planted(repository, {"f": packed([digest_of(a)], [[0, 0, 1000]])})


def base_of_another_length(repository: Repository) -> SnapshotName:
    a, base = b"f" * 1000, b"g" * 999
    put(repository, base)
    put(repository, a, as_delta(a, a, digest_of(base)))
    return planted(repository, {"f": packed([digest_of(a)], [[0, 0, 1000]])})


def tree_as_base(repository: Repository) -> SnapshotName:
    """The tree itself is a delta of a blob that it names."""
    a = b"h" * 1000
    text = document.encode("tree", {"entries": {"f": small(repository, a)}})
    base = put(repository, text[::-1])
    put(repository, text, as_delta(text, text[::-1], base))
    return publish(repository, digest_of(text))


# -- documents


def blob_for_a_tree(repository: Repository) -> SnapshotName:
    return publish(repository, put(repository, b"no tree"))


def snapshot_for_a_tree(repository: Repository) -> SnapshotName:
    return publish(repository, put(repository, Snapshot("0" * 64, 1, "evil").encode()))


def missing_tree(repository: Repository) -> SnapshotName:
    return publish(repository, "34" * 32)


def missing_blob(repository: Repository) -> SnapshotName:
    return planted(repository, {"f": packed(["56" * 32], [[0, 0, 10]])})


def ten_gigabytes_in_the_tree(repository: Repository) -> SnapshotName:
    """A file of 10 GB out of a blob of 1000 bytes."""
    return planted(repository, {"f": packed([put(repository, b"x" * 1000)], [[0, 0, 10 << 30]])})


def ten_gigabytes_in_the_header(repository: Repository) -> SnapshotName:
    a = b"i" * 1000
    head = encode_raw(a)[:48]
    head = head[:8] + struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF) + head[16:]
    put(repository, a, sealed(head, a))
    return planted(repository, {"f": packed([digest_of(a)], [[0, 0, 1000]])})


def header_that_promises_64_mib(repository: Repository) -> SnapshotName:
    """A Blosc buffer that says 64 MiB, and ends."""
    a = b"j" * 1000
    payload = bytearray(frame.compress(bytes(1000), 1))
    payload[4:8] = struct.pack("<I", frame.MAX_CONTENT)
    head = struct.pack("<4sBBBBII32s", b"cst1", 1, 1, 1, 0, frame.MAX_CONTENT, len(payload), b"")
    put(repository, a, sealed(head, bytes(payload)))
    return planted(repository, {"f": packed([digest_of(a)], [[0, 0, 1000]])})


def keys_twice(repository: Repository) -> SnapshotName:
    text = document.encode("tree", {"entries": {"f": {"type": "folder"}}})
    text = text.replace(b'"entries":', b'"entries":{"g":{"type":"folder"}},"entries":')
    return publish(repository, put(repository, text))


def keys_twice_in_the_snapshot(repository: Repository) -> SnapshotName:
    data = Snapshot("0" * 64, 1_700_000_000_000_000, "evil").encode()
    return publish_text(repository, data.replace(b'"files":0', b'"files":0,"files":0'))


def deep_tree(repository: Repository) -> SnapshotName:
    text = b'{"entries":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001
    return publish(repository, put(repository, text))


def deep_facts(repository: Repository) -> SnapshotName:
    data = Snapshot("0" * 64, 1_700_000_000_000_000, "evil").encode()
    return publish_text(
        repository, data.replace(b'"facts":{}', b'"facts":{"a":' + b"[" * 100_000 + b"]" * 100_000)
    )


ATTACKS: dict[str, Callable[[Repository], SnapshotName]] = {
    "parent": evil_path("../escaped"),
    "parent_inside": evil_path("a/../../escaped"),
    "absolute": evil_path("/tmp/escaped"),
    "nul": evil_path("a\0b"),
    "backslash": evil_path("..\\escaped"),
    "escape_sequence": evil_path("a\x1b[2Jb"),
    "long_name": evil_path("n" * 300),
    "long_path": evil_path("/".join(["p" * 200] * 30)),
    **{
        f.__name__: f
        for f in (
            *(escaping_link, colliding, colliding_folders, nested_names, delta_loop),
            *(delta_of_itself, too_deep, deeper_than_it_says, delta_bomb, missing_base),
            *(base_of_another_length, tree_as_base, blob_for_a_tree, snapshot_for_a_tree),
            *(missing_tree, missing_blob, ten_gigabytes_in_the_tree, ten_gigabytes_in_the_header),
            *(header_that_promises_64_mib, keys_twice, keys_twice_in_the_snapshot, deep_tree),
            *(deep_facts,),
        )
    },
}
OF_OBJECTS = ["delta_loop", "too_deep", "missing_base", "tree_as_base", "missing_tree"]
READABLE = {"delta_bomb", "tree_as_base", "nested_names"}


# -- all operations on all of them


def survives(act: Callable[[], Any]) -> Any:
    """The value of ``act``, or one of castore's errors."""
    try:
        return act()
    except CastoreError as e:
        return e


def everything(repository: Repository, name: SnapshotName, tmp_path: Path) -> None:
    """Each thing a user can do with a snapshot; the bad one gives an error, or its content."""
    target = tmp_path / "below" / "out"
    target.parent.mkdir()
    survives(lambda: repository.snapshot(name))
    tree = survives(lambda: repository.tree(name))
    if isinstance(tree, Tree):
        for path in list(tree.entries)[:3]:
            survives(lambda path=path: repository.read(name, path, 0, 100))
    if not isinstance(tree, Tree) or tree.size < 1 << 34:
        assert isinstance(survives(lambda: repository.checkout(name, target)), Tree | CastoreError)
    survives(lambda: usage(repository))
    survives(lambda: repository.commit(draft({"m": noise(1000)}, base="evil@latest")))
    assert {p.parent for p in tmp_path.rglob("escaped")} == set()
    assert not Path("/tmp/escaped").exists()
    assert sorted(p.name for p in target.parent.iterdir()) in ([], ["out"])


def good_is_whole(repository: Repository, name: SnapshotName) -> None:
    assert contents(repository, name) == GOOD


@pytest.mark.parametrize(
    ("attack", "kind"),
    [*((a, "local") for a in ATTACKS), *((a, "memory") for a in OF_OBJECTS)],
)
def test_a_hostile_snapshot_harms_nothing_beside_it(kind: str, attack: str, tmp_path: Path) -> None:
    """Bad names, chains, lengths and documents: SE2, SE6, CC7."""
    repository, clock = clocked(new_repository(kind, tmp_path))
    good = repository.commit(draft(GOOD), namespace="good").name
    name = ATTACKS[attack](repository)
    before = raw(repository)
    everything(repository, name, tmp_path)
    found = problems(repository)
    assert attack in READABLE or found
    assert all(str(name) in str(p.needed_by) or name.path == p.object for p in found)
    good_is_whole(repository, good)
    clock.sleep(3600)
    survives(lambda: prune(repository, grace=0, offline=True))
    after = raw(repository)
    lost = set(before) - set(after)
    assert not {n for n in lost if not n.startswith("objects/")}
    assert {n: after[n] for n in before if n not in lost} == {
        n: d for n, d in before.items() if n not in lost
    }
    good_is_whole(repository, good)
    if isinstance(survives(lambda: repository.tree(name)), CastoreError):
        assert lost == set()  # what it needs is not known
    copied = new_repository("local", tmp_path, "copy")
    assert copy(repository, copied, namespaces=["good"]).snapshots == 1
    good_is_whole(copied, next(iter(copied.snapshots("good"))))
    survives(lambda: copy(repository, copied))
    same = {(p.kind, p.object) for p in problems(copied)} - {(p.kind, p.object) for p in found}
    assert same == set()  # a snapshot that lies is copied as it is, or not at all
    repository.forget(name)
    clock.sleep(3600 * 24 * 365)
    survives(lambda: prune(repository, grace=0, offline=True))
    good_is_whole(repository, good)
    assert problems(repository) == []


@pytest.mark.parametrize("attack", ["delta_loop", "parent"])
def test_the_same_on_s3(
    attack: str, s3_url: str, s3_options: dict[str, Any], tmp_path: Path
) -> None:
    repository = Repository.init(s3_url, storage_options=s3_options)
    good = repository.commit(draft(GOOD), namespace="good").name
    name = ATTACKS[attack](repository)
    everything(repository, name, tmp_path)
    assert problems(repository)
    before = raw(repository)
    survives(lambda: prune(repository, grace=0, dry_run=True))
    assert raw(repository) == before
    good_is_whole(repository, good)


@pytest.mark.parametrize("attack", ["too_deep", "deeper_than_it_says", "delta_loop"])
def test_a_chain_that_does_not_end_is_an_error_that_says_so(attack: str, tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    name = ATTACKS[attack](repository)
    with pytest.raises(CorruptObjectError, match="chain"):
        repository.read(name, "f")
    with pytest.raises(CorruptObjectError, match="chain"):
        repository.checkout(name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def measured(act: Callable[[], Any]) -> int:
    """Bytes that Python and NumPy held at one time during ``act``."""
    tracemalloc.start()
    try:
        survives(act)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "attack",
    ["nested_names", "ten_gigabytes_in_the_tree", "ten_gigabytes_in_the_header", "deep_tree"],
)
def test_memory_does_not_follow_a_number_or_a_name(attack: str, tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    name = ATTACKS[attack](repository)
    assert measured(lambda: repository.tree(name)) < 64 * MIB
    assert measured(lambda: repository.checkout(name, tmp_path / "out")) < 64 * MIB


def test_a_bomb_is_read_in_parts(tmp_path: Path) -> None:
    """100 bytes of a file of 40 GB take the memory of one chain: base, difference, payload."""
    repository = new_repository("local", tmp_path)
    name = delta_bomb(repository)
    assert sum(s.size for s in repository.backend.list("objects")) < MIB
    assert repository.read(name, "f", 1 << 34, (1 << 34) + 100) == b"\1" * 100
    peak = measured(lambda: repository.read(name, "f", 1 << 34, (1 << 34) + 100))
    assert peak < 3 * frame.MAX_CONTENT


def test_files_of_any_size_in_place_of_objects_and_documents(tmp_path: Path) -> None:
    """10 GB where an object, a tree, a snapshot or the settings should be are not read in."""
    repository = new_repository("local", tmp_path)
    forgotten = repository.forget(repository.commit(draft({"m": b"old"})).name)
    commit = repository.commit(draft(GOOD))
    store = Path(repository.url)
    [blob, *_] = repository.tree(commit.name).blobs()
    for name in (object_name(blob), object_name(commit.snapshot.tree), commit.name.path):
        (store / name).chmod(0o600)
        os.truncate(store / name, 10 << 30)
        assert measured(lambda: contents(repository, commit.name)) < 300 * MIB
        with pytest.raises(IntegrityError):
            contents(repository, commit.name)
        assert {p.kind for p in problems(repository)} == {"corrupt"}
    with pytest.raises(IntegrityError):
        prune(repository, grace=0)
    (store / forgotten.forgotten).chmod(0o600)
    os.truncate(store / forgotten.forgotten, 10 << 30)
    words = ["snapshots", "--forgotten", "-r", repository.url]
    assert measured(lambda: CliRunner().invoke(app, words)) < 30 * MIB
    assert CliRunner().invoke(app, words).exit_code == 3
    with pytest.raises(IntegrityError):
        repository.unforget(forgotten)
    os.truncate(store / CONFIG, 10 << 30)
    with pytest.raises(FormatError):
        Repository.open(repository.url)


# -- pickles in every place


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def trapped_files(trace: Path) -> dict[str, bytes]:
    """A pickle wherever a reader of castore might look for one."""
    evil = pickle.dumps(Trap(trace))
    files: dict[str, bytes] = {
        f"bare{suffix}": evil for suffix in (".pt", ".pkl", ".npy", ".npz", ".safetensors", "")
    }
    for name in ("archive/data.pkl", "data.pkl", "x/.data/serialization_id", "archive/byteorder"):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr(name, evil)
            archive.writestr("archive/data/0", bytes(100_000))
        files[f"{name.replace('/', '_')}.pt"] = out.getvalue()
    for name, save in (("objects.npz", np.savez), ("packed.npz", np.savez_compressed)):
        out = io.BytesIO()
        save(out, a=np.array([Trap(trace)], object), b=np.zeros(50_000))
        files[name] = out.getvalue()
    out = io.BytesIO()
    np.save(out, np.array([Trap(trace)], object))
    files["objects.npy"] = out.getvalue()
    text = json.dumps({"__metadata__": {"pickle": evil.hex()}}).encode()
    files["metadata.safetensors"] = struct.pack("<Q", len(text)) + text
    return files


@kinds
def test_se1_no_operation_unpickles(kind: str, tmp_path: Path) -> None:
    """SE1: as content, as an object's frame, as a tree, as a snapshot, as the settings."""
    trace = tmp_path / "trace"
    files, evil = trapped_files(trace), pickle.dumps(Trap(trace))
    repository, clock = clocked(new_repository(kind, tmp_path))
    name = repository.commit(draft(files)).name
    for data in files.values():
        survives(lambda data=data: describe(lambda a, b: data[a:b], len(data)))
    assert contents(repository, name) == files
    repository.checkout(name, tmp_path / "out")
    assert folder(tmp_path / "out") == files
    second = repository.commit([tmp_path / "out"]).name
    copy(repository, new_repository("local", tmp_path, "copy"))
    assert problems(repository, layout=True) == []
    bad = publish(repository, put(repository, evil))
    publish_text(repository, evil)
    repository.backend.create(object_name("78" * 32), evil)
    (tmp_path / "more").mkdir()
    everything(repository, bad, tmp_path / "more")
    assert {p.kind for p in problems(repository, layout=True)} <= {"malformed", "corrupt", "layout"}
    clock.sleep(3600)
    survives(lambda: prune(repository, grace=0, offline=True))
    assert contents(repository, second) == files
    repository.backend.delete(CONFIG)
    repository.backend.create(CONFIG, evil)
    if kind == "local":
        assert isinstance(survives(lambda: Repository.open(repository.url)), FormatError)
    assert not trace.exists()
    pickle.loads(evil)
    assert trace.exists()  # it would have been


def test_a_missing_object_is_not_a_damaged_one(tmp_path: Path) -> None:
    """What is gone and what is wrong are two errors, in a repository of somebody else too."""
    repository = new_repository("local", tmp_path)
    for attack in (missing_base, missing_tree, missing_blob):
        with pytest.raises(ObjectNotFoundError):
            contents(repository, attack(repository))
