"""Saves: one instant, durable or not at all, whatever ends the process.

Sentences in quotation marks are the promises that a test shows.
"""

from __future__ import annotations

import ast
import io
import shutil
import subprocess
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch
import yaml

from castore import BackendError, InvalidInputError, UntrustedPickleError
from castore.check import check
from castore_experiments import CheckpointManager
from castore_experiments.audit import audit
from castore_experiments.background import Background
from castore_experiments.layout import weights_path
from castore_experiments.records import Records
from tests.drivers.experiments.places import KINDS, place, run_all
from tests.drivers.experiments.small import Said, filled, net, opened, read, started
from tests.drivers.experiments.training import Net, samples
from tests.helpers import interrupted


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, request, tmp_path)


def whole(root: str | Path) -> CheckpointManager:
    """A manager on a root of which nothing is damaged."""
    manager = opened(root)
    records = manager._session.place.archive
    assert isinstance(records, Records)
    assert list(audit(records, manager._session.place.files)) == []
    assert list(check(records.repository, read_data=True)) == []
    return manager


# -- one instant


def test_a_save_is_of_one_instant(root: str) -> None:
    """'It is taken at one consistent instant: what the caller does after the call returns does not
    change it' - weights, optimizer, configuration, data, the architecture and its pickle."""
    manager = opened(root, checkpoint_manager={"dump_model_architecture": True})
    model, config, data = Net(256), {"lr": 1.0, "layers": [1]}, samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    metadata = {"notes": ["first"]}
    manager.watch(model=model, optimizer=optimizer, hyperparameters=config, data=data)
    hash = manager.update_experiment_hash().hash
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    handle = manager.save_model_checkpoint(step=1, wait=False, metadata=metadata)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    optimizer.param_groups[0]["lr"] = 9.0
    model.drop.p = 0.9
    model.late = torch.nn.Linear(3, 3)
    config["lr"], metadata["notes"][0] = 9.0, "late"
    config["layers"].append(9)  # type: ignore[attr-defined]
    data["discarded"] = True
    assert str(handle.result()).endswith(weights_path(hash, 1)) and handle.done()
    manager.close()
    with opened(root, allow_pickle=True) as again:
        found = again.load_checkpoint(hash, load_config=True, force=True)
        state = found["weights"]["model_state_dict"]
        assert state.keys() == saved.keys() and all(torch.equal(state[k], saved[k]) for k in saved)
        assert found["weights"]["optimizer_state_dict"]["param_groups"][0]["lr"] == 0.5
        assert found["weights"]["metadata"] == {"notes": ["first"]}
        assert found["config"] == {"lr": 1.0, "layers": [1]}
        assert not found["data_state"]["snapshot"]["discarded"].any()
        pickled = found["model"]
        assert pickled.drop.p == 0.3 and not hasattr(pickled, "late")
        assert all(torch.equal(pickled.state_dict()[k], saved[k]) for k in saved)
        again.watch(model=Net(256))
        assert again.update_experiment_hash(hp_snapshot=-1, dfm_snapshot=-1).changed == set()
    whole(root).close()


def test_saves_follow_one_another(root: str) -> None:
    """'Background saves: one copy in flight (the next waits), flushed at exit'."""
    with opened(root) as manager:
        model = net()
        manager.watch(model=model)
        handles = []
        for step in range(1, 5):
            with torch.no_grad():
                model.weight.fill_(float(step))
            handles.append(manager.save_model_checkpoint(step=step, wait=False))
        hash = manager.current_exp_hash or ""
        assert [h.done() for h in handles[:-1]] == [True] * 3
        assert manager.get_checkpoint_info(hash)["steps"] == [1, 2, 3, 4]
    assert handles[-1].done()
    with opened(root) as manager:
        for step in range(1, 5):
            assert filled(manager.load_checkpoint(hash, target_step=step)) == step


# -- steps


def test_latest_is_the_last_saved(root: str) -> None:
    """'"Latest" means last saved in time, by the store's order, not by name: step 1 000 000 after
    999 999, and a step saved again. Steps of any size keep the documented name'."""
    manager = started(root, materialize="all")
    hash = manager.current_exp_hash or ""
    for n, step in enumerate([999_999, 1_000_000, 5, 10**15, np.int64(7), 5]):
        path = manager.save_model_checkpoint(net(fill=float(n)), step=step)
        assert str(path).endswith(f"/{hash}_step_{step:06d}.pt")
        found = manager.load_checkpoint(hash)
        assert (found["weights"]["step"], filled(found)) == (step, n)
        entry = yaml.safe_load(read(root, "checkpoints/manifest.yaml"))["experiments"][hash]
        assert entry["latest_weight_step"] == step
        assert entry["latest_weight_checkpoint"] == f"{hash}_step_{step:06d}.pt"
    manager.close()
    with opened(root) as manager:
        model = net()
        manager.watch(model=model)
        assert model.weight[0, 0].item() == 5.0  # the second save of step 5
        assert filled(manager.load_checkpoint(hash, target_step=999_998)) == 0.0
        assert manager.get_checkpoint_info(hash)["steps"] == [1, 5, 7, 999_999, 1_000_000, 10**15]


def test_a_step_saved_again_keeps_the_earlier_file(root: str) -> None:
    """'a step saved again under an older hash keeps the earlier file loadable by its snapshot'."""
    with started(root) as manager:
        hash = manager.current_exp_hash or ""
        manager.watch(hyperparameters={"lr": 2.0})
        manager.update_experiment_hash(dump_immediately=True)
        assert manager.load_state(hash, force=True)
        manager.save_model_checkpoint(net(fill=8.0), step=1)
        assert filled(manager.load_checkpoint(hash, target_step=1)) == 8.0
        records = manager._session.place.archive
        assert isinstance(records, Records)
        newer, older = records.weights(hash)
        for weights, fill in ((newer, 8.0), (older, 1.0)):
            assert weights.snapshot is not None
            data = records.repository.read(str(weights.snapshot), weights.path)
            body = torch.load(io.BytesIO(data), weights_only=True)
            assert body["model_state_dict"]["weight"][0, 0] == fill


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", 2**63, float("nan")], ids=str)
def test_what_is_no_step(tmp_path: Path, step: Any) -> None:
    with started(tmp_path / "exp") as manager:
        with pytest.raises(InvalidInputError, match="step"):
            manager.save_model_checkpoint(step=step)
        path = manager.save_model_checkpoint()  # the last one known
        assert path.name.endswith("_step_000001.pt")


@pytest.mark.parametrize("step", [float("nan"), 1.5, "3"])
def test_what_is_no_step_of_a_curve(tmp_path: Path, step: Any) -> None:
    with started(tmp_path) as manager:
        with pytest.raises(InvalidInputError, match="loss: step: expected an integer"):
            manager.log("loss", 1.0, step)
        three: Any = np.int64(3)
        manager.log("loss", 1.0, three)
        assert manager.signals("loss")["step"].tolist() == [1, 3]


def test_saves_of_several_threads_are_all_kept(tmp_path: Path) -> None:
    """Each under its own step and with one step's weights, whoever logs or saves meanwhile."""
    with started(tmp_path) as manager, ThreadPoolExecutor(4) as pool:

        def save(step: int) -> None:
            manager.log("loss", 0.0, step)
            manager.save_model_checkpoint(net(fill=float(step)), step=step)

        list(pool.map(save, range(10, 22)))
        hash = manager.get_current_experiment_hash()
        for step in range(10, 22):
            assert filled(manager.load_checkpoint(hash, target_step=step)) == step


def test_a_wait_that_was_interrupted_forgets_no_save() -> None:
    """The save under way is waited for by the next one, though Ctrl-C ended a wait before."""
    background: Background[int] = Background()
    go, running = threading.Event(), threading.Event()

    def slow() -> int:
        running.set()
        assert go.wait(60)
        return 1

    first = background.run(slow)
    assert running.wait(60)
    with interrupted(Background.settle), pytest.raises(KeyboardInterrupt):
        background.settle()
    threading.Timer(0.1, go.set).start()
    second = background.run(lambda: int(first.done()))
    assert second.result() == 1


@pytest.mark.parametrize("name", ["a?b", "a\\b", "a#b%41 c'd"])
def test_a_root_of_any_name(tmp_path: Path, name: str) -> None:
    """DuckDB reads ``?`` and a backslash in a path as something else."""
    with started(tmp_path / name) as manager:
        manager.log("loss", 0.25, 2)
        manager.save_model_checkpoint(step=2)
    with opened(tmp_path / name) as manager:
        assert manager.signals("loss")["step"].tolist() == [1, 2]
    file = tmp_path / name / "checkpoints/loggers/loggers.duckdb"
    copy = shutil.copyfile(file, tmp_path / "copy.duckdb")
    with duckdb.connect(str(copy), read_only=True) as found:
        assert found.execute("SELECT count(*) FROM signals").fetchall() == [(2,)]
    assert [p.name for p in tmp_path.iterdir()].count(name) == 1


@pytest.mark.parametrize("given", [Namespace(lr=1.0), [("lr", 1.0)], "config.yaml"])
def test_hyperparameters_are_a_mapping(tmp_path: Path, given: Any) -> None:
    """``vars()`` of a namespace is one, and live."""
    with opened(tmp_path) as manager:
        with pytest.raises(InvalidInputError, match="hyperparameters: expected a mapping, found"):
            manager.watch(hyperparameters=given)
        if isinstance(given, Namespace):
            manager.watch(hyperparameters=vars(given))
            hash = manager.update_experiment_hash(dump_immediately=True).hash
            given.lr = 2.0
            assert manager.update_experiment_hash().changed == {"hp"}
            assert manager.load_state(hash) and given.lr == 1.0


def test_a_metric_that_is_not_finite_keeps_no_save_from_being_made(tmp_path: Path) -> None:
    values = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": np.float32(0.5)}
    with started(tmp_path / "exp") as manager:
        manager.save_model_checkpoint(step=2, metrics=values)
        found = manager.get_checkpoint_info()["metrics"][2]
    assert np.array_equal(list(found.values()), list(values.values()), equal_nan=True)


def test_what_has_no_weights_is_still_the_latest(root: str) -> None:
    """'latest_hash is the hash current at the last write ... Content that was seen before gets its
    old hash back (is_new=False)', also where there is no model to save."""
    manager, config = opened(root), {"lr": 1}
    manager.watch(hyperparameters=config)
    first = manager.update_experiment_hash(dump_immediately=True).hash
    config["lr"] = 2
    second = manager.update_experiment_hash(dump_immediately=True).hash
    config["lr"] = 1
    assert manager.update_experiment_hash(dump_immediately=True) == (first, False, {"hp"})
    assert manager.get_latest_hash() == first != second
    manager.close()
    assert yaml.safe_load(read(root, "checkpoints/manifest.yaml"))["latest_hash"] == first
    with opened(root) as again:
        assert again.current_exp_hash == first and again.hyperparameters == {"lr": 1}
        assert again.get_all_hashes() == [second, first]
        assert again.get_all_hashes("last_used") == [first, second]


# -- failures


def test_a_failed_background_save_raises_at_the_next_call(tmp_path: Path) -> None:
    """'Nothing is swallowed: a failed background save raises at the next call and from
    close()'; what its handle told is not told again, and the next save may succeed."""
    root = tmp_path / "exp"
    manager = started(root)
    objects, aside = root / ".castore" / "objects", tmp_path / "aside"
    config = {"lr": 2.0}
    manager.watch(hyperparameters=config)
    hash = manager.update_experiment_hash().hash

    def fail() -> Any:
        objects.rename(aside)
        objects.write_text("in the way")
        handle = manager.save_model_checkpoint(net(fill=2.0), step=2, wait=False)
        while not handle.done():
            time.sleep(0.01)
        objects.unlink()
        aside.rename(objects)
        return handle

    fail()
    with pytest.raises(BackendError):
        manager.get_all_hashes()
    assert manager.has_pending_changes() == (True, {"hp"})
    handle = fail()
    with pytest.raises(BackendError):
        handle.result()
    assert hash not in manager.get_all_hashes()  # told already
    fail()
    with pytest.raises(BackendError):
        manager.save_model_checkpoint(net(fill=2.0), step=2)
    fail()
    with pytest.raises(BackendError):
        manager.close()
    manager.close()
    with whole(root) as again:
        assert hash not in again.get_all_hashes()
        again.watch(hyperparameters=config, model=net())
        assert again.update_experiment_hash(dump_immediately=True) == (hash, True, {"hp"})


def test_a_full_disk(tmp_path: Path) -> None:
    """MC1: RLIMIT_FSIZE during weights: the error surfaces, the old state is fully usable, and
    training goes on once there is room."""
    root = tmp_path / "exp"
    with opened(root) as manager:
        manager.watch(model=net(50_000, 1.0), hyperparameters={"lr": 1.0})
        manager.save_model_checkpoint(step=1)
        hash = manager.current_exp_hash or ""
    script = f"""
import resource, signal
from castore import BackendError
from tests.drivers.experiments.small import net, opened
import torch
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
manager = opened({str(root)!r})
model = net(50_000)
config = {{"lr": 1.0}}
manager.watch(model=model, hyperparameters=config)
with torch.no_grad():
    model.weight.copy_(torch.randn_like(model.weight))
for change in (0, 1):
    config["lr"] += change
    manager.update_experiment_hash()
    for limit in (20_000, 3_000, 600):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            manager.save_model_checkpoint(step=2)
        except BackendError as e:
            print("told", e)
        else:
            raise SystemExit("nothing was told")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
manager.save_model_checkpoint(step=3)
manager.close()
"""
    (out,) = run_all(script, [[]])
    assert out.count("told") == 6 and "exp" in out
    with whole(root) as manager:
        assert manager.get_checkpoint_info(hash)["steps"] == [1]
        (other,) = {*manager.get_all_hashes()} - {hash}
        assert manager.get_checkpoint_info(other)["steps"] == [3]
        assert filled(manager.load_checkpoint(hash, target_step=1)) == 1.0


_KILLED = """
import itertools, os, random, signal, sys, time
import duckdb, pandas, pyarrow, pyarrow.parquet, torch
from tests.drivers.experiments.small import filled, net, opened
root, chance = sys.argv[1], random.Random(3)

def train(tell):
    manager = opened(root)
    found = set()
    for hash in manager.get_all_hashes():
        for step in manager.get_checkpoint_info(hash)["steps"]:
            assert filled(manager.load_checkpoint(hash, target_step=step)) == step
            found.add((step, hash))
    tell(f"found {found}")
    model, config = net(2_000), {"lr": 0}
    manager.watch(model=model)
    start = max((s for s, _ in found), default=0)
    for step in itertools.count(start + 1):
        config["lr"] = step // 2
        with torch.no_grad():
            model.weight.fill_(float(step))
        manager.watch(hyperparameters=config)
        hash = manager.update_experiment_hash().hash
        manager.log("loss", float(step), step)
        manager.save_model_checkpoint(step=step)
        tell(f"saved {(step, hash)}")

for _ in range(20):
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            train(lambda text: os.write(into, text.encode() + b"\\n"))
        except BaseException as e:
            os.write(into, f"failed {type(e).__name__}: {e}\\n".encode())
        os._exit(1)
    os.close(into)
    with os.fdopen(out) as told:
        lines = [told.readline()]
        if lines[0].startswith("found"):
            lines.append(told.readline())
        time.sleep(chance.uniform(0.0, 0.2))
        os.kill(pid, signal.SIGKILL)
        lines += told.readlines()
    os.waitpid(pid, 0)
    print("".join(lines), end="")
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    """MC1, kill -9 at 20 random moments: 'old state fully usable, new state either complete or
    absent'; what was said to be saved is there at once, the manifest comes after."""
    root = tmp_path / "exp"
    (out,) = run_all(_KILLED, [[str(root)]])
    saved: set[tuple[int, str]] = set()
    for line in out.splitlines():
        what, _, told = line.partition(" ")
        assert what in ("found", "saved"), line
        if what == "saved":
            saved.add(ast.literal_eval(told))
        else:
            found = set() if told == "set()" else ast.literal_eval(told)
            assert saved <= found
    assert len(saved) >= 20
    with opened(root) as manager:
        assert len(manager.signals("loss")) >= len(saved)
        manager.watch(model=net(2_000), hyperparameters={"lr": -1})
        manager.update_experiment_hash(dump_immediately=True)
    whole(root).close()
    entries = yaml.safe_load((root / "checkpoints/manifest.yaml").read_text())["experiments"]
    assert {*entries} >= {hash for _, hash in saved}


def test_what_a_killed_process_left_out_of_the_manifest_is_entered(tmp_path: Path) -> None:
    """A state and weights were committed, and the process ended before it told the manifest."""
    root = tmp_path / "exp"
    with started(root) as manager:
        first = manager.current_exp_hash or ""
        old = (root / "checkpoints/manifest.yaml").read_bytes()
        manager.save_model_checkpoint(step=2)
        manager.watch(hyperparameters={"lr": 2.0})
        second = manager.update_experiment_hash(dump_immediately=True).hash
    (root / "checkpoints/manifest.yaml").write_bytes(old)
    with opened(root) as manager:
        assert manager.current_exp_hash == second
        manager.watch(model=net(), hyperparameters={"lr": 3.0})
        manager.update_experiment_hash(dump_immediately=True)
    whole(root).close()
    entries = yaml.safe_load((root / "checkpoints/manifest.yaml").read_text())["experiments"]
    assert len(entries) == 3 and entries[first]["latest_weight_step"] == 2


def test_rows_of_a_killed_process_are_taken_in_by_a_save(tmp_path: Path) -> None:
    """'A crash loses at most the rows since the last flush': whoever goes on needs log nothing."""
    script = """
import os, sys, time
from pathlib import Path
from castore_experiments.signals import wal
from tests.drivers.experiments.small import started
manager = started(sys.argv[1])
manager.log("loss", 9.0, 7)
folder = Path(sys.argv[1], ".castore", "wal")
while not any(wal.read(folder / writer).tables for writer in wal.writers(folder)):
    time.sleep(0.05)
os._exit(1)
"""
    root = tmp_path / "exp"
    command = [sys.executable, "-W", "ignore", "-c", script, str(root)]
    assert subprocess.run(command, timeout=200).returncode == 1
    said = Said()
    with opened(root, said) as manager:
        manager.watch(model=net())
        manager.save_model_checkpoint(step=2)
        assert said.has("1 rows of curves of a process that ended early are recovered")
        with duckdb.connect(str(manager.get_logger_db_path()), read_only=True) as connection:
            rows = connection.execute("SELECT step, metric_value FROM signals ORDER BY step")
            assert rows.fetchall() == [(1, 0.5), (7, 9.0)]


def test_workers_that_end_leave_the_manager_alone(tmp_path: Path) -> None:
    """A data loader's workers are forked and end with each epoch: while a save is under way, too,
    which only the process that began it can finish."""
    script = """
import sys, threading
import multiprocessing
from tests.drivers.experiments.small import started
manager, held = started(sys.argv[1]), threading.Event()
manager._session.background.run(held.wait)
child = multiprocessing.get_context("fork").Process(target=int)
child.start()
child.join(60)
print(child.exitcode)
held.set()
child.kill()
manager._session.background.settle()
manager.log("loss", 1.0, 2)
manager.close()
"""
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "exp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_an_end_without_close_loses_nothing(root: str) -> None:
    """'Background saves: ... flushed at exit': a program that ends without `close`."""
    script = f"""
from tests.drivers.experiments.small import net, opened
manager = opened({root!r})
manager.watch(model=net(fill=4.0), hyperparameters={{"lr": 1.0}})
manager.save_model_checkpoint(step=4, wait=False)
manager.log("loss", 0.25, 5)
"""
    run_all(script, [[]])
    with whole(root) as manager:
        assert filled(manager.load_checkpoint(manager.current_exp_hash or "")) == 4.0
        assert list(manager.signals("loss")["metric_value"]) == [0.25]


# -- pickles of ours


def test_a_pickled_architecture_needs_a_word(tmp_path: Path) -> None:
    """'pickled architectures load only with dump_model_architecture: true in the caller's own
    config or allow_pickle=True, else UntrustedPickleError says how'."""
    root = tmp_path / "exp"
    with started(root, dump_model_architecture=True) as manager:
        hash = manager.current_exp_hash or ""
        assert manager.save_model_architecture() is not None
        assert isinstance(manager.load_checkpoint(hash)["model"], torch.nn.Linear)
    with opened(root) as manager:
        assert manager.load_checkpoint(hash)["loaded_components"] == {"weights"}
        with pytest.raises(UntrustedPickleError, match="allow_pickle=True, or dump_model_archit"):
            manager.load_checkpoint(hash, load_model=True)
        manager.watch(
            hyperparameters={"lr": 1.0, "checkpoint_manager": {"dump_model_architecture": True}}
        )
        assert isinstance(manager.load_checkpoint(hash)["model"], torch.nn.Linear)
    with opened(root, allow_pickle=True) as manager:
        assert isinstance(manager.load_checkpoint(hash)["model"], torch.nn.Linear)


def test_a_model_that_cannot_be_pickled_is_refused_at_the_call(tmp_path: Path) -> None:
    class Local(torch.nn.Linear):
        pass

    with opened(tmp_path, checkpoint_manager={"dump_model_architecture": True}) as manager:
        manager.watch(model=Local(1, 1))
        with pytest.raises(InvalidInputError, match="cannot be pickled"):
            manager.save_model_checkpoint(step=1, wait=False)
        assert manager.get_all_hashes() == []


# -- loading


def test_weights_of_another_architecture_are_not_loaded(tmp_path: Path) -> None:
    """An explicit load says so and changes nothing; resuming counts it as an edit."""
    config = {"lr": 1.0}
    manager = opened(tmp_path / "exp")
    manager.watch(model=net(4, 1.0), hyperparameters=config)
    older = manager.update_experiment_hash(dump_immediately=True).hash
    config["lr"] = 2.0
    other = net(8, 2.0)
    manager.watch(model=other)
    newer = manager.update_experiment_hash(dump_immediately=True).hash
    with pytest.raises(InvalidInputError, match="not of the architecture of"):
        manager.load_state(older)
    assert config == {"lr": 2.0} and manager.current_exp_hash == newer
    assert manager.load_state(older, load_weights=False)
    assert config == {"lr": 1.0} and manager.current_exp_hash == older
    assert torch.all(other.weight == 2.0)
    manager.close()
    said = Said()
    with opened(tmp_path / "exp", said) as manager:
        manager.watch(model=net(16))
        assert said.has("this counts as an edit of the model")
        assert manager.update_experiment_hash().changed == {"model"}


def test_a_checkpoint_without_optimizer_state_resumes(tmp_path: Path) -> None:
    """MC3: 'Newest checkpoint lacks optimizer part'."""
    started(tmp_path / "exp", dump_optimizer_state=False).close()
    said, model = Said(), net()
    with opened(tmp_path / "exp", said) as manager:
        hash = manager.current_exp_hash or ""
        manager.watch(model=model, optimizer=torch.optim.Adam(model.parameters()))
        assert torch.all(model.weight == 1.0) and said.has("holds no optimizer state")
        assert manager.load_state(hash, force=True)


@pytest.mark.parametrize(("saved", "now"), [("AdamW", "SGD"), ("SGD", "AdamW")])
def test_another_kind_of_optimizer(tmp_path: Path, saved: str, now: str) -> None:
    """'saved right or refused by name': torch takes AdamW's state into SGD, whose next step then
    fails. Resuming leaves the new one as it is and says so; a load refuses and changes nothing."""

    def training(kind: str, fill: float) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        model = net(fill=fill)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.25)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # adds a setting of its own
        model(torch.ones(1, 2)).sum().backward()
        return model, optimizer

    model, optimizer = training(saved, 1.0)
    optimizer.step()
    with opened(tmp_path / "exp") as manager:
        manager.watch(model=model, optimizer=optimizer)
        manager.save_model_checkpoint(step=1)
        hash = manager.current_exp_hash or ""
    said, (other, changed) = Said(), training(now, 5.0)
    with opened(tmp_path / "exp", said) as manager:
        manager.watch(model=other, optimizer=changed)
        assert said.has("the saved optimizer is of another kind") and torch.equal(
            other.weight, model.weight
        )
        changed.step()
        stepped = other.weight.detach().clone()
        with pytest.raises(InvalidInputError, match="of another kind: .*nothing was changed"):
            manager.load_state(hash, force=True)
        assert torch.equal(other.weight, stepped)
        assert manager.load_state(hash, force=True, strict=False)
        assert torch.equal(other.weight, model.weight)
        changed.step()


@pytest.mark.parametrize(
    ("saved", "now", "named"),
    [
        (
            "StepLR",
            "CosineAnnealingLR",
            "StepLR (gamma, step_size) saved; CosineAnnealingLR (T_max",
        ),
        ("CosineAnnealingLR", "StepLR", "(T_max, eta_min) saved; StepLR (gamma, step_size) here"),
        ("StepLR", "ExponentialLR", "StepLR (gamma, step_size) saved; ExponentialLR (gamma) here"),
        ("ExponentialLR", "StepLR", "ExponentialLR (gamma) saved; StepLR (gamma, step_size) here"),
        ("StepLR", "ReduceLROnPlateau", "StepLR (gamma, step_size) saved; ReduceLROnPlateau ("),
        (
            "ReduceLROnPlateau",
            "LinearLR",
            "saved; LinearLR (end_factor, start_factor, total_iters)",
        ),
    ],
)
def test_another_kind_of_scheduler(tmp_path: Path, saved: str, now: str, named: str) -> None:
    """'saved right or refused by name': torch takes any scheduler's state into any other. Resuming
    leaves the new one as it is and says so; a load refuses and changes nothing."""
    settings: dict[str, tuple[Any, ...]] = {
        "StepLR": (5,),
        "ExponentialLR": (0.5,),
        "CosineAnnealingLR": (7,),
    }

    def training(kind: str, fill: float) -> tuple[torch.nn.Linear, Any]:
        model = net(fill=fill)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        return model, getattr(torch.optim.lr_scheduler, kind)(optimizer, *settings.get(kind, ()))

    model, scheduler = training(saved, 1.0)
    with opened(tmp_path / "exp") as manager:
        manager.watch(model=model, scheduler=scheduler)
        manager.save_model_checkpoint(step=1)
        hash = manager.current_exp_hash or ""
    said, (other, changed) = Said(), training(now, 5.0)
    as_new = {k: v for k, v in changed.state_dict().items() if not callable(v)}
    with opened(tmp_path / "exp", said) as manager:
        manager.watch(model=other, scheduler=changed)
        assert said.has("the saved scheduler is of another kind") and said.has(named)
        assert torch.equal(other.weight, model.weight)
        assert {k: changed.state_dict()[k] for k in as_new} == as_new
        with torch.no_grad():
            other.weight.fill_(5.0)
        with pytest.raises(InvalidInputError, match="scheduler is of another kind: .*nothing was"):
            manager.load_state(hash, force=True)
        assert other.weight[0, 0] == 5.0
        assert manager.load_state(hash, force=True, strict=False)
        assert torch.equal(other.weight, model.weight)
        assert {k: changed.state_dict()[k] for k in as_new} == as_new


class Warm(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of somebody's own, with a setting that one of torch's has."""

    def __init__(self, optimizer: torch.optim.Optimizer, gamma: float):
        self.gamma = gamma
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [lr * self.gamma for lr in self.base_lrs]


@pytest.mark.parametrize(
    "kind",
    ["StepLR", "MultiStepLR", "OneCycleLR", "LambdaLR", "CosineAnnealingWarmRestarts", "Warm"],
)
def test_the_same_kind_of_scheduler_goes_on(kind: str) -> None:
    """Also one whose author added a setting since, and one without any setting."""
    from castore_experiments.schedulers import other_scheduler

    settings: dict[str, tuple[Any, ...]] = {
        "StepLR": (5,),
        "MultiStepLR": ([2, 3],),
        "OneCycleLR": (0.1, 10),
        "LambdaLR": (lambda n: 1.0,),
        "CosineAnnealingWarmRestarts": (4,),
        "Warm": (0.5,),
    }
    made = Warm if kind == "Warm" else getattr(torch.optim.lr_scheduler, kind)
    one, two = (
        made(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.5), *settings[kind])
        for _ in range(2)
    )
    assert other_scheduler(two, one.state_dict()) == ""
    assert other_scheduler(None, one.state_dict()) == "" == other_scheduler(two, None)
    if kind == "Warm":
        two.added = 1
        assert other_scheduler(two, one.state_dict()) == ""


# -- distributed

_RANK = """
import sys, json, torch
import torch.distributed as dist
from tests.drivers.experiments.small import net, opened, filled
from tests.drivers.experiments.small import listing
rank, folder, root = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
config = {"lr": 1.0}
answers = []
manager = opened(root)
manager.watch(model=net(fill=3.0), hyperparameters=config)
def say(*what):
    answers.append([str(w) for w in what])
    dist.barrier()
if rank == 0:
    dist.barrier()  # is_new is about what is written: the other rank asks before it is
update = manager.update_experiment_hash(dump_immediately=True)
if rank == 1:
    dist.barrier()
say(update.hash, update.is_new, sorted(update.changed))
say(manager.save_model_checkpoint(step=3))
say(manager.save_model_checkpoint(step=4, wait=False).result())
config["lr"] = 2.0
say(manager.update_experiment_hash(), manager.has_pending_changes())
say(manager.save_pending_changes(), manager.has_pending_changes())
config["lr"] = 1.0
say(manager.update_experiment_hash(dump_immediately=True)[:2])
manager.log("loss", 1.0, 5)
say(manager.rename_run(manager.current_exp_hash, "named"))
say(manager.get_all_hashes(), manager.get_latest_hash(), manager.current_exp_hash)
say([{k: v for k, v in r.items() if k != "last_used"} for r in manager.list_runs()])
say(filled(manager.load_checkpoint(manager.current_exp_hash, target_step=3)))
say(manager.load_state(manager.get_all_hashes()[0]), manager.current_exp_hash, config)
manager.close()
dist.barrier()
dist.destroy_process_group()
print(json.dumps(answers))
"""


def test_rank_0_writes_and_the_others_get_the_same_answers(root: str, tmp_path: Path) -> None:
    """'In a distributed job rank 0 writes, the others' calls are no-ops that return the same
    values'."""
    ranks = [[str(r), str(tmp_path), root] for r in range(2)]
    first, second = run_all(_RANK, ranks)
    assert first == second
    with whole(root) as manager:
        namespace = manager._session.place.namespace
        repository = manager._session.place.repository
        assert repository is not None
        keys = [n.key for n in repository.snapshots(namespace)]
        assert len([k for k in keys if k.endswith(".step.3")]) == 1
        assert len(manager.signals("loss")) == 1


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler"])
def test_what_has_no_state_is_refused_when_it_is_watched(tmp_path: Path, name: str) -> None:
    """Two optimizers, as a GAN has, in a list: not first at the save."""
    with CheckpointManager(tmp_path / "exp") as manager:
        watched: dict[str, Any] = {name: [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]}
        with pytest.raises(InvalidInputError, match=f"{name}: list has no state_dict"):
            manager.watch(**watched)
