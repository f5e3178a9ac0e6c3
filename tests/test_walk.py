"""Walks over chains: each object fetched and decoded once, however many threads there are."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from castore import walk
from castore.checkout import lineages
from castore.digest import digest_of
from castore.errors import CorruptObjectError
from castore.objects import object_name
from castore.repository import Repository
from castore.tree import Tree
from castore.walk import Walker
from tests.faults import Counting
from tests.helpers import (
    draft,
    drift,
    encode_delta,
    encode_raw,
    headers,
    new_repository,
    noise,
    safetensors,
    weights,
    with_backend,
)

LARGE, SMALL = 300_000, 20_000  # a group of blobs over 1 MiB is one thread's, a smaller one is cut


def committed(tmp_path: Path, large: int, small: int, count: int) -> tuple[Repository, Tree]:
    """``count`` files of a series, each of so many tensors that all drift."""
    repository = new_repository("memory", tmp_path)
    tensors = {f"l{i}": weights(LARGE, i) for i in range(large)}
    tensors |= {f"s{i}": weights(SMALL, 100 + i) for i in range(small)}
    files = {}
    for n in range(count):
        files[f"step_{n:03d}.safetensors"] = safetensors(tensors)
        tensors = {k: drift(t, 100 * n + i) for i, (k, t) in enumerate(tensors.items())}
    name = repository.commit(draft(files)).name
    assert max(h.depth for h in headers(repository).values()) == min(count - 1, 8)
    return repository, repository.tree(name)


class Far(Counting):
    """A store whose answers take a moment, so that threads take turns."""

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        time.sleep(0.003)
        return super().get(name, start, stop)


def fetched(repository: Repository, tree: Tree, workers: int) -> Counter[str]:
    counting = Far(repository.backend)
    walked = list[str]()
    walker = Walker(
        with_backend(repository, counting).store, tree.blobs(), lambda d, *_: walked.append(d)
    )
    walker.run(lineages(tree), workers, tree.blob_lengths().__getitem__)
    assert sorted(walked) == sorted(tree.blobs())
    return Counter(counting.read)


@pytest.mark.parametrize("workers", [1, 2, 16])
def test_every_object_is_fetched_once(workers: int, tmp_path: Path) -> None:
    repository, tree = committed(tmp_path, 1, 4, 28)
    assert set(fetched(repository, tree, workers).values()) == {1}


@pytest.mark.parametrize("workers", [2, 16])
def test_more_threads_do_not_push_each_others_bases_out(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 threads fetched a pool 1.8 times from S3, and decoded it as often."""
    repository, tree = committed(tmp_path, 6, 0, 12)
    monkeypatch.setattr(walk, "_CACHE", 5 * 4 * LARGE)
    found = fetched(repository, tree, workers)
    assert found.total() <= len(found) + 6  # a root may have gone meanwhile


def test_unchained_objects_are_read_by_all_threads_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for bases is not asked for where there are none."""
    repository = new_repository("memory", tmp_path)
    files = {f"a_{i}.bin": noise(1_200_000, i) for i in range(6)} | {"b": noise(1_200_000, 7)}
    files |= {f"c_{i}.bin": noise(1_200_000, 10 + i) for i in range(6)}
    tree = repository.tree(repository.commit(draft(files)).name)
    monkeypatch.setattr(walk, "_CACHE", 1_000_000)  # less than one wants
    both = threading.Barrier(2)
    met = threading.Event()

    class Meeting(Counting):
        def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
            if len(self.read) > 4 and not met.is_set():
                both.wait(60)
                met.set()
            return super().get(name, start, stop)

    store = with_backend(repository, Meeting(repository.backend)).store
    walked = list[str]()
    walker = Walker(store, tree.blobs(), lambda d, *_: walked.append(d))
    walker.run(lineages(tree), 3, tree.blob_lengths().__getitem__)
    assert met.is_set() and sorted(walked) == sorted(tree.blobs())


class _Watched(dict[str, Any]):
    """Tells when a thread finds that another has an object under way."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = threading.Event()

    def setdefault(self, key: str, default: Any = None) -> Any:
        found = super().setdefault(key, default)
        if found is not default:
            self.waited.set()
        return found


def chain(repository: Repository, contents: list[bytes], depths: list[int]) -> Iterator[str]:
    for i, (content, depth) in enumerate(zip(contents, depths, strict=True)):
        digest = digest_of(content)
        before = contents[i - 1]
        made = (
            encode_delta(content, before, digest_of(before), depth, 1)
            if depth
            else encode_raw(content)
        )
        repository.backend.create(object_name(digest), made)
        yield digest


def test_a_forged_depth_is_the_fault_of_none_but_its_own(tmp_path: Path) -> None:
    """Who waited for the same base as a forged delta was told that the base is damaged."""
    repository = new_repository("memory", tmp_path)
    contents = [noise(1000, i) for i in range(4)]
    _, __, sound, forged = chain(repository, contents, [0, 1, 2, 1])
    watched = _Watched()

    class Slow(Counting):
        def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
            if name == object_name(sound) and self.read.count(name) == 0:
                self.read.append(name)
                assert watched.waited.wait(60)
            return super().get(name, start, stop)

    store = with_backend(repository, Slow(repository.backend)).store
    good, bad = list[str](), dict[str, Exception]()
    walker = Walker(store, [sound, forged], lambda d, *_: good.append(d), bad.__setitem__)
    walker._under_way = watched
    walker.run([[forged], [sound]], 2, lambda _: 1000)
    assert good == [sound] and list(bad) == [forged]
    assert isinstance(bad[forged], CorruptObjectError)
