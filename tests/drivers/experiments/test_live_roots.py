"""A root that lives on: opened, copied, moved, damaged by hand, read by others.

Sentences in quotation marks are the promises that a test shows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from castore import (
    BackendError,
    IntegrityError,
    Repository,
    RepositoryNotFoundError,
)
from castore_experiments import CheckpointManager
from castore_experiments.files import open_files
from castore_experiments.root import ROOT, read_root
from tests.drivers.experiments.places import KINDS, place
from tests.drivers.experiments.small import Said, filled, listing, net, opened, read, started
from tests.drivers.experiments.training import samples
from tests.test_backend_local import in_child, root_only


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, request, tmp_path)


def namespace(root: str | Path) -> str:
    record = read_root(open_files(root))
    assert record is not None
    return record.namespace


# -- opening


def look_at_everything(manager: CheckpointManager) -> None:
    """Every question that a manager answers, and every object watched."""
    model = net()
    manager.watch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=samples(),
        dataloaders={"train": torch.utils.data.DataLoader([1, 2, 3])},
    )
    for hash in manager.get_all_hashes("last_used") + manager.list_experiment_hashes():
        manager.load_checkpoint(hash, load_config=True, force=True)
        manager.get_checkpoint_info(hash)
    manager.get_hashes_by_component()
    manager.list_runs()
    manager.signals("loss")
    _ = manager.hyperparameters, manager.current_exp_hash, manager.first_time
    manager.has_pending_changes()
    manager.get_latest_hash()


def test_opening_writes_nothing(root: str) -> None:
    """'opening such a root ... touches nothing until the first write': nor any other."""
    with opened(root) as manager:
        look_at_everything(manager)
    assert listing(root) == {}
    assert "://" in root or not os.path.exists(root)
    started(root).close()
    before = listing(root)
    with opened(root) as manager:
        look_at_everything(manager)
    assert listing(root) == before


def test_what_another_process_wrote_is_seen(root: str) -> None:
    """Two managers opened on a fresh root: the second sees what the first made of it."""
    early = opened(root)
    assert early.get_latest_hash() is None
    manager = started(root)
    hash = manager.current_exp_hash
    assert hash is not None
    assert early.get_all_hashes() == [hash] == [r["hash"] for r in early.list_runs()]
    assert filled(early.load_checkpoint(hash)) == 1.0
    early.watch(model=net(), hyperparameters={"lr": 1.0})
    assert early.update_experiment_hash() == (hash, False, {"hp", "model"})
    early.save_model_checkpoint(step=2)
    assert manager.get_checkpoint_info(hash)["steps"] == [1, 2]
    manager.close()
    early.close()


def test_pending_edits_are_told_at_reopening(root: str) -> None:
    """'Pending changes survive a crash: reopening says what was pending and resumes the last
    written state'."""
    manager = started(root)
    written = manager.current_exp_hash
    config = {"lr": 2.0}
    manager.watch(hyperparameters=config)
    pending = manager.update_experiment_hash().hash
    said = Said()  # the first manager is never closed: its process ended
    again = opened(root, said)
    assert again.current_exp_hash == written
    assert said.has("changes of hp since ") and said.has(pending)
    again.watch(hyperparameters=config)
    assert again.update_experiment_hash(dump_immediately=True).hash == pending
    again.close()
    said.clear()
    opened(root, said).close()
    assert not said
    manager.close()


# -- copied and moved


def test_a_copied_root_goes_on_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    """'A root copied with cp -r gets a new namespace, forked from the old one, said aloud; a moved
    one keeps its own' - also where both lie in one shared repository."""
    shared = str(tmp_path / "store")
    Repository.init(shared)
    first, second = tmp_path / "exp", tmp_path / "copy"
    started(first, repository=shared).close()
    shutil.copytree(first, second)
    said = Said()
    with opened(second, said, checkpoint_manager={"namespace": namespace(first)}) as copy:
        copy.watch(model=net())
        assert copy.save_model_checkpoint(step=2).parent.is_relative_to(second)  # type: ignore[union-attr]
        hash = copy.current_exp_hash or ""
        assert copy.get_checkpoint_info(hash)["steps"] == [1, 2]
        assert len(copy.signals("loss")) == 1
    assert said.has(f"a copy of {first}") and said.has(f"forked from {namespace(first)!r}")
    assert namespace(second) != namespace(first)
    with opened(first) as original:
        assert original.get_checkpoint_info(hash)["steps"] == [1]
    said.clear()
    with opened(second, said, checkpoint_manager={"namespace": namespace(first)}) as copy:
        assert filled(copy.load_checkpoint(hash, target_step=1)) == 1.0
    assert not said


def test_a_moved_root_keeps_its_namespace_and_its_hash(tmp_path: Path) -> None:
    first, moved, copied = (tmp_path / n for n in ("exp", "moved", "copied"))
    started(first).close()
    own = namespace(first)
    first.rename(moved)
    said = Said()
    with opened(moved, said) as manager:
        hash = manager.current_exp_hash
        manager.watch(model=net(), hyperparameters={"lr": 1.0, "root_log_dir": str(moved)})
        assert manager.update_experiment_hash() == (hash, False, set())
        manager.save_model_checkpoint(step=2)
    assert said.has("moved here from") and namespace(moved) == own
    said.clear()
    opened(moved, said).close()
    assert not said
    shutil.copytree(moved, copied)  # a copy of what was moved before is still a copy
    with opened(copied, said) as manager:
        manager.watch(model=net())
        manager.save_model_checkpoint(step=3)
    assert said.has("a copy of") and namespace(copied) != own


# -- deleted by hand


def delete(root: str, folder: str) -> None:
    files = open_files(root)
    for name in [s.name for s in files.list(folder)]:
        files.delete(name)
    if "://" not in root:
        shutil.rmtree(f"{root}/{folder}")


def test_a_deleted_checkpoints_folder_is_rebuilt(root: str) -> None:
    """'A deleted checkpoints/ folder is rebuilt on the next open, with one line that says so and
    how to start afresh'."""
    with started(root) as manager:
        hash = manager.current_exp_hash or ""
    before = {n: read(root, n) for n in listing(root) if n.startswith("checkpoints/")}
    delete(root, "checkpoints")
    said = Said()
    with opened(root, said) as manager:
        assert manager.current_exp_hash == hash
        assert len(manager.signals("loss")) == 1
    assert len(said) == 1 and said.has("was gone: 1 experiments") and said.has(ROOT)
    after = {n: read(root, n) for n in listing(root) if n.startswith("checkpoints/")}
    assert after.keys() == before.keys()
    derived = ("checkpoints/manifest.yaml", "checkpoints/loggers/loggers.duckdb")
    assert all(after[n] == before[n] for n in before if n not in derived)
    entries = [
        yaml.safe_load(x["checkpoints/manifest.yaml"])["experiments"] for x in (before, after)
    ]
    assert entries[0].keys() == entries[1].keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_deleted_repository_is_made_again_from_the_files(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """``.castore`` taken away: the root goes on from the files that are there, its labels too."""
    root = place(kind, request, tmp_path)
    with started(root, materialize="all") as manager:
        hash = manager.current_exp_hash or ""
        digests = manager.get_checkpoint_info(hash)["digests"]
        manager.save_model_checkpoint(step=5)
    delete(root, ".castore")
    before = listing(root)
    with opened(root) as manager:
        assert manager.current_exp_hash == hash
        assert manager.get_checkpoint_info(hash)["steps"] == [1, 5]
        assert filled(manager.load_checkpoint(hash, target_step=1)) == 1.0
        assert len(manager.signals("loss")) == 1
    assert listing(root) == before
    said = Said()
    with opened(root, said) as manager:
        manager.watch(model=net(fill=7.0), hyperparameters={"lr": 1.0})
        assert manager.update_experiment_hash() == (hash, False, set())
        manager.save_model_checkpoint(step=7)
        found = manager.get_checkpoint_info(hash)
        assert (found["steps"], found["digests"]) == ([1, 5, 7], digests)
    assert said.has("1 hashes, 2 weight files, 1 rows of curves taken into")


def test_a_first_write_that_ended_early_is_begun_anew(tmp_path: Path) -> None:
    """A process killed while it takes in a root's files leaves a root that still has them all."""
    root = tmp_path / "exp"
    with started(root, materialize="all") as manager:
        hash = manager.current_exp_hash or ""
        manager.save_model_checkpoint(step=5)
    shutil.rmtree(root / ".castore")
    Repository.init(root / ".castore")  # as far as the killed process came
    with opened(root) as manager:
        assert manager.get_checkpoint_info(hash)["steps"] == [1, 5]
        manager.watch(model=net())
        manager.save_model_checkpoint(step=6)
        assert manager.get_checkpoint_info(hash)["steps"] == [1, 5, 6]


def test_starting_afresh(tmp_path: Path) -> None:
    """What the line about a deleted folder advises: ``root.json`` away, too. The old repository
    stays; where it was elsewhere, the root gets one of its own."""
    shared, first, second = (tmp_path / n for n in ("store", "first", "second"))
    started(first).close()
    started(second, repository=str(shared)).close()
    for root in (first, second):
        shutil.rmtree(root / "checkpoints")
        (root / ROOT).unlink()
        with opened(root) as manager:
            assert manager.first_time and manager.get_all_hashes() == []
            manager.watch(model=net(), hyperparameters={"lr": 2.0})
            manager.save_model_checkpoint(net(fill=3.0), step=3)
            assert len(manager.signals("loss")) == 0
        with opened(root) as manager:
            hash = manager.current_exp_hash or ""
            assert manager.get_checkpoint_info(hash)["steps"] == [3]
    assert len(Repository.open(first / ".castore").namespaces()) == 3
    assert len(Repository.open(shared).namespaces()) == 2


# -- edited by hand


@pytest.mark.parametrize("what", ["config", "weights", "foreign"])
def test_edited_and_foreign_files_are_kept_and_reported(root: str, what: str) -> None:
    """'A root file is replaced or removed only when its SHA-256 equals a committed file's; an
    edited or foreign file is kept ... and reported'."""
    with started(root, materialize="all") as manager:
        hash = manager.current_exp_hash or ""
    config = {"lr": 3.0}
    name = {
        "config": f"checkpoints/HP/{hash[:8]}/{hash[:8]}_config.yaml",
        "weights": f"checkpoints/models/{hash[8:16]}/{hash}_step_000001.pt",
        "foreign": f"checkpoints/models/{hash[8:16]}/{hash}_step_000009.pt",
    }[what]
    files = open_files(root)
    files.delete(name)
    files.create(name, b"somebody's own")
    said = Said()
    with opened(root, said, checkpoint_manager={"materialize": "all"}) as manager:
        manager.watch(hyperparameters={"lr": 1.0})
        manager.save_model_checkpoint(net(fill=2.0), step=1)
        manager.save_model_checkpoint(net(fill=2.0), step=9)
        manager.watch(hyperparameters=config)
        manager.update_experiment_hash(dump_immediately=True)
        assert filled(manager.load_checkpoint(hash, target_step=9)) == 2.0
    assert read(root, name) == b"somebody's own"
    if what != "config":
        assert said.has(name.removeprefix("checkpoints/")) and said.has("it is kept as it is")
    said.clear()
    with opened(root, said, checkpoint_manager={"materialize": "latest"}) as manager:
        manager.watch(model=net())
        manager.save_model_checkpoint(step=10)  # takes other weight files away, but not this one
    assert read(root, name) == b"somebody's own"


def test_weights_that_another_program_wrote_stay_real(tmp_path: Path) -> None:
    """'goes on in place as the document says (manifest and curves extended, foreign files
    kept)': that program looks for its files."""
    root = tmp_path / "exp"
    with started(root, materialize="all") as manager:
        manager.save_model_checkpoint(step=2)
    shutil.rmtree(root / ".castore")
    theirs = {p: p.read_bytes() for p in root.rglob("*.pt")}
    with opened(root) as manager:
        manager.watch(model=net(fill=3.0), hyperparameters={"lr": 1.0})
        manager.save_model_checkpoint(step=3)
        path = manager.save_model_checkpoint(step=4)
    assert {p: p.read_bytes() for p in root.rglob("*.pt") if p != path} == theirs
    assert len(theirs) == 2


# -- out of reach


@pytest.fixture
def open_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@root_only
@pytest.mark.parametrize("gone", [False, True])
def test_a_root_that_may_only_be_read(open_folder: Path, gone: bool) -> None:
    """Opens and reads; writing says what and where."""
    root = open_folder / "exp"
    with started(root) as manager:
        hash = manager.current_exp_hash or ""
    if gone:
        shutil.rmtree(root / "checkpoints")
    before = listing(root)

    def work() -> None:
        said = Said()
        with opened(root, said) as manager:
            assert manager.current_exp_hash == hash
            assert filled(manager.load_checkpoint(hash)) == 1.0
            assert len(manager.signals("loss")) == 1
            assert said.has("cannot be made again") is gone
            manager.watch(model=net())
            with pytest.raises(BackendError, match="(?i)permission denied"):
                manager.save_model_checkpoint(step=2)
            with pytest.raises(BackendError, match="(?i)permission denied"):
                manager.log("loss", 1.0, 2)

    assert in_child(work, uid=65534, gid=65534) == 0
    assert listing(root) == before


def test_a_repository_that_is_gone_or_another_one(tmp_path: Path) -> None:
    """'an unreachable or different repository is an error': never taken for an empty one."""
    shared, root = tmp_path / "store", tmp_path / "exp"
    Repository.init(shared)
    started(root, repository=str(shared)).close()
    shared.rename(tmp_path / "elsewhere")
    with pytest.raises(RepositoryNotFoundError, match="bring it back"):
        opened(root)
    Repository.init(shared)
    with pytest.raises(IntegrityError, match="there is another"):
        opened(root)
    shutil.rmtree(shared)
    (tmp_path / "elsewhere").rename(shared)
    opened(root).close()


def test_a_server_that_does_not_answer(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, store = str(tmp_path / "exp"), place("s3", request, tmp_path)
    Repository.init(store)
    started(root, repository=store).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(BackendError):
        opened(root)
