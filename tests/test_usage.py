"""Usage: numbers that add up, and say what forgetting frees."""

from __future__ import annotations

from pathlib import Path

import pytest

from castore.errors import CorruptObjectError
from castore.prune import prune
from castore.usage import usage
from tests.helpers import clocked, draft, flip_object, new_repository, noise, raw, series

kinds = pytest.mark.parametrize("kind", ["local", "memory"])


def test_of_nothing(tmp_path: Path) -> None:
    found = usage(new_repository("memory", tmp_path))
    assert (found.logical, found.stored, found.objects, found.ratio) == (0, 0, 0, 0.0)


@kinds
def test_the_numbers_add_up(kind: str, tmp_path: Path) -> None:
    repository, clock = clocked(new_repository(kind, tmp_path))
    files = series(4)
    a = [repository.commit(draft({"m": f}), namespace="a").name for f in files[:3]]
    repository.commit(draft({"x": files[0], "own": noise(5000)}), namespace="b")
    repository.commit(draft({"x": files[0]}), namespace="b")
    orphan = repository.commit(draft({"z": noise(700)}), namespace="c").name
    repository.backend.delete(orphan.path)
    sizes = {
        n.rpartition("/")[2]: len(d) for n, d in raw(repository).items() if n.startswith("objects/")
    }
    found = usage(repository)
    assert found.stored == sum(sizes.values())
    assert found.objects == len(sizes)
    assert found.logical == sum(map(len, [*files[:3], files[0], files[0]])) + 5000
    assert found.ratio == found.stored / found.logical
    assert found.unreferenced == sum(
        sizes[d] for d in (repository.store.list() and set(sizes)) if d not in _needed(repository)
    )
    spaces = {s.name: s for s in found.namespaces}
    assert set(spaces) == {"a", "b"}
    assert spaces["a"].snapshots == 3
    assert spaces["a"].logical == sum(map(len, files[:3]))
    shared = spaces["a"].stored - spaces["a"].unique
    assert shared == spaces["b"].stored - spaces["b"].unique > 0
    assert shared + spaces["a"].unique + spaces["b"].unique + found.unreferenced == found.stored
    assert sum(s.logical for s in found.snapshots) == found.logical
    assert len(found.snapshots) == 5
    only = usage(repository, "b")
    assert [s.name for s in only.namespaces] == ["b"]
    assert only.namespaces[0] == spaces["b"]
    assert (only.stored, only.logical) == (found.stored, found.logical)

    newest = next(s for s in found.snapshots if s.name == str(a[2]))
    prune(repository, grace=0)
    repository.forget(a[2])
    clock.sleep(10_000)
    assert prune(repository, grace=0).bytes == newest.unique


def _needed(repository: object) -> set[str]:
    from castore.repository import Repository

    assert isinstance(repository, Repository)
    needed: set[str] = set()
    for name in repository.snapshots():
        tree = repository.snapshot(name).tree
        for digest in [tree, *repository.tree(name).blobs()]:
            needed.update(repository.store.chain(digest, {}) or ())
    return needed


@kinds
def test_what_cannot_be_read_is_not_counted_as_nothing(kind: str, tmp_path: Path) -> None:
    repository = new_repository(kind, tmp_path)
    commit = repository.commit(draft({"m": b"1"}))
    flip_object(repository, commit.snapshot.tree)
    with pytest.raises(CorruptObjectError):
        usage(repository)
