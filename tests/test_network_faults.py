"""A bad network between castore and a real S3 server: right, or one clear error; nothing twice.

Each test breaks chosen requests in the proxy, where the server may have acted or not.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from castore.backend import UnansweredError
from castore.backends import open_backend
from castore.copy import copy
from castore.errors import BackendError, CastoreError
from castore.objects import object_name
from castore.prune import prune
from castore.publish import PRUNE, Patience
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.testing.proxy import FaultProxy, Kind, Once, Request, Weather, calm
from castore.testing.s3server import S3Server
from castore_experiments.audit import audit
from tests.drivers.experiments.small import filled, net, opened
from tests.helpers import age, contents, draft, noise, problems
from tests.storm import QUICK, Storm

ACTED: tuple[Kind, ...] = ("lose", "hang", "reset_after", "cut_answer", "error_after")
PASSING: tuple[Kind, ...] = tuple(k for k in get_args(Kind) if k != "forbid")
FEW: tuple[Kind, ...] = ("reset", "cut_request", "slow_down", "lose", "error_after", "late")
"""One of each way a write can go wrong: the others are told apart by the client, not by castore."""


BROKEN_READS: tuple[Kind, ...] = ("reset", "hang", "cut_answer", "slow_down", "error_after")


@pytest.fixture
def proxy(s3server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3server.ports[0]) as made:
        yield made


@pytest.fixture
def direct(s3server: S3Server) -> dict[str, Any]:
    """Options that lead to the server."""
    return s3server.fsspec_options()


@pytest.fixture
def through(direct: dict[str, Any], proxy: FaultProxy) -> dict[str, Any]:
    return {**direct, "endpoint_url": proxy.url}


HASTY = {"config_kwargs": {"read_timeout": 1}}
"""Of a client that soon gives up where no answer comes; others must not, on a slow machine."""


class Pair:
    """One repository, seen through the proxy and directly."""

    def __init__(self, url: str, direct: dict[str, Any], through: dict[str, Any]):
        self.clear = Repository.init(url, storage_options=direct)
        self.windy = self._opened(url, through)
        self.hasty = self._opened(url, {**through, **HASTY})
        assert self.windy.many_writers

    def _opened(self, url: str, options: dict[str, Any]) -> Repository:
        seen = Repository.open(url, storage_options=options)
        return Repository(seen.backend, seen.id, QUICK)

    def against(self, kind: Kind) -> Repository:
        """Through the proxy, by a client fit for this fault."""
        return self.hasty if kind == "hang" else self.windy


@pytest.fixture
def pair(s3_url: str, direct: dict[str, Any], through: dict[str, Any]) -> Pair:
    return Pair(s3_url, direct, through)


def at(method: str, prefix: str) -> Callable[[Request], bool]:
    """Requests of a method for names below ``prefix``, whatever the repository's own prefix."""
    return lambda r: r.method == method and f"{r.key.partition('/')[2]}/".startswith(prefix)


class Befall:
    """Runs a command with one fault and counts."""

    def __init__(self, proxy: FaultProxy):
        self.proxy = proxy

    def __call__(self, kind: Kind, where: Callable[[Request], bool], act: Callable[[], Any]) -> Any:
        """What ``act`` gives, or its error; the fault did happen."""
        self.proxy.plan = once = Once(kind, where)
        self.proxy.held = True
        try:
            return act()
        except CastoreError as e:
            return e
        finally:
            self.proxy.plan = calm
            self.proxy.settle()
            self.proxy.held = False
            assert once.seen, f"no request for {kind}"


@pytest.fixture
def befall(proxy: FaultProxy) -> Befall:
    return Befall(proxy)


def files(i: int) -> dict[str, Any]:
    return {"same": noise(500), "new": b"%d" % i, "more": noise(700, i)}


# -- a storm


def test_a_storm_of_all_faults_loses_nothing(
    s3_url: str, direct: dict[str, Any], proxy: FaultProxy, tmp_path: Path
) -> None:
    """Every operation, with some hundred faults; longer: ``python -m benchmarks.faults``."""
    kinds = [k for k in PASSING if k != "hang"]
    objects = Weather(5, 0.6, kinds, where=lambda r: "/objects/" in r.path, most=1)
    rest = Weather(6, 0.12, [*kinds, "hang"], where=lambda r: "/objects/" not in r.path)
    storm = Storm(s3_url, direct, proxy, lambda r: objects(r) or rest(r), tmp_path, 5)
    for name in ("commit", "forget", "copy_up", "unforget", "forget", "commit", "prune"):
        storm.run(name)
    for name in ("copy_down", "check", "checkout"):
        storm.run(name)
    storm.end()
    assert sum(proxy.injected.values()) >= 100
    assert set(proxy.injected) >= set(kinds)
    assert storm.verified > 500_000


# -- a commit


@pytest.mark.parametrize(
    ("folder", "kinds"),
    [("snapshots/", PASSING), ("pending/", FEW), ("objects/", FEW)],
    ids=["snapshot", "pending", "object"],
)
def test_a_commit_gets_over_any_one_broken_write(
    folder: str, kinds: Sequence[Kind], pair: Pair, befall: Befall, proxy: FaultProxy
) -> None:
    """And is there once, whether the server had acted, had not, or acts when nobody waits."""
    kept: dict[SnapshotName, dict[str, Any]] = {}
    late: set[str] = set()
    for i, kind in enumerate(kinds):
        start = len(proxy.log)
        commit = partial(pair.against(kind).commit, draft(files(i)))
        done = befall(kind, at("PUT", folder), commit)
        assert not isinstance(done, CastoreError), kind
        kept[done.name] = files(i)
        late |= {done.name.pending} if kind == "late" else set()
        sent = [k for m, k, _ in proxy.log[start:] if m == "PUT" and "/snapshots/" in k]
        again = folder == "snapshots/" and kind not in (*ACTED, "delay")
        # One request and its fence: a lost answer is recognised. Else a fence and a fresh name.
        assert len(set(sent)) == (2 if again else 1), kind
    assert {n: contents(pair.clear, n) for n in pair.clear.snapshots()} == kept
    assert problems(pair.clear) == []
    assert {s.name for s in pair.clear.backend.list("pending")} <= late


def test_a_mark_that_comes_when_its_commit_has_ended_goes_with_the_next_prune(
    pair: Pair, befall: Befall
) -> None:
    pair.clear.forget(pair.clear.commit(draft({"gone": noise(600, 9)})).name)
    age(pair.clear)
    done = befall("late", at("PUT", "pending/"), partial(pair.windy.commit, draft(files(0))))
    assert [s.name for s in pair.clear.backend.list("pending")] == [done.name.pending]
    assert problems(pair.clear) == []
    assert prune(pair.windy, grace=0, sweep=60).objects > 0
    assert list(pair.clear.backend.list("pending")) == []
    assert {n: contents(pair.clear, n) for n in pair.clear.snapshots()} == {done.name: files(0)}


def test_a_commit_gets_over_any_one_broken_read(pair: Pair, befall: Befall) -> None:
    pair.windy.commit(draft(files(0)))
    wheres = [_listing, at("GET", PRUNE), at("GET", "objects/")]
    for i, kind in enumerate(BROKEN_READS):
        where = wheres[i % 3]
        done = befall(kind, where, partial(pair.against(kind).commit, draft(files(i + 1))))
        assert contents(pair.clear, done.name) == files(i + 1), kind
    assert problems(pair.clear) == []


def _listing(request: Request) -> bool:
    return "list-type=2" in request.path


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_a_refusal_in_the_middle_of_a_commit_is_one_clear_error(
    method: str, pair: Pair, befall: Befall
) -> None:
    before = pair.windy.commit(draft(files(0))).name
    folders = {"PUT": ["objects/", "pending/", "snapshots/"], "GET": [PRUNE, "objects/"]}
    for i, folder in enumerate(folders[method]):
        error = befall(
            "forbid", at(method, folder), partial(pair.windy.commit, draft(files(i + 1)))
        )
        assert type(error) is BackendError
        assert "no permission" in str(error) and pair.clear.url in str(error)
    assert list(pair.clear.snapshots()) == [before]
    assert problems(pair.clear) == []
    name = pair.windy.commit(draft(files(1))).name
    assert contents(pair.clear, name) == files(1)


def test_without_any_answer_a_commit_says_that_it_is_not_known(
    pair: Pair, proxy: FaultProxy
) -> None:
    """Refused afterwards, too: the first request may have been served."""
    for after in ("lose", "forbid"):
        seen: list[str] = []

        def plan(request: Request, after: Kind = after, seen: list[str] = seen) -> Kind | None:
            if not at("PUT", "snapshots/")(request):
                return None
            seen.append(request.key)
            return "lose" if len(seen) == 1 else after

        proxy.plan = plan
        few = Repository(pair.windy.backend, pair.windy.id, Patience(poll=0.01, tries=3))
        before = set(pair.clear.snapshots())
        with pytest.raises(UnansweredError, match="not known; look with 'castore snapshots'"):
            few.commit(draft(files(7)))
        proxy.plan = calm
        [new] = set(pair.clear.snapshots()) - before
        assert contents(pair.clear, new) == files(7)
    assert problems(pair.clear) == []


# -- forget, unforget, prune, copy


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_forget_and_unforget_get_over_any_one_broken_write(
    method: str, pair: Pair, befall: Befall
) -> None:
    name = pair.windy.commit(draft(files(0))).name
    for kind in FEW:
        folder = "forgotten/" if method == "PUT" else "snapshots/"
        assert befall(kind, at(method, folder), partial(pair.windy.forget, name)) == name, kind
        assert list(pair.clear.snapshots()) == []
        assert list(pair.clear.forgotten()) == [name]
        folder = "snapshots/" if method == "PUT" else "forgotten/"
        name = befall(kind, at(method, folder), partial(pair.windy.unforget, name))
        assert list(pair.clear.snapshots()) == [name], kind
        assert list(pair.clear.forgotten()) == []
    assert contents(pair.clear, name) == files(0)


def test_an_unforget_that_broke_off_is_not_done_twice(pair: Pair, befall: Befall) -> None:
    name = pair.windy.commit(draft(files(0))).name
    pair.windy.forget(name)
    error = befall("forbid", at("DELETE", "forgotten/"), lambda: pair.windy.unforget(name))
    assert "no permission" in str(error)
    [fresh] = pair.clear.snapshots()
    assert pair.windy.unforget(name) == fresh
    assert list(pair.clear.snapshots()) == [fresh]
    assert list(pair.clear.forgotten()) == []


def test_a_forget_that_broke_off_is_not_undone_by_an_unforget_of_the_same_name(
    pair: Pair, befall: Befall
) -> None:
    """Another process may be about to delete the name that is listed still."""
    name = pair.windy.commit(draft(files(0))).name
    befall("forbid", at("DELETE", "snapshots/"), lambda: pair.windy.forget(name))
    fresh = pair.windy.unforget(name)
    pair.clear.backend.delete(name.path)
    assert list(pair.clear.snapshots()) == [fresh]
    assert contents(pair.clear, fresh) == files(0)


def test_a_prune_gets_over_broken_requests(pair: Pair, proxy: FaultProxy) -> None:
    """Of every kind, in its reads, its listings and its `prune.json`."""
    kept = pair.windy.commit(draft(files(0))).name
    for i in range(3):
        pair.clear.forget(pair.clear.commit(draft(files(i + 1))).name)
    age(pair.clear)
    kinds = [k for k in PASSING if k != "hang"]
    # A late announcement that came before the one that is sent instead would be waited out.
    proxy.held = True
    proxy.plan = Weather(3, 1.0, kinds, lambda r: r.method != "DELETE", most=1)
    done = prune(pair.windy, grace=0)
    proxy.plan = calm
    proxy.settle()
    assert (done.failed, done.objects, len(done.expired)) == ([], 9, 3)
    assert sum(proxy.injected.values()) >= 12
    assert list(pair.clear.forgotten()) == []
    assert contents(pair.clear, kept) == files(0)
    assert problems(pair.clear) == []


def test_a_delete_of_a_prune_that_is_not_answered_loses_nothing_that_is_needed(
    pair: Pair, proxy: FaultProxy
) -> None:
    """The prune keeps its sweep open until the request cannot come any more, and tells of it."""
    kept = pair.windy.commit(draft(files(0))).name
    for i in range(1, 4):
        pair.windy.forget(pair.windy.commit(draft(files(i))).name)
    age(pair.clear)
    kinds: list[Kind] = ["lose", "reset", "forbid", "cut_request", "late", "error_after"]
    deletes = Weather(7, 0.8, kinds, lambda r: r.method == "DELETE" and "/objects/" in r.path)
    proxy.plan = deletes
    report = prune(pair.windy, grace=0, sweep=8)
    proxy.plan = calm
    assert len(report.failed) >= sum(proxy.injected.values()) >= 1
    for i in range(1, 4):  # needs what was to be deleted
        assert contents(pair.clear, pair.windy.commit(draft(files(i))).name) == files(i)
    proxy.settle()
    assert contents(pair.clear, kept) == files(0)
    assert problems(pair.clear) == []


def test_a_copy_gets_over_any_one_broken_request(
    pair: Pair, befall: Befall, tmp_path: Path
) -> None:
    """Up and down; and what a refusal ends goes on where it stopped."""
    local = Repository.init(tmp_path / "local")
    mirror = Repository.init(tmp_path / "mirror")
    up = [at("PUT", "objects/"), at("PUT", "snapshots/"), at("PUT", "pending/")]
    down = [at("GET", "objects/"), at("GET", "snapshots/"), _listing]
    for i, kind in enumerate((*FEW, "cut_answer", "forbid")):
        name = local.commit(draft(files(i))).name
        done = befall(kind, up[i % 3], lambda: copy(local, pair.windy))
        assert isinstance(done, BackendError) == (kind == "forbid"), done
        copy(local, pair.windy)
        done = befall(kind, down[i % 3], lambda: copy(pair.windy, mirror))
        assert isinstance(done, BackendError) == (kind == "forbid"), done
        copy(pair.windy, mirror)
        [there] = [n for n in mirror.snapshots() if n.id == name.id]
        assert contents(mirror, there) == files(i)
    for repository in (pair.clear, mirror):
        assert len(list(repository.snapshots())) == i + 1
        assert problems(repository) == []


# -- reading


def test_check_and_checkout_are_right_or_say_so(pair: Pair, befall: Befall, tmp_path: Path) -> None:
    name = pair.windy.commit(draft(files(0))).name
    for kind in (*BROKEN_READS, "forbid"):
        _read(kind, name, pair, befall, tmp_path / kind)


def _read(kind: Kind, name: SnapshotName, pair: Pair, befall: Befall, out: Path) -> None:
    seen = pair.against(kind)
    for where in (at("GET", "objects/"), at("GET", "snapshots/"), _listing):
        found = befall(kind, where, lambda: problems(seen))
        if kind != "forbid":
            assert found == []
        elif isinstance(found, CastoreError):
            assert "no permission" in str(found)
        else:
            assert [p.kind for p in found] == ["unreadable"]
    done = befall(kind, at("GET", "objects/"), lambda: seen.checkout(name, out))
    assert isinstance(done, BackendError) == (kind == "forbid")
    assert out.exists() == (kind != "forbid")


def test_a_body_that_is_cut_every_time_is_an_outage_not_damage(
    pair: Pair, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castore.backends.s3._ATTEMPTS", 2)
    name = pair.windy.commit(draft(files(0))).name
    file = pair.clear.tree(name).entries["more"]
    [blob] = file.blobs()  # type: ignore[union-attr]
    proxy.plan = lambda r: "cut_answer" if r.key.endswith(object_name(blob)) else None
    with pytest.raises(BackendError, match="could not read"):
        pair.windy.read(name, "more")
    [problem] = problems(pair.windy)
    assert (problem.kind, problem.object) == ("unreadable", blob)
    proxy.plan = calm
    assert pair.windy.read(name, "more") == files(0)["more"]


def test_who_tries_again_within_the_second_is_not_in_his_own_way(
    pair: Pair, befall: Befall, tmp_path: Path
) -> None:
    """A store tells time in seconds, so the pending that a broken copy left has the same name."""
    local = Repository.init(tmp_path / "local")
    for i in range(4):
        name = local.commit(draft({"n": b"%d" % i})).name
        error = befall("forbid", at("PUT", "snapshots/"), lambda: copy(local, pair.windy))
        assert "no permission" in str(error)
        assert [n.id for n in copy(local, pair.windy).names] == [name.id]
    assert len(list(pair.clear.snapshots())) == 4
    assert problems(pair.clear) == []


# -- experiments


def test_a_root_gets_over_any_one_broken_write(
    s3_url: str, through: dict[str, Any], direct: dict[str, Any], befall: Befall
) -> None:
    """A save's manifest, documents and real weights; each entry is there once."""
    root = f"{s3_url}/root"
    options = {"materialize": "all"}
    names = ["manifest.yaml", "checkpoints/", "manifest.yaml"]
    with opened(root, checkpoint_manager=options, storage_options=through) as manager:
        manager.watch(model=net(fill=0.0), hyperparameters={"lr": 0.0})
        manager.save_model_checkpoint(step=0)
        saved = [manager.current_exp_hash]
        kinds: list[Kind] = ["lose", "error_after", "late", "reset"]
        for i, kind in enumerate(kinds, 1):
            manager.watch(model=net(fill=float(i)), hyperparameters={"lr": float(i)})
            manager.update_experiment_hash()
            where = names[i % 3]
            done = befall(
                kind,
                partial(_put, where),
                partial(manager.save_model_checkpoint, step=i),
            )
            assert not isinstance(done, CastoreError), (kind, done)
            saved.append(manager.current_exp_hash)
    _whole(root, direct, saved)


def _put(part: str, request: Request) -> bool:
    return request.method == "PUT" and part in request.key


def _whole(root: str, options: dict[str, Any], saved: list[Any]) -> None:
    with opened(root, storage_options=options) as manager:
        assert len(set(saved)) == len(saved)
        assert set(saved) <= set(manager.get_all_hashes())
        for i, hash in enumerate(saved):
            found = manager.load_checkpoint(hash, load_config=True, force=True)
            assert (filled(found), found["config"]) == (float(i), {"lr": float(i)})
        place = manager._session.place
        assert list(audit(place.archive, place.files)) == []  # type: ignore[arg-type]
        assert problems(place.archive.repository) == []  # type: ignore[union-attr]


def test_saves_in_a_storm(
    s3_url: str, through: dict[str, Any], direct: dict[str, Any], proxy: FaultProxy
) -> None:
    """What a save returned from is in the manifest and loads; what failed is saved again."""
    root = f"{s3_url}/root"
    saved: list[Any] = []
    told: Counter[str] = Counter()
    kinds = [k for k in PASSING if k != "hang"]
    with opened(root, storage_options=through) as manager:
        for i in itertools.count():  # three, and more where chance was kind
            manager.watch(model=net(fill=float(i)), hyperparameters={"lr": float(i)})
            manager.log("loss", 1.0 / (i + 1), i)
            proxy.plan = Weather(i, 0.12, [*kinds, *kinds, "forbid"])
            try:
                manager.update_experiment_hash()
                manager.save_model_checkpoint(step=i)
            except CastoreError as e:
                told[type(e).__name__] += 1
                proxy.plan = calm
                manager.update_experiment_hash()
                manager.save_model_checkpoint(step=i)
            finally:
                proxy.plan = calm
                proxy.settle()
            saved.append(manager.current_exp_hash)
            if i >= 2 and sum(proxy.injected.values()) >= 8:
                break
    assert set(told) <= {"BackendError", "UnansweredError"}
    _whole(root, direct, saved)


# -- the proxy itself


def test_what_each_fault_does(s3_url: str, through: dict[str, Any], proxy: FaultProxy) -> None:
    """To one request of a client that does not retry; and whether the server acted."""
    proxy.held = True
    for kind in get_args(Kind):
        backend = open_backend(f"{s3_url}/{kind}", through | (HASTY if kind == "hang" else {}))
        proxy.plan = Once(kind, lambda r: r.method == "PUT")
        if kind == "delay":
            backend.create("a", b"12")
        else:
            with pytest.raises(BackendError) as caught:
                backend.create("a", b"12")
            assert isinstance(caught.value, UnansweredError) == (kind != "forbid"), kind
        if kind == "late":
            assert list(backend.list("")) == []
        proxy.settle()
        acted = kind in (*ACTED, "late", "delay")
        assert [s.size for s in backend.list("")] == ([2] if acted else []), kind
    assert proxy.injected == dict.fromkeys(get_args(Kind), 1)
