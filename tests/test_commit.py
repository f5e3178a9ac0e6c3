"""Commits: stored once, in short chains, all or nothing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from castore import frame
from castore.base_contents import BaseContents
from castore.commit import Options
from castore.digest import digest_of
from castore.errors import BackendError, CorruptObjectError, FormatError, InvalidInputError
from castore.objects import object_name
from castore.repository import Repository
from castore.source import DiskFile, Draft, MemoryFile, Reader, scan
from castore.tree import File
from castore.write import FrameWriter
from tests.faults import Counting, Outage
from tests.helpers import (
    blobs,
    contents,
    draft,
    drift,
    flip_object,
    headers,
    lay,
    new_repository,
    noise,
    overwrite,
    problems,
    raw,
    safetensors,
    series,
    weights,
    with_backend,
)

kinds = pytest.mark.parametrize("kind", ["local", "memory"])


def big(repository: Repository, name: Any, path: str) -> str:
    """The digest of the one tensor of a file made by `series`."""
    [found] = [b for b in blobs(repository, name, path) if len(repository.store.read(b)) >= 65536]
    return found


# -- a file that changes


class Touchy(DiskFile):
    """A file that something changes when the ``after``-th read of it is over."""

    touch: Callable[[str], None]
    after = 1

    def open(self) -> Reader:
        source = self

        class Mutating(Reader):
            reads = 0

            def read(self, start: int, stop: int) -> bytearray:
                data = super().read(start, stop)
                self.reads += 1
                if self.reads == source.after:
                    source.touch(source.path)
                return data

        return Mutating(self)


def _touchy(path: Path, touch: Callable[[str], None], after: int) -> Touchy:
    [found] = scan([path]).values()
    assert isinstance(found, DiskFile)

    class Made(Touchy):
        pass

    Made.touch, Made.after = staticmethod(touch), after
    return Made(found.path, found.size, found.executable, found.identity)


def _same_size(path: str) -> None:
    with open(path, "r+b") as f:
        f.write(b"x" * 100)
    os.utime(path, ns=(1, 1))


def _grow(path: str) -> None:
    with open(path, "ab") as f:
        f.write(b"more")


@kinds
@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize(
    "touch", [_same_size, _grow, lambda p: os.truncate(p, 10), lambda p: os.truncate(p, 0)]
)
def test_a_file_that_changes_while_it_is_read_fails_the_commit(
    kind: str, touch: Callable[[str], None], after: int, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    first = repository.commit(draft({"ok": b"1"})).name
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors({"a": weights(), "b": weights(seed=1)}))
    entries = {"a": MemoryFile(b"2"), "m": _touchy(path, touch, after), "z": MemoryFile(b"3")}
    with pytest.raises(InvalidInputError, match="m.safetensors changed while it was read"):
        repository.commit(Draft(entries))
    assert list(repository.snapshots()) == [first]
    assert not [n for n in raw(repository) if n.startswith("pending/")]
    assert problems(repository) == []
    assert list(contents(repository, repository.commit([path]).name)) == ["m.safetensors"]


@pytest.mark.parametrize("how", ["gone", "other", "link", "folder"])
def test_a_file_that_is_another_than_was_scanned_fails_the_commit(how: str, tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    run = lay(tmp_path / "run", {"a": b"1", "b": b"2"})
    found = scan([run])
    (run / "a").rename(tmp_path / "kept")  # or the other may get its inode, within one clock tick
    if how == "other":
        (run / "a").write_bytes(b"3")
    elif how == "link":
        (run / "a").symlink_to("b")
    elif how == "folder":
        (run / "a").mkdir()
    with pytest.raises((InvalidInputError, BackendError), match="run/a"):
        repository.commit(Draft(found))
    assert list(repository.snapshots()) == []


def test_fs6_equal_size_and_time_do_not_hide_a_change(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    run = lay(tmp_path / "run", {"a": b"old content"})
    info = (run / "a").stat()
    one = repository.commit([run]).name
    (run / "a").write_bytes(b"new content")
    os.utime(run / "a", ns=(info.st_atime_ns, info.st_mtime_ns))
    two = repository.commit([run]).name
    assert repository.read(one, "a") == b"old content"
    assert repository.read(two, "a") == b"new content"


# -- once


@kinds
def test_the_same_content_again_adds_nothing_but_a_snapshot(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    files = {"m.safetensors": series(1)[0], "twin": series(1)[0], "n": noise(100_000), "e": b""}
    counting = Counting(repository.backend)
    seen = with_backend(repository, counting)
    first = seen.commit(draft(files))
    assert len(set(counting.created)) == len(counting.created)
    assert first.added == sum(len(d) for n, d in raw(repository).items() if "objects/" in n)
    second = seen.commit(draft(files))
    assert second.added == 0
    assert second.snapshot.tree == first.snapshot.tree
    before = len(raw(repository))
    moved = seen.commit(draft({f"moved/{p}": c for p, c in files.items()}))
    assert len(raw(repository)) == before + 2
    assert moved.added == len(repository.store.frame(moved.snapshot.tree))
    assert contents(repository, moved.name) == {f"moved/{p}": c for p, c in files.items()}


def test_workers_do_not_wait_for_each_other_in_a_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later of two equal blobs is hashed first, and its base lies behind the earlier one."""
    twin = weights(16_500, 1)
    first = {"p": weights(17_500, 2), "q": twin, "r": weights(16_500, 3), "s": weights(17_000, 4)}
    second = {"n": weights(22_500, 5), "x": twin, "y": weights(17_000, 6)}
    files = {"m_0": safetensors(first), "m_1": safetensors(second)}
    seen: list[str] = []
    hashed = threading.Event()

    def digest(content: Any) -> str:
        found = digest_of(content)
        if bytes(content) == twin.tobytes():
            seen.append(found)
            if len(seen) == 1:
                assert hashed.wait(60)
            hashed.set()
        return found

    monkeypatch.setattr("castore.commit.digest_of", digest)
    repository = new_repository("memory", tmp_path)
    thread = threading.Thread(target=repository.commit, args=(draft(files),), daemon=True)
    thread.start()
    thread.join(60)
    assert len(seen) == 2 and not thread.is_alive()
    assert contents(repository, "latest") == files


def test_one_tensor_is_stored_once_whatever_file_it_comes_in(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save

    repository = new_repository("local", tmp_path)
    tensor = torch.from_numpy(weights(50_000))
    files = {"m.safetensors": save({"w": tensor})}
    for name in ("m.pt", "m.pth", "m.ckpt"):
        buffer = io.BytesIO()
        torch.save({"w": tensor, "step": len(name)}, buffer)
        files[name] = buffer.getvalue()
    array = io.BytesIO()
    np.savez(array, w=weights(50_000))
    files["m.npz"] = array.getvalue()
    one = repository.commit(draft(files))
    shared = set.intersection(*(set(blobs(repository, one.name, p)) for p in files))
    [digest] = shared
    assert bytes(repository.store.read(digest)) == tensor.numpy().tobytes()
    assert one.added < 1.2 * tensor.numel() * 4
    assert contents(repository, one.name) == files


def test_hc8_one_tensor_is_stored_once_whatever_the_order_of_the_metadata(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": weights(seed=i) for i in range(4)}
    keys = [f"key{i}" for i in range(16)]
    one = safetensors(tensors, {k: k for k in keys})
    other = safetensors(tensors, {k: k for k in reversed(keys)})
    assert one != other
    repository = new_repository("local", tmp_path)
    first = repository.commit(draft({"m.safetensors": one})).name
    second = repository.commit(draft({"m.safetensors": other}))
    assert len(set(blobs(repository, first, "m.safetensors"))) == 5
    both = set(blobs(repository, first, "m.safetensors")) & set(
        blobs(repository, second.name, "m.safetensors")
    )
    assert len(both) == 4
    assert second.added < 5000
    assert repository.read(second.name, "m.safetensors") == other


def test_hc8_safetensors_written_by_two_processes_share_their_tensors(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np; from safetensors.numpy import save_file\n"
        "t = {f'w{i}': np.arange(20000, dtype='f4') + i for i in range(4)}\n"
        "save_file(t, sys.argv[1], {k: k for k in set('abcdefghijklmnop')})\n"
    )
    for i in range(2):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / f"{i}.safetensors")],
            env={**os.environ, "PYTHONHASHSEED": str(i)},
            check=True,
        )
    repository = new_repository("memory", tmp_path)
    name = repository.commit([tmp_path / "0.safetensors", tmp_path / "1.safetensors"]).name
    shared = set(blobs(repository, name, "0.safetensors")) & set(
        blobs(repository, name, "1.safetensors")
    )
    assert len(shared) == 4


def test_small_runs_of_a_file_share_blobs(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {}
    for i in range(5):
        tensors[f"w{i}"] = weights(seed=i)
        tensors[f"b{i}"] = weights(10, seed=i)
    data = safetensors(tensors)
    repository = new_repository("memory", tmp_path)
    name = repository.commit(draft({"m": data})).name
    entry = repository.tree(name).entries["m"]
    assert isinstance(entry, File)
    assert len(entry.slices) == 11
    assert len(entry.blobs()) == 6
    assert repository.read(name, "m") == data


# -- chains


def depths(repository: Repository) -> list[int]:
    return sorted(h.depth for h in headers(repository).values() if h.codec == frame.DELTA)


@pytest.mark.parametrize("max_chain", [0, 1, 3, 8])
def test_chains_of_successive_commits_are_never_deeper_than_asked(
    max_chain: int, tmp_path: Path
) -> None:
    repository = new_repository("memory", tmp_path)
    files = series(12)
    names = [
        repository.commit(draft({"m.safetensors": f}), options=Options(max_chain=max_chain)).name
        for f in files
    ]
    found = depths(repository)
    assert len(found) == (11 if max_chain else 0)
    assert max(found, default=0) == max_chain
    for name, file in zip(names, files, strict=True):
        assert repository.read(name, "m.safetensors") == file
    assert problems(repository) == []


@pytest.mark.parametrize("max_chain", [0, 1, 3, 8])
def test_chains_within_one_commit_are_never_deeper_than_asked(
    max_chain: int, tmp_path: Path
) -> None:
    repository = new_repository("local", tmp_path)
    files = {f"collect_{i}/m.safetensors": f for i, f in enumerate(series(12))}
    name = repository.commit(draft(files), options=Options(max_chain=max_chain)).name
    found = depths(repository)
    assert len(found) == (11 if max_chain else 0)
    assert max(found, default=0) == max_chain
    assert contents(repository, name) == files
    repository.checkout(name, tmp_path / "out")
    for path, data in files.items():
        assert (tmp_path / "out" / path).read_bytes() == data
    assert problems(repository) == []


def test_a_chain_that_is_full_starts_again_at_its_root(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    digests = []
    for file in series(5):
        name = repository.commit(draft({"m": file}), options=Options(max_chain=2)).name
        digests.append(big(repository, name, "m"))
    found = headers(repository)
    bases = [digests.index(found[d].base) if found[d].base else None for d in digests]
    assert bases == [None, 0, 1, 0, 3]


def test_a_chain_ends_where_the_format_ends_it(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    files = {f"s{i:02d}": f for i, f in enumerate(series(36, 17_000))}
    name = repository.commit(draft(files), options=Options(max_chain=100)).name
    assert max(depths(repository)) == frame.MAX_DEPTH
    assert contents(repository, name) == files


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("collect_000/w.safetensors", "collect_001/w.safetensors"),
        ("step_000100/w.safetensors", "step_000200/w.safetensors"),
        ("w_9.safetensors", "w_10.safetensors"),
        ("w.safetensors", "w.safetensors"),
    ],
)
def test_a_base_is_found_where_the_series_goes_on(before: str, after: str, tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    one, two = series(2)
    first = repository.commit(draft({before: one, "zz_7.safetensors": noise(len(one))})).name
    second = repository.commit(draft({after: two})).name
    assert headers(repository)[big(repository, second, after)].base == big(
        repository, first, before
    )


def test_the_last_one_before_it_is_the_base(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    files = series(4)
    earlier = {f"s_{n}.safetensors": f for n, f in zip((8, 9, 100), files, strict=False)}
    first = repository.commit(draft(earlier)).name
    second = repository.commit(draft({"s_10.safetensors": files[3]})).name
    found = headers(repository)[big(repository, second, "s_10.safetensors")]
    assert found.base == big(repository, first, "s_9.safetensors")


def test_the_base_a_caller_names_is_taken(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    one, two = series(2)
    first = repository.commit(draft({"deep/old.safetensors": one}), namespace="a").name
    plain = repository.commit(draft({"x": noise(100)}), namespace="b")
    for i, base in enumerate((f"{first}:deep/old.safetensors", "a@latest:deep/old.safetensors")):
        new = safetensors({"w": drift(weights(), i + 50)})
        commit = repository.commit(draft({"new": new}), namespace="b", base=base)
        found = headers(repository)[big(repository, commit.name, "new")]
        assert found.base == big(repository, first, "deep/old.safetensors")
        assert repository.read(commit.name, "new") == new
    by_path = draft({"p": two, "q": b"1"}, base={"p": f"{first}:deep/old.safetensors"})
    commit = repository.commit(by_path, namespace="c")
    assert headers(repository)[big(repository, commit.name, "p")].depth == 1
    folder = repository.commit(
        draft({"old.safetensors": drift(weights(), 77).tobytes()}),
        namespace="d",
        base=f"{first}:deep",
    )
    assert folder.added > 0
    for wrong in ("nothing", f"{first}:nowhere"):
        with pytest.raises(Exception, match=wrong.rpartition(":")[2]):
            repository.commit(draft({"new": two}), namespace="b", base=wrong)
    wrong_hint = repository.commit(draft({"new": two}), namespace="e", base=str(plain.name))
    assert repository.read(wrong_hint.name, "new") == two


def test_in_a_snapshot_named_as_base_the_nearest_of_a_series_is_taken(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    files = series(3)
    earlier = {"step_100.safetensors": files[0], "step_90.safetensors": files[1], "other": b"1"}
    first = repository.commit(draft(earlier), namespace="a").name
    new = draft({"step_200.safetensors": files[2], "unlike": noise(70_000)})
    second = repository.commit(new, namespace="b", base=str(first)).name
    found = headers(repository)
    base = found[big(repository, second, "step_200.safetensors")].base
    assert base == big(repository, first, "step_100.safetensors")
    assert not found[big(repository, second, "unlike")].base


@pytest.mark.parametrize("compression", ["auto", "none"])
def test_what_is_kept_of_a_run_does_not_keep_all_of_it(
    compression: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small new tensors between large known ones held 4 MiB each, 1.5 GB in a commit."""
    known = weights(250_000)
    tensors = {f"{i}{n}": weights(20_000, i) if n else known for i in range(9) for n in (0, 1)}
    (tmp_path / "m").write_bytes(safetensors(tensors))
    kept: list[Any] = []
    put = FrameWriter.put

    def seen(self: FrameWriter, digest: str, parts: Any) -> None:
        kept.append(parts[1])
        put(self, digest, parts)

    monkeypatch.setattr(FrameWriter, "put", seen)
    keep = BaseContents.keep
    monkeypatch.setattr(BaseContents, "keep", lambda s, d, c: (kept.append(c), keep(s, d, c))[1])
    repository = new_repository("local", tmp_path)
    repository.commit([tmp_path / "m"], options=Options(compression=compression))
    assert len(kept) >= 10
    of_run: dict[int, int] = defaultdict(int)
    sizes = {}
    for content in {id(c): c for c in kept}.values():
        whole = memoryview(content).obj
        of_run[id(whole)] += len(content)
        sizes[id(whole)] = memoryview(whole).nbytes
    assert all(2 * of_run[run] >= size for run, size in sizes.items())


@kinds
@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_a_base_that_cannot_be_read_costs_bytes_only(
    kind: str, damage: str, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    one, two = series(2)
    first = repository.commit(draft({"m": one})).name
    base = big(repository, first, "m")
    if damage == "flip":
        flip_object(repository, base)
    else:
        repository.backend.delete(object_name(base))
    second = repository.commit(draft({"m": two})).name
    assert headers(repository)[big(repository, second, "m")].codec == frame.PACKED
    assert repository.read(second, "m") == two


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_a_named_base_whose_tree_cannot_be_read_costs_bytes_only(
    damage: str, tmp_path: Path
) -> None:
    repository = new_repository("memory", tmp_path)
    one, two = series(2)
    first = repository.commit(draft({"m": one}), namespace="a")
    if damage == "flip":
        flip_object(repository, first.snapshot.tree)
    else:
        repository.backend.delete(object_name(first.snapshot.tree))
    second = repository.commit(draft({"m": two}), namespace="b", base=str(first.name)).name
    assert headers(repository)[big(repository, second, "m")].codec == frame.PACKED
    assert repository.read(second, "m") == two


def test_without_compression_all_frames_of_files_are_raw(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    options = Options(compression="none")
    trees = set()
    for i, file in enumerate(series(3)):
        commit = repository.commit(
            draft({"m": file, "zeros": bytes(100_000), f"{i}": b"x" * 5000}), options=options
        )
        trees.add(commit.snapshot.tree)
        assert repository.read(commit.name, "m") == file
    codecs = {h.codec for d, h in headers(repository).items() if d not in trees}
    assert codecs == {frame.RAW}


def test_frames_do_not_depend_on_the_store_or_the_number_of_workers(tmp_path: Path) -> None:
    files = {f"m_{i}.safetensors": f for i, f in enumerate(series(6))}
    stores = []
    for kind, workers in (("local", 1), ("memory", 2), ("local", 4)):
        repository = new_repository(kind, tmp_path, f"{kind}{workers}")
        repository.commit(draft(files), options=Options(workers=workers))
        stores.append({n: d for n, d in raw(repository).items() if n.startswith("objects/")})
    assert stores[0] == stores[1] == stores[2]


# -- healing


@kinds
@pytest.mark.parametrize("at", [5, 100, -1])
def test_verify_hits_heals_a_damaged_frame(kind: str, at: int, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    files = {"m": series(1)[0], "n": noise(200)}
    name = repository.commit(draft(files)).name
    for path in files:
        flip_object(repository, blobs(repository, name, path)[-1], at)
    flip_object(repository, repository.snapshot(name).tree, at)
    with pytest.raises(CorruptObjectError):
        contents(repository, name)
    again = repository.commit(draft(files), options=Options(verify_hits=True)).name
    assert contents(repository, again) == files
    assert contents(repository, name) == files
    assert problems(repository) == []


@kinds
@pytest.mark.parametrize("what", ["base gone", "base header", "own header"])
def test_a_commit_heals_what_it_needs_and_finds_broken(
    kind: str, what: str, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    one, two = series(2)
    first = repository.commit(draft({"m": one})).name
    second = repository.commit(draft({"m": two})).name
    base, delta = big(repository, first, "m"), big(repository, second, "m")
    assert headers(repository)[delta].base == base
    if what == "base gone":
        repository.backend.delete(object_name(base))
    else:
        flip_object(repository, base if what == "base header" else delta, 3)
    with pytest.raises(Exception, match=base if "base" in what else delta):
        repository.read(second, "m")
    third = repository.commit(draft({"other": two})).name
    assert repository.read(third, "other") == two
    assert repository.read(second, "m") == two
    found = repository.store.header(delta)
    assert found and (found.codec != frame.DELTA or what == "own header")


def test_a_newer_frame_in_the_way_is_refused_by_name(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    name = repository.commit(draft({"m": b"1"})).name
    [digest] = blobs(repository, name, "m")
    data = bytearray(repository.store.frame(digest))
    data[4] = 2
    data[56:64] = xxhash.xxh3_64_digest(bytes(data[:56]))
    overwrite(repository, object_name(digest), bytes(data))
    with pytest.raises(FormatError, match=f"{digest}: frame version 2"):
        repository.read(name, "m")
    with pytest.raises(FormatError, match="frame version 2"):
        repository.commit(draft({"again": b"1"}))
    assert repository.store.frame(digest) == bytes(data)


# -- trouble with the store


@kinds
@pytest.mark.parametrize("folder", ["objects", "snapshots"])
def test_a_store_that_refuses_reads_fails_the_commit_and_leaves_no_snapshot(
    kind: str, folder: str, tmp_path: Path
) -> None:
    repository = new_repository(kind, tmp_path)
    repository.commit(draft({"m": series(1)[0]}))
    before = list(repository.snapshots())
    outage = Outage(repository.backend, lambda call, name: name.startswith(folder))
    with pytest.raises(BackendError, match="does not answer"):
        with_backend(repository, outage).commit(draft({"m": series(2)[1], "n": b"2"}))
    assert list(repository.snapshots()) == before
    assert problems(repository) == []


def test_many_files_at_once_and_more_bytes_than_are_in_flight(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    files = {f"f{i:04d}": b"%d" % i * 10 for i in range(600)}
    files["big"] = bytes(70 << 20)
    name = repository.commit(draft(files)).name
    assert contents(repository, name) == files


def test_two_equal_blobs_at_once_of_which_one_is_the_others_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one is registered first: the earlier waits for it, so it must not wait in turn."""
    repository = new_repository("local", tmp_path)
    calls, second = iter(range(100)), threading.Event()

    def late_first(data: Any) -> str:
        call = next(calls)
        if call == 0:
            assert second.wait(60)
            time.sleep(0.2)  # the other needs a moment to be registered
        digest = digest_of(data)
        if call == 1:
            second.set()
        return digest

    monkeypatch.setattr("castore.commit.digest_of", late_first)
    files = {"m_0": weights().tobytes(), "m_1": weights().tobytes()}
    assert contents(repository, repository.commit(draft(files)).name) == files
