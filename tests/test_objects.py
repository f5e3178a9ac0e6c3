"""Objects by digest: where they are decoded to, and that what is kept never replaces the look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from castore import CorruptObjectError, ObjectNotFoundError, frame
from castore.digest import digest_of
from castore.frame import DELTA, RAW
from castore.load import read_tree
from castore.objects import object_name
from castore.repository import Repository
from castore.tree import File, Link, Tree
from tests.helpers import draft, drift, flip_object, noise, safetensors, weights


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository.init(tmp_path / "r")


@pytest.fixture
def chain(repository: Repository) -> list[tuple[str, bytes]]:
    """Digest and content of blobs 0 to 4 deep in one chain."""
    found, array = [], weights(300_000)
    for i in range(5):
        name = repository.commit(draft({f"step_{i}.safetensors": safetensors({"w": array})})).name
        (file,) = (f for _, f in repository.tree(name).files())
        found.append((file.blobs()[-1], array.tobytes()))
        array = drift(array, i)
    headers = [repository.store.header(d) for d, _ in found]
    assert [h and h.depth for h in headers] == [0, 1, 2, 3, 4]
    assert [h and h.codec == DELTA for h in headers] == [False, True, True, True, True]
    return found


def test_a_chain_is_decoded_into_memory_at_hand(
    repository: Repository, chain: list[tuple[str, bytes]]
) -> None:
    for digest, content in chain:
        memory = memoryview(bytearray(len(content)))
        found = memoryview(repository.store.read(digest, memory))
        assert found.obj is memory.obj
        assert bytes(memory) == content


@pytest.mark.parametrize("more", [-8, 8])
def test_memory_of_another_length_is_no_trap(
    more: int, repository: Repository, chain: list[tuple[str, bytes]]
) -> None:
    for digest, content in chain:
        memory = memoryview(bytearray(len(content) + more))
        found = memoryview(repository.store.read(digest, memory))
        assert bytes(found) == content
        assert (found.obj is memory.obj) is (more > 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_memory_at_hand_serves_above_a_raw_base_too(depth: int, repository: Repository) -> None:
    content = noise(5000)
    digest, parts = digest_of(content), frame.raw(content)
    for i in range(depth + 1):
        repository.store.create_many([(digest, b"".join(parts))])
        base, before = digest, content
        content = content[:-1] + bytes([i])
        digest, parts = digest_of(content), frame.delta(content, before, base, i, 1)
    memory = memoryview(bytearray(5000))
    found = memoryview(repository.store.read(base, memory))
    assert found.obj is memory.obj
    assert bytes(memory) == before


def test_memory_that_cannot_be_written_is_left_alone(
    repository: Repository, chain: list[tuple[str, bytes]]
) -> None:
    for digest, content in chain:
        memory = memoryview(bytes(len(content)))
        assert bytes(repository.store.read(digest, memory)) == content
        assert bytes(memory) == bytes(len(content))


def test_what_is_stored_raw_is_given_as_it_is(repository: Repository) -> None:
    digest = _only_blob(repository, noise(5000))
    header = repository.store.header(digest)
    assert header is not None
    assert header.codec == RAW
    memory = memoryview(bytearray(5000))
    assert bytes(repository.store.read(digest, memory)) == noise(5000)
    assert bytes(memory) == bytes(5000)


def test_damage_is_told_wherever_it_is_decoded_to(
    repository: Repository, chain: list[tuple[str, bytes]]
) -> None:
    digest, content = chain[4]
    flip_object(repository, chain[1][0])
    with pytest.raises(CorruptObjectError) as error:
        repository.store.read(digest, memoryview(bytearray(len(content))))
    assert error.value.name == chain[1][0]


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_decoded_tree_that_is_kept_hides_no_damage(how: str, repository: Repository) -> None:
    name = repository.commit(draft({"a": b"1"})).name
    digest = repository.snapshot(name).tree
    first = repository.tree(name)
    assert repository.store.trees.weight > 0
    assert isinstance(first.entries, dict)
    first.entries.clear()
    assert list(repository.tree(name).entries) == ["a"]
    if how == "missing":
        repository.backend.delete(object_name(digest))
        with pytest.raises(ObjectNotFoundError):
            repository.tree(name)
    else:
        flip_object(repository, digest)
        with pytest.raises(CorruptObjectError):
            repository.tree(name)


def test_large_trees_are_not_kept(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    name = repository.commit(draft({"a": b"1"})).name
    monkeypatch.setattr("castore.load._LARGE", 10)
    assert list(read_tree(repository.store, repository.snapshot(name).tree).entries) == ["a"]
    assert repository.store.trees.weight == 0


def test_kept_trees_have_a_bound(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    def trees() -> Iterator[Tree]:
        for i in range(8):
            names = [f"{i}-{n}" for n in range(50)]
            name = repository.commit(draft(dict.fromkeys(names, b""))).name
            yield repository.tree(name)

    monkeypatch.setattr(repository.store.trees, "_limit", 250)
    assert all(len(t.entries) == 50 for t in trees())
    assert repository.store.trees.weight <= 250


def test_long_names_and_links_weigh_what_they_take(repository: Repository) -> None:
    """A tree of a few entries may be two megabytes of text."""
    long = "/".join(["n" * 250] * 15)
    name = repository.commit(draft({f"{long}/{i}": Link("t" * 4000) for i in range(50)})).name
    repository.tree(name)
    assert repository.store.trees.weight > 50 * (4000 + len(long)) // 100


def _only_blob(repository: Repository, data: bytes) -> str:
    tree = repository.tree(repository.commit(draft({"x": data})).name)
    (entry,) = tree.entries.values()
    assert isinstance(entry, File)
    (digest,) = entry.blobs()
    return digest
