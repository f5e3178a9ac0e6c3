"""Content that a repository holds already stands in new snapshots without being read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from castore import (
    BackendError,
    BaseFile,
    CorruptObjectError,
    Draft,
    InvalidInputError,
    MemoryFile,
    ObjectNotFoundError,
    Repository,
)
from castore.check import check
from castore.digest import digest_of
from castore.objects import object_name
from castore.tree import File
from tests.helpers import (
    contents,
    draft,
    drift,
    encode_raw,
    headers,
    new_repository,
    safetensors,
    series,
    weights,
)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_file_of_an_earlier_tree_stands_in_a_new_one(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    data = safetensors({"w": weights()})
    first = repository.commit(draft({"a.safetensors": data, "b": b"small"}))
    old = dict(first.tree.files())
    second = repository.commit(draft({"moved": old["a.safetensors"], "new": b"other"}))
    assert contents(repository, second.name) == {"moved": data, "new": b"other"}
    assert second.snapshot.files == 2 and second.snapshot.size == len(data) + 5
    assert second.added < 1000
    assert list(check(repository, read_data=True)) == []


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_file_whose_objects_are_gone_is_refused(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    first = repository.commit(draft({"a": safetensors({"w": weights()})}))
    file = dict(first.tree.files())["a"]
    assert isinstance(file, File)
    repository.backend.delete(object_name(file.blobs()[0]))
    with pytest.raises((ObjectNotFoundError, BackendError)):
        repository.commit(draft({"again": file}))
    assert len(list(repository.snapshots())) == 1


def test_a_file_serves_as_a_base(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    old = weights()
    first = repository.commit(draft({"x": safetensors({"w": old})}), namespace="one")
    file = dict(first.tree.files())["x"]
    data = safetensors({"w": drift(old, 1)})
    far = repository.commit(draft({"y": data}, base={"y": file}), namespace="two")
    alone = new_repository("local", tmp_path, "alone").commit(draft({"y": data}))
    assert far.added < 0.8 * alone.added
    assert contents(repository, far.name) == {"y": data}


@pytest.mark.parametrize("changed", [False, True])
def test_a_base_at_hand_spares_the_repository(tmp_path: Path, changed: bool) -> None:
    """Its bytes are verified: a source that is not the file any more only costs the reading."""
    repository = new_repository("local", tmp_path)
    old = weights()
    before = safetensors({"w": old})
    first = repository.commit(draft({"x": before}), namespace="one")
    reads: list[str] = []
    store = repository.store
    read, store.read = store.read, lambda d: reads.append(d) or read(d)  # type: ignore[method-assign,func-returns-value]
    file = dict(first.tree.files())["x"]
    at_hand = MemoryFile(bytes(len(before)) if changed else before)
    after = safetensors({"w": drift(old, 1)})
    done = repository.commit(
        draft({"y": after}, base={"y": BaseFile(file, at_hand)}), namespace="two"
    )
    big = max(file.slices, key=lambda s: s.length).blob
    assert (big in reads) is changed
    assert done.added < 0.8 * len(after)
    assert contents(repository, done.name) == {"y": after}


def test_a_view_of_memory_is_content(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    data = bytearray(safetensors({"w": weights()}))
    done = repository.commit(Draft({"v": MemoryFile(memoryview(data))}))
    assert contents(repository, done.name) == {"v": bytes(data)}


def test_a_view_of_any_shape_stands_for_its_bytes(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    array = np.arange(200_000, dtype="<u4")
    views = {
        "flat": array,
        "square": array.reshape(400, 500),
        "bytes": array.view("u1").reshape(8, -1),
    }
    entries = {n: MemoryFile(memoryview(v)) for n, v in views.items()}
    done = repository.commit(Draft(entries))
    assert contents(repository, done.name) == dict.fromkeys(views, array.tobytes())
    for view in (array[::2], array.reshape(400, 500).T):
        with pytest.raises(InvalidInputError, match="not contiguous"):
            MemoryFile(memoryview(view))


def test_a_document_is_committed_again_in_another_namespace(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    done = repository.commit(draft({"x": b"content"}), namespace="one")
    again = repository.republish(replace(done.snapshot, namespace="two"))
    assert again.namespace == "two" and contents(repository, again) == {"x": b"content"}
    repository.backend.delete(object_name(done.snapshot.tree))
    with pytest.raises(ObjectNotFoundError):
        repository.republish(replace(done.snapshot, namespace="three"))
    assert repository.namespaces() == ["one", "two"]


def test_reading_through_a_chain_hashes_once_and_names_what_is_wrong(tmp_path: Path) -> None:
    """Only the content asked for is hashed; if that is wrong, the object that is to blame is."""
    repository = new_repository("local", tmp_path)
    for i, data in enumerate(series(5)):
        repository.commit(draft({f"w_{i}.safetensors": data}))
    found = headers(repository)
    deepest = max(found, key=lambda d: found[d].depth)
    assert found[deepest].depth == 4
    fresh = Repository.open(repository.url)
    content = bytes(fresh.store.read(deepest))
    assert digest_of(content) == deepest
    base = found[deepest].base
    path = tmp_path / "store" / object_name(base)
    wrong = found[base]
    other = encode_raw(bytes(wrong.content_length), wrong.width)
    path.chmod(0o644)
    path.write_bytes(other)
    with pytest.raises(CorruptObjectError, match=base):
        fresh.store.read(deepest)
