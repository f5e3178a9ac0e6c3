"""The server is killed in the middle of a command and comes back while the client still asks.

The command ends well or with an error; repeated, it goes through; nothing is lost or torn. That a
commit fails cleanly while the server stays away is shown in `test_server_killed`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from castore.copy import copy
from castore.errors import BackendError, CastoreError
from castore.prune import prune
from castore.publish import Patience
from castore.repository import Repository
from castore.testing.proxy import FaultProxy, Kind, Request, calm
from castore.testing.s3server import S3Server
from castore_experiments.audit import audit
from castore_experiments.export import export
from castore_experiments.records import Records
from tests.conftest import _server
from tests.drivers.experiments.small import filled, net, opened
from tests.helpers import age, contents, draft, folder, noise, problems

PATIENT = Patience(poll=0.1, margin=1.0, overdue=2.0)


class Mortal:
    """A server of these tests' own, and how to kill it at a chosen request."""

    def __init__(self, server: S3Server, proxy: FaultProxy):
        self.server, self.proxy = server, proxy
        self.direct = server.fsspec_options()
        self.through = {**self.direct, "endpoint_url": proxy.url}

    def tried(self, where: Callable[[Request], bool], at: int, act: Callable[[], Any]) -> Any:
        """What ``act`` gives, or its error, where the ``at``-th matching request kills the server.

        It starts again at once, which takes it a second, and is there when this returns.
        """
        seen: list[str] = []
        starter = threading.Thread(target=self.server.restart)

        def plan(request: Request) -> Kind | None:
            if not where(request):
                return None
            seen.append(request.key)
            if len(seen) == at:
                self.server.kill()
                starter.start()
            return None

        self.proxy.plan = plan
        try:
            return act()
        except CastoreError as e:
            return e
        finally:
            self.proxy.plan = calm
            assert len(seen) >= at, f"only {len(seen)} requests"
            starter.join()


@pytest.fixture(scope="module")
def mortal() -> Iterator[Mortal]:
    for server in _server("seaweedfs"):
        with FaultProxy(server.ports[0]) as proxy:
            yield Mortal(server, proxy)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://test/{abs(hash(request.node.name)):x}"


def made(url: str, mortal: Mortal) -> Repository:
    repository = Repository.init(url, storage_options=mortal.through)
    return Repository(repository.backend, repository.id, PATIENT)


def files(i: int) -> dict[str, Any]:
    return {f"n{j}": noise(50_000, 100 * i + j) for j in range(12)}


def put(folder: str) -> Callable[[Request], bool]:
    return lambda r: r.method == "PUT" and f"/{folder}" in r.key


@pytest.mark.parametrize(("folder", "at"), [("objects/", 6), ("snapshots/", 1)])
def test_in_the_middle_of_a_commit(folder: str, at: int, url: str, mortal: Mortal) -> None:
    repository = made(url, mortal)
    first = repository.commit(draft(files(0))).name
    done = mortal.tried(put(folder), at, lambda: repository.commit(draft(files(1))))
    new = set(repository.snapshots()) - {first}
    if isinstance(done, CastoreError):
        assert isinstance(done, BackendError)
        assert len(new) <= 1
        new = new or {repository.commit(draft(files(1))).name}
    assert set(repository.snapshots()) == {first, *new}
    assert [contents(repository, n) for n in (first, *new)] == [files(0), files(1)]
    assert problems(repository) == []


def test_in_the_middle_of_a_prune(url: str, mortal: Mortal) -> None:
    repository = made(url, mortal)
    doomed = repository.commit(draft(files(1))).name
    kept = repository.commit(draft(files(0))).name
    repository.forget(doomed)
    age(repository)
    deletes = lambda r: r.method == "DELETE" and "/objects/" in r.key  # noqa: E731
    done = mortal.tried(deletes, 5, lambda: prune(repository, grace=0, sweep=8))
    if not isinstance(done, CastoreError):
        assert len(done.failed) >= 1
    assert contents(repository, kept) == files(0)
    assert problems(repository) == []
    again = prune(repository, grace=0)
    assert again.failed == []
    needed = {repository.snapshot(kept).tree, *repository.tree(kept).blobs()}
    assert {s.name.rpartition("/")[2] for s in repository.store.list()} == needed
    assert problems(repository) == []


@pytest.mark.parametrize("way", ["up", "down"])
def test_in_the_middle_of_a_copy(way: str, url: str, mortal: Mortal, tmp_path: Path) -> None:
    remote, local = made(url, mortal), Repository.init(tmp_path / "local")
    source, target = (local, remote) if way == "up" else (remote, local)
    names = [source.commit(draft(files(i))).name for i in range(2)]
    method = "PUT" if way == "up" else "GET"
    where = lambda r: r.method == method and "/objects/" in r.key  # noqa: E731
    done = mortal.tried(where, 16, lambda: copy(source, target))
    assert not isinstance(done, CastoreError) or isinstance(done, BackendError)
    assert problems(target) == []
    copy(source, target)
    there = {n.id: n for n in target.snapshots()}
    assert len(list(target.snapshots())) == 2
    assert [contents(target, there[n.id]) for n in names] == [files(0), files(1)]
    assert problems(target) == []


@pytest.mark.parametrize(
    ("name", "at"), [("manifest.yaml", 1), ("checkpoints/", 2), ("objects/", 1)]
)
def test_in_the_middle_of_a_save(name: str, at: int, url: str, mortal: Mortal) -> None:
    """Of its objects, of the real files it lays in the root, of the manifest."""
    root = f"{url}/root"
    options = {"materialize": "all"}
    with opened(root, checkpoint_manager=options, storage_options=mortal.through) as manager:
        manager.watch(model=net(fill=0.0), hyperparameters={"lr": 0.0})
        manager.save_model_checkpoint(step=0)
        saved = [manager.current_exp_hash]
        manager.watch(model=net(fill=1.0), hyperparameters={"lr": 1.0})
        manager.update_experiment_hash()
        done = mortal.tried(
            lambda r: r.method == "PUT" and name in r.key,
            at,
            lambda: manager.save_model_checkpoint(step=1),
        )
        if isinstance(done, CastoreError):
            assert isinstance(done, BackendError)
            manager.save_model_checkpoint(step=1)
        saved.append(manager.current_exp_hash)
    with opened(root, storage_options=mortal.direct) as manager:
        assert set(manager.get_all_hashes()) == set(saved)
        for i, hash in enumerate(saved):
            assert filled(manager.load_checkpoint(hash or "")) == float(i)
        place = manager._session.place
        assert list(audit(place.archive, place.files)) == []  # type: ignore[arg-type]


def test_in_the_middle_of_materialising(url: str, mortal: Mortal, tmp_path: Path) -> None:
    root = f"{url}/root"
    with opened(root, storage_options=mortal.through) as manager:
        for i in range(3):
            manager.watch(model=net(fill=float(i)), hyperparameters={"lr": float(i)})
            manager.update_experiment_hash()
            manager.save_model_checkpoint(step=i)
    whole = _exported(root, tmp_path / "whole", mortal.direct)
    get = lambda r: r.method == "GET" and "/objects/" in r.key  # noqa: E731
    done = mortal.tried(get, 5, lambda: _exported(root, tmp_path / "broken", mortal.through))
    if isinstance(done, CastoreError):
        assert isinstance(done, BackendError)
        done = _exported(root, tmp_path / "broken", mortal.through)
    assert done == whole
    assert sum(n.endswith(".pt") for n in whole) >= 3


def _exported(root: str, target: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Every documented file of a root, as ``castore experiments materialize --to`` writes it."""
    with opened(root, storage_options=options) as manager:
        place = manager._session.place
        assert isinstance(place.archive, Records)
        export(place.archive, place.files, str(target), lambda _: None)
    return {n: d for n, d in folder(target).items() if not n.endswith((".yaml", ".duckdb"))}
