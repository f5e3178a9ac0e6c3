"""Several writers: of one root, of one namespace, of one repository; and labels that clash.

Sentences in quotation marks are the promises that a test shows.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from castore import Repository
from castore.check import check
from castore.cli.app import app
from castore.prune import prune
from castore.usage import usage
from castore_experiments import CheckpointManager
from castore_experiments.audit import audit
from castore_experiments.canonical import hp_digest
from castore_experiments.commits import Save, commit_state, commit_weights
from castore_experiments.layout import config_path
from castore_experiments.records import Records
from tests.drivers.experiments.places import KINDS, place, run_all
from tests.drivers.experiments.small import Said, filled, net, opened, read, started


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, request, tmp_path)


def records_of(manager: CheckpointManager) -> Records:
    records = manager._session.place.archive
    assert isinstance(records, Records)
    return records


def defects(manager: CheckpointManager) -> list[Any]:
    return [
        *audit(records_of(manager), manager._session.place.files),
        *check(records_of(manager).repository, read_data=True),
    ]


# -- labels that clash


@pytest.fixture(scope="module")
def clash() -> tuple[int, int]:
    """Two seeds whose configurations have digests with the same first 8 characters: by the
    birthday bound some 77 000 tries find them.
    """
    seen: dict[str, int] = {}
    for seed in range(1_000_000):
        label = hp_digest(config(seed))[:8]
        if label in seen:
            return seen[label], seed
        seen[label] = seed
    raise AssertionError("no clash among a million")


def config(seed: int) -> dict[str, Any]:
    return {"seed": seed}


def test_the_seeds_clash(clash: tuple[int, int]) -> None:
    a, b = (hp_digest(config(s)) for s in clash)
    assert a[:8] == b[:8] and a[8:16] != b[8:16]


def write(manager: CheckpointManager, seed: int) -> str:
    """A hash of the configuration with that seed; its weights are filled with the seed."""
    manager.watch(hyperparameters=config(seed))
    hash = manager.update_experiment_hash().hash
    manager.save_model_checkpoint(net(fill=float(seed)), step=seed)
    return manager.current_exp_hash or hash


def holds(manager: CheckpointManager, hash: str, seed: int) -> bool:
    found = manager.load_checkpoint(hash, load_config=True, force=True)
    digest = manager.get_checkpoint_info(hash)["digests"]["hp"]
    return bool(
        found["config"] == config(seed)
        and filled(found) == seed
        and found["weights"]["exp_hash"] == hash
        and digest == hp_digest(config(seed))
    )


def test_one_label_for_two_contents_one_after_the_other(root: str, clash: tuple[int, int]) -> None:
    """'Of two contents with one label the earlier snapshot keeps it, the later gets the next 8
    characters of its digest'."""
    first, second = clash
    with opened(root, checkpoint_manager={"materialize": "all"}) as manager:
        manager.watch(model=net())
        a, b = write(manager, first), write(manager, second)
        assert a[:8] == hp_digest(config(first))[:8] == hp_digest(config(second))[:8]
        assert b[:8] == hp_digest(config(second))[8:16] and a[8:] == b[8:]
        assert holds(manager, a, first) and holds(manager, b, second)
        assert write(manager, first) == a and write(manager, second) == b
        for hash, seed in ((a, first), (b, second)):
            text = yaml.safe_load(read(root, f"checkpoints/{config_path(hash[:8])}"))
            assert (text["hyperparameters"], text["exp_hash"]) == (config(seed), hash[:8])
    with opened(root) as manager:
        assert defects(manager) == []
        manager.watch(model=net(), hyperparameters=config(second))
        assert manager.update_experiment_hash() == (b, False, set())


@pytest.mark.parametrize("settles", ["its writer", "another"])
@pytest.mark.parametrize("materialize", ["all", "latest"])
def test_one_label_for_two_contents_at_once(
    tmp_path: Path, clash: tuple[int, int], settles: str, materialize: str
) -> None:
    """'two machines at once settle it at the next refresh': the later one's state and weights come
    under a label of its own, the earlier one's stay; nothing is lost."""
    root, (first, second) = tmp_path / "exp", clash
    options = {"materialize": materialize}
    slow = opened(root, checkpoint_manager=options)
    slow.watch(model=net())
    slow.save_model_checkpoint(step=0)
    slow.watch(hyperparameters=config(second))
    taken = slow.update_experiment_hash().hash
    session = slow._session
    records, exhibit = session.records(), session.exhibit(session.records())
    with opened(root, checkpoint_manager=options) as fast:
        fast.watch(model=net())
        assert write(fast, first) == taken
    # What `slow` does next, had it looked for the label before `fast` wrote.
    from castore import Options
    from castore_experiments import rng
    from castore_experiments.dump import Instant, state_documents
    from castore_experiments.weights import Buffers, capture, encode

    state, content = session.tracker.state, session.tracker.content
    assert state is not None and state.hash == taken
    stale = Records(records.repository, records.namespace)
    captured = capture(net(fill=float(second)), buffers=Buffers())
    data = encode(
        captured, step=second, exp_hash=taken, timestamp="t", rng_state=rng.capture(), loaders={}
    )
    saved = commit_weights(stale, state, Save(second, "t", metrics={"val": 0.5}), data)
    exhibit.records.refresh()
    exhibit.show_weights(saved, data)
    now = Instant("t", rng.capture(), {})
    commit_state(
        stale, state, state_documents(stale, state, content, session.options, now), Options()
    )
    exhibit.records.refresh()
    if settles == "its writer":
        session.tracker.written, session._settled = state, False
        slow.save_model_checkpoint(net(fill=float(second)), step=second + 1)
        moved = slow.current_exp_hash or ""
    else:
        with opened(root, checkpoint_manager=options) as other:
            other.watch(model=net(), hyperparameters={"other": 1})
            other.update_experiment_hash(dump_immediately=True)
        moved = hp_digest(config(second))[8:16] + taken[8:]
    assert moved == hp_digest(config(second))[8:16] + taken[8:]
    with opened(root) as manager:
        assert {taken, moved} <= {*manager.get_all_hashes()}
        assert holds(manager, taken, first)
        steps = manager.get_checkpoint_info(moved)["steps"]
        assert steps == [second, second + 1][: 1 + (settles == "its writer")]
        assert manager.get_checkpoint_info(moved)["metrics"][second] == {"val": 0.5}
        assert filled(manager.load_checkpoint(moved, target_step=second)) == second
        assert manager.get_checkpoint_info(taken)["steps"] == [first]
        assert defects(manager) == []
    entries = yaml.safe_load((root / "checkpoints/manifest.yaml").read_text())["experiments"]
    assert {taken, moved} <= {*entries}
    assert entries[taken]["latest_weight_step"] == first
    for hash, seed in ((taken, first), (moved, second)):
        text = yaml.safe_load((root / "checkpoints" / config_path(hash[:8])).read_text())
        assert text["hyperparameters"] == config(seed)


def test_labels_that_two_machines_take_at_the_same_moment(
    root: str, clash: tuple[int, int]
) -> None:
    """Two managers, two threads, one instant: whichever is later moves, by its next write."""
    managers = [opened(root) for _ in clash]
    with started(root):
        pass
    gate = threading.Barrier(len(clash))

    def work(manager: CheckpointManager, seed: int) -> None:
        manager.watch(model=net(), hyperparameters=config(seed))
        manager.update_experiment_hash()
        gate.wait()
        manager.save_model_checkpoint(net(fill=float(seed)), step=seed)

    threads = [threading.Thread(target=work, args=a) for a in zip(managers, clash, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for manager, seed in zip(managers, clash, strict=True):
        manager.save_model_checkpoint(net(fill=float(seed)), step=seed)
        assert holds(manager, manager.current_exp_hash or "", seed)
    with opened(root) as manager:
        a, b = (m.current_exp_hash or "" for m in managers)
        assert a != b and {a, b} <= {*manager.get_all_hashes()}
        assert holds(manager, a, clash[0]) and holds(manager, b, clash[1])
        assert defects(manager) == []
    for manager in managers:
        manager.close()


# -- many writers of one root

_WRITERS = """
import os, sys, traceback
import duckdb, pandas, pyarrow.parquet, torch
from tests.drivers.experiments.small import net, opened

def write(root, me, count):
    manager = opened(root)
    model, config = net(), {"me": me, "n": 0}
    manager.watch(model=model, hyperparameters=config)
    for n in range(count):
        config["n"] = n
        hash = manager.update_experiment_hash().hash
        manager.log("loss", float(n), n)
        manager.save_model_checkpoint(net(fill=me * 1000.0 + n), step=n)
        os.write(1, f"{hash} {me * 1000 + n} {n}\\n".encode())
    manager.close()

children = []
for me in range(int(sys.argv[2])):
    children.append(os.fork())
    if children[-1] == 0:
        try:
            write(sys.argv[1], me, int(sys.argv[3]))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


@pytest.mark.parametrize(("kind", "writers", "count"), [("local", 8, 10), ("s3", 3, 5)])
def test_many_processes_write_new_hashes_into_one_root(
    kind: str, writers: int, count: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """MC2: 'N x M entries afterwards, each read parses, latest_* is one of them'; no weight file
    and no point of a curve is lost either."""
    root = place(kind, request, tmp_path)
    stop, seen = threading.Event(), list[int]()

    def look() -> None:
        while not stop.is_set():
            with opened(root) as manager:
                seen.append(len(manager.get_all_hashes()))
            time.sleep(1)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        (told,) = run_all(_WRITERS, [[root, str(writers), str(count)]])
    finally:
        stop.set()
        looking.join()
    saved = [line.split() for line in told.splitlines()]
    assert len({hash for hash, _, _ in saved}) == writers * count
    assert seen == sorted(seen)
    manifest = yaml.safe_load(read(root, "checkpoints/manifest.yaml"))
    assert manifest["experiments"].keys() == {hash for hash, _, _ in saved}
    with opened(root) as manager:
        assert {*manager.get_all_hashes()} == {hash for hash, _, _ in saved}
        assert manifest["latest_hash"] == manager.get_latest_hash()
        for hash, fill, step in saved:
            entry = manifest["experiments"][hash]
            assert entry["latest_weight_checkpoint"] == f"{hash}_step_{int(step):06d}.pt"
            assert filled(manager.load_checkpoint(hash)) == float(fill)
            assert list(manager.signals("loss", hash)["step"]) == [int(step)]
        assert list(audit(records_of(manager), manager._session.place.files)) == []


_BRANCHER = """
import sys
from tests.drivers.experiments.small import net, opened
root, me, count, base = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
manager = opened(root)  # resumes the other's hash where that was faster
model, config = net(), {"lr": 1.0}
manager.watch(model=model, hyperparameters=config)
for n in range(count):
    if n % 4 == 0:
        assert manager.load_state(base, force=True) and config["lr"] == 1.0
        config["lr"] = me * 1000.0 + n
        hash = manager.update_experiment_hash().hash
    manager.log("acc", me * 1000.0 + n, n)
    manager.save_model_checkpoint(net(fill=me * 1000.0 + n), step=n)
    print(hash, n, me * 1000 + n)
manager.close()
"""


def test_two_processes_save_log_and_branch_at_once(root: str) -> None:
    with started(root, materialize="all") as manager:
        base = manager.current_exp_hash or ""
    count = 4 if "://" in root else 16
    told = run_all(_BRANCHER, [[root, str(n), str(count), base] for n in (1, 2)])
    saved = [line.split() for out in told for line in out.splitlines()]
    assert len(saved) == 2 * count
    with opened(root) as manager:
        assert {*manager.get_all_hashes()} == {base, *(h for h, _, _ in saved)}
        parents = {r["hash"]: r["parent"] for r in manager.list_runs()}
        for hash, step, fill in saved:
            assert parents[hash] == base
            assert filled(manager.load_checkpoint(hash, target_step=int(step))) == float(fill)
        points = {
            (r["experiment_hash"], r["step"], r["metric_value"])
            for h in {h for h, _, _ in saved}
            for r in manager.signals("acc", h).to_dict("records")
        }
        assert points == {(h, int(s), float(f)) for h, s, f in saved}
        assert filled(manager.load_checkpoint(base, target_step=1)) == 1.0
        assert defects(manager) == []


# -- several roots, one repository


def test_two_roots_share_objects_and_see_their_own(
    root: str, request: pytest.FixtureRequest
) -> None:
    """'Two roots in one shared repository reuse each other's objects and see only their own
    namespace. castore experiments list -r URL shows all namespaces, hashes, steps, sizes, last
    use'."""
    store = f"{root}-store"
    Repository.init(store)
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)

    def train(name: str, lr: float) -> CheckpointManager:
        options = {"repository": store, "namespace": name, "compression": "none"}
        manager = opened(f"{root}/{name}", checkpoint_manager=options)
        manager.watch(model=model, hyperparameters={"lr": lr})
        manager.save_model_checkpoint(step=1)
        return manager

    first = train("one", 1.0)
    before = usage(Repository.open(store)).stored
    second = train("two", 1.0)
    added = usage(Repository.open(store)).stored - before
    assert before > 300 * 300 * 4 and added < 40_000
    assert first.current_exp_hash == second.current_exp_hash
    third = train("two-b", 2.0)
    assert third.get_all_hashes() == [third.current_exp_hash] != first.get_all_hashes()
    for manager in (first, second, third):
        assert len(manager.list_runs()) == 1
    result = CliRunner().invoke(app, ["experiments", "list", "-r", store, "--json"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted((r["namespace"], r["hash"], r["steps"]) for r in rows) == [
        (n, m.current_exp_hash, [1]) for n, m in (("one", first), ("two", second), ("two-b", third))
    ]
    assert all(r["size"] > 300 * 300 * 4 and r["last_used"] > 0 for r in rows)
    for manager in (first, second, third):
        manager.close()


def test_pruning_after_one_root_forgot_leaves_the_other_whole(tmp_path: Path) -> None:
    """GC1: 'Only objects unreferenced by all registered roots go' - B's root being out of reach
    changes nothing, since its snapshots are in the repository."""
    store = tmp_path / "store"
    repository = Repository.init(store)
    a = started(tmp_path / "a", repository=str(store))
    b = started(tmp_path / "b", repository=str(store))
    hash = b.current_exp_hash or ""
    a.watch(model=net(fill=0.25, width=30_000))
    a.update_experiment_hash()
    only = a.save_model_checkpoint(step=2)
    a.close()
    b.close()
    (tmp_path / "b").rename(tmp_path / "unmounted")
    records = records_of(opened(tmp_path / "a"))
    for name in [*repository.snapshots(records.namespace)]:
        repository.forget(name)
    before = usage(repository).stored
    prune(repository, grace=0)
    assert only is not None and usage(repository).stored < before
    (tmp_path / "unmounted").rename(tmp_path / "b")
    with opened(tmp_path / "b") as again:
        assert filled(again.load_checkpoint(hash)) == 1.0
    assert list(check(repository, read_data=True)) == []


def test_a_fresh_root_goes_on_from_a_namespace_that_is_there(root: str, tmp_path: Path) -> None:
    """Another machine, an empty folder, the same repository and namespace: the experiment goes
    on; what the first wrote since is seen."""
    store = f"{root}-store"
    Repository.init(store)
    options = {"repository": store, "namespace": "exp"}
    first = opened(f"{root}/one", checkpoint_manager=options)
    first.watch(model=net(), hyperparameters={"lr": 1.0})
    first.save_model_checkpoint(net(fill=1.0), step=1)
    hash = first.current_exp_hash or ""
    said = Said()
    second = opened(f"{root}/two", said, checkpoint_manager=options)
    model = net()
    second.watch(model=model, hyperparameters={"lr": 1.0})
    assert second.update_experiment_hash() == (hash, False, set())
    assert torch.all(model.weight == 1.0) and not second.first_time
    second.save_model_checkpoint(net(fill=2.0), step=2)
    assert first.get_checkpoint_info(hash)["steps"] == [1, 2]
    for manager in (first, second):
        manager.close()
    with opened(f"{root}/two") as again:
        assert filled(again.load_checkpoint(hash)) == 2.0
        assert defects(again) == []
