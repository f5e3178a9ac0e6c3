"""Save and load in one process: what is kept, what is read, what is refused."""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict,
    _load_state_dict_from_keys,
)
from typer.testing import CliRunner

from castore import (
    CorruptObjectError,
    InvalidInputError,
    LayoutError,
    Options,
    Repository,
    SnapshotNotFoundError,
    UntrustedPickleError,
)
from castore.check import check
from castore.cli import app
from castore.frame import DELTA
from castore.objects import object_name
from castore.prune import prune
from castore.testing.drivers import DriverTests
from castore.testing.faulty import FaultyBackend
from castore_dcp import CastoreReader, CastoreWriter, DcpDriver
from tests.drivers.dcp.states import BIG, blank, model, odd, shown, trained
from tests.helpers import draft, flip_object, headers, with_backend

Place = tuple[str, dict[str, Any] | None]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """torch says on each call that there is one process only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ", category=UserWarning)
        yield


def cause(error: CheckpointException) -> BaseException:
    """The one rank's own error."""
    found: BaseException = error.failures[0][0]
    return found


def stored(repository: Repository) -> int:
    """Bytes of all objects."""
    return sum(s.size for s in repository.store.list())


def test_everything_comes_back_to_the_bit(place: Place) -> None:
    state, url, options = odd(), place[0], place[1]
    writer = CastoreWriter(url, "train", storage_options=options)
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    again = blank(state)
    reader = CastoreReader(url, "train", storage_options=options)
    dcp.load(again, checkpoint_id="step-1", storage_reader=reader)
    assert shown(again) == shown(state)
    assert reader.snapshot == writer.snapshot is not None
    assert list(check(writer.repository, read_data=True, layout=True)) == []
    assert list(DcpDriver().verify(writer.repository, writer.snapshot)) == []


def test_a_model_and_its_optimizer_go_on_as_if_never_stopped(repository: Repository) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    trained(net, optimizer)
    dcp.save(
        {"model": net, "optimizer": optimizer},  # both Stateful
        checkpoint_id="1",
        storage_writer=CastoreWriter(repository, "t"),
    )
    other = model(seed=5)
    second = torch.optim.AdamW(other.parameters())
    trained(other, second)
    dcp.load({"model": other, "optimizer": second}, storage_reader=CastoreReader(repository, "t"))
    trained(net, optimizer, 2)
    trained(other, second, 2)
    assert shown(other.state_dict()) == shown(net.state_dict())
    assert shown(second.state_dict()) == shown(optimizer.state_dict())


def test_the_same_state_again_stores_nearly_nothing(repository: Repository) -> None:
    """Whether the writer lives on or is a new one."""
    state = {"w": torch.randn(20, BIG), "epoch": 1}
    writer = CastoreWriter(repository, "t")
    dcp.save(state, checkpoint_id="1", storage_writer=writer)
    first = stored(repository)
    dcp.save(state, checkpoint_id="2", storage_writer=writer)
    dcp.save(state, checkpoint_id="3", storage_writer=CastoreWriter(repository, "t"))
    assert first > 20 * BIG * 3
    assert stored(repository) == first  # the parts' and the wholes' trees are equal as well


@pytest.mark.parametrize("keep", [0, 1 << 30])
def test_a_step_of_training_is_stored_as_the_difference(repository: Repository, keep: int) -> None:
    state = {"w": torch.randn(8, BIG)}
    writer = CastoreWriter(repository, "t", keep_bytes=keep)
    dcp.save(state, checkpoint_id="1", storage_writer=writer)
    first = stored(repository)
    later = {"w": state["w"] * (1 + 1e-4 * torch.randn(8, BIG))}
    dcp.save(later, checkpoint_id="2", storage_writer=writer)
    assert stored(repository) - first < 0.75 * first
    alone = Repository.init(Path(repository.url).parent / "alone")
    unlike = CastoreWriter(alone, "t", previous=None, keep_bytes=0)
    dcp.save(later, storage_writer=unlike)
    assert stored(repository) - first < 0.8 * stored(alone)


def test_a_single_tensor_is_loaded_by_its_own_bytes(repository: Repository) -> None:
    state = {f"w{i}": torch.randn(BIG) for i in range(20)}
    state["b"] = torch.randn(5)
    writer = CastoreWriter(repository, "t")
    dcp.save(state, checkpoint_id="1", storage_writer=writer)
    counting = FaultyBackend(repository.backend)
    reader = CastoreReader(with_backend(repository, counting), "t")
    wanted = {"w7": torch.zeros(BIG)}
    dcp.load(wanted, storage_reader=reader)
    assert shown(wanted) == shown({"w7": state["w7"]})
    blobs = [c.name for c in counting.calls if c.name.startswith("objects/")]
    assert len(blobs) == 3  # the tree, dcp.json, and the tensor's one blob
    sizes = [repository.backend.stat(n).size for n in blobs]
    assert sum(sizes) < 2 * 4 * BIG


def test_small_values_are_read_once_together(repository: Repository) -> None:
    """300 biases and settings lie in one blob, between tensors that have their own."""
    state: dict[str, Any] = {}
    for i in range(100):
        state |= {f"b{i}": torch.randn(7), f"s{i}": i, f"h{i}": torch.randn(9).half()}
        state |= {f"w{i}": torch.randn(BIG)} if i % 20 == 0 else {}
    dcp.save(state, checkpoint_id="1", storage_writer=CastoreWriter(repository, "t"))
    counting = FaultyBackend(repository.backend)
    again = blank(state)
    dcp.load(again, storage_reader=CastoreReader(with_backend(repository, counting), "t"))
    assert shown(again) == shown(state)
    blobs = [c.name for c in counting.calls if c.name.startswith("objects/")]
    assert 2 + 5 < len(blobs) <= 2 + 5 + 3


def test_files_are_bounded_and_values_after_tensors(repository: Repository) -> None:
    state = {"n": "x" * 100, **{f"w{i}": torch.randn(BIG) for i in range(5)}}
    writer = CastoreWriter(repository, "t", file_bytes=2 * 4 * BIG)
    dcp.save(state, checkpoint_id="1", storage_writer=writer)
    assert writer.snapshot is not None
    files = dict(repository.tree(writer.snapshot).files())
    assert sorted(files) == ["dcp.json", *(f"rank_00000/00{i}.safetensors" for i in range(3))]
    assert max(f.size for f in files.values()) < 2 * 4 * BIG + 2000
    again = blank(state)
    dcp.load(again, storage_reader=CastoreReader(repository, "t"))
    assert shown(again) == shown(state)


def test_files_open_with_safetensors(repository: Repository, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = {"w": torch.randn(3, 4), "f8": torch.ones(3).to(torch.float8_e5m2), "n": 3}
    writer = CastoreWriter(repository, "t")
    dcp.save(state, storage_writer=writer)
    assert writer.snapshot is not None
    repository.checkout(writer.snapshot, tmp_path / "out")
    found = load_file(tmp_path / "out/rank_00000/000.safetensors")
    assert shown(found["w"]) == shown(state["w"])
    assert found["f8"].dtype == torch.float8_e5m2


def test_keys_and_whole_states_load_without_a_template(repository: Repository) -> None:
    """As torch's conversion to one file does: an empty state dict and its own planner."""
    state = odd()
    dcp.save(state, checkpoint_id="1", storage_writer=CastoreWriter(repository, "t"))
    some = _load_state_dict_from_keys({"model"}, storage_reader=CastoreReader(repository, "t"))
    assert shown(some) == {"model": shown(state["model"])}
    whole: dict[str, Any] = {}
    _load_state_dict(
        whole,
        CastoreReader(repository, "t"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert shown(whole) == shown(state)
    assert list(whole) == list(state)  # the order of the state dict is kept


def test_async_save_on_a_thread(place: Place) -> None:
    writer = CastoreWriter(place[0], "t", storage_options=place[1])
    state = {"w": torch.randn(BIG), "n": 1}
    expected = shown(state)
    done = dcp.async_save(state, checkpoint_id="step-1", storage_writer=writer)
    state["w"].zero_()  # the stage holds what was given
    assert not isinstance(done, dcp.state_dict_saver.AsyncSaveResponse)
    done.result()
    again = blank(state)
    dcp.load(again, storage_reader=CastoreReader(place[0], "t", step=1, storage_options=place[1]))
    assert shown(again) == expected


def test_kept_bytes_are_not_the_callers(repository: Repository) -> None:
    """The state is trained on in place between two saves."""
    writer = CastoreWriter(repository, "t")
    state = {"w": torch.randn(BIG)}
    dcp.save(state, checkpoint_id="1", storage_writer=writer)
    first = shown(state)
    state["w"] += 1
    dcp.save(state, checkpoint_id="2", storage_writer=writer)
    again = blank(state)
    dcp.load(again, checkpoint_id="1", storage_reader=CastoreReader(repository, "t"))
    assert shown(again) == first
    assert list(check(repository, read_data=True)) == []


# -- which checkpoint


def test_steps_names_and_snapshots_are_found(repository: Repository) -> None:
    made = {}
    for i, at in enumerate(["step-1", "best", "step-2", "step-1"]):
        writer = CastoreWriter(repository, "t", labels={"who": "me"})
        dcp.save({"n": torch.tensor(i)}, checkpoint_id=at, storage_writer=writer)
        made[i] = writer.snapshot

    def loaded(reader: CastoreReader, at: str | None = None) -> int:
        state = {"n": torch.tensor(-1)}
        dcp.load(state, checkpoint_id=at, storage_reader=reader)
        return int(state["n"])

    assert loaded(CastoreReader(repository, "t")) == 3
    assert loaded(CastoreReader(repository, "t"), "best") == 1
    assert loaded(CastoreReader(repository, "t"), "2") == 2
    assert loaded(CastoreReader(repository, "t", step=1)) == 3  # the newest of that step
    assert loaded(CastoreReader(repository, "t", step=1), "2") == 2
    assert made[0] is not None
    assert loaded(CastoreReader(repository, "t", made[0].id)) == 0
    assert made[1] is not None
    assert repository.snapshot(made[1]).labels == {"who": "me", "checkpoint": "best"}
    assert made[2] is not None
    assert made[2].key == "step.2"


@pytest.mark.parametrize("reader", [{"step": 9}, {"snapshot": "abcd"}, {"namespace": "none"}])
def test_a_checkpoint_that_is_not_there_is_named(
    repository: Repository, reader: dict[str, Any]
) -> None:
    dcp.save({"n": 1}, checkpoint_id="1", storage_writer=CastoreWriter(repository, "t"))
    where = CastoreReader(repository, **{"namespace": "t", **reader})
    with pytest.raises(SnapshotNotFoundError, match=r"step 9.*newest: 1|abcd|none"):
        where.read_metadata()
    with pytest.raises(CheckpointException, match="SnapshotNotFound|holds no|names 0"):
        dcp.load({"n": 0}, storage_reader=where)


def test_what_else_is_committed_does_not_hide_the_latest_checkpoint(
    repository: Repository,
) -> None:
    writer, state = CastoreWriter(repository, "t", keep_bytes=0), {"n": torch.randn(30_000)}
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    repository.commit(draft({"notes": b"1"}), namespace="t")
    loaded = {"n": torch.zeros(30_000)}
    dcp.load(loaded, storage_reader=CastoreReader(repository, "t"))
    assert torch.equal(loaded["n"], state["n"])
    before = {h for h, header in headers(repository).items() if header.codec == DELTA}
    dcp.save({"n": state["n"] * 1.0001}, checkpoint_id="step-2", storage_writer=writer)
    deltas = {h for h, header in headers(repository).items() if header.codec == DELTA}
    assert len(deltas - before) == 1  # to step 1, not to the notes


def test_another_kind_of_snapshot_is_refused(repository: Repository) -> None:
    repository.commit(draft({"a": b"1"}), namespace="t")
    with pytest.raises(LayoutError, match=r"dcp\.json"):
        CastoreReader(repository, "t").read_metadata()


@pytest.mark.parametrize(
    "how",
    [
        {"labels": {"a": 1}},
        {"namespace": "a/b"},
        {"step": -1},
        {"storage_options": {"key": "x"}},
    ],
)
def test_a_writer_that_cannot_write_is_refused_when_made(
    repository: Repository, how: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInputError):
        CastoreWriter(repository, **how)


def test_saves_without_collectives_are_refused(repository: Repository) -> None:
    writer = CastoreWriter(repository)
    with pytest.raises(InvalidInputError, match="use_collectives"):
        dcp.save({"n": 1}, storage_writer=writer, use_collectives=False)
    assert list(repository.snapshots()) == []


def test_plans_may_be_cached(repository: Repository) -> None:
    """torch then hands the writer the plan of an earlier save; labels are of this one."""
    writer = CastoreWriter(repository, "t")
    for step in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": torch.full((5,), float(step))}
        dcp.save(state, checkpoint_id=str(step), storage_writer=writer, planner=planner)
    for step in range(3):
        again = {"w": torch.zeros(5)}
        dcp.load(again, storage_reader=CastoreReader(repository, "t", step=step))
        assert again["w"].tolist() == [step] * 5


# -- what may not be saved or loaded


class Odd:
    """No plain value."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


def test_a_value_that_needs_unpickling_is_refused_when_saved(repository: Repository) -> None:
    with pytest.raises(CheckpointException) as e:
        dcp.save({"a": {"odd": Odd()}}, storage_writer=CastoreWriter(repository))
    assert isinstance(cause(e.value), UntrustedPickleError)
    assert "'a.odd'" in str(cause(e.value))
    assert list(repository.snapshots()) == []


def test_a_value_that_needs_unpickling_is_refused_when_loaded(repository: Repository) -> None:
    writer = CastoreWriter(repository, trust_pickles=True)
    dcp.save({"odd": Odd(), "n": 3}, storage_writer=writer)
    with pytest.raises(CheckpointException) as e:
        dcp.load({"odd": None}, storage_reader=CastoreReader(repository))
    assert isinstance(cause(e.value), UntrustedPickleError)
    some: dict[str, Any] = {"n": 0}
    dcp.load(some, storage_reader=CastoreReader(repository))  # the others are not looked at
    assert some == {"n": 3}
    trusted: dict[str, Any] = {"odd": None}
    dcp.load(trusted, storage_reader=CastoreReader(repository, trust_pickles=True))
    assert trusted == {"odd": Odd()}


def test_a_class_the_process_allows_is_let_through(repository: Repository) -> None:
    state = {"o": OrderedDict(a=1), "odd": Odd()}
    with torch.serialization.safe_globals([Odd]):
        dcp.save(state, storage_writer=CastoreWriter(repository))
        again: dict[str, Any] = {"o": OrderedDict(a=0), "odd": None}
        dcp.load(again, storage_reader=CastoreReader(repository))
    assert again == state


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
    ],
    ids=["sparse", "meta"],
)
def test_a_tensor_that_is_not_plain_is_refused_by_name(
    repository: Repository, tensor: torch.Tensor
) -> None:
    with pytest.raises(CheckpointException) as e:
        dcp.save({"good": torch.ones(3), "bad": tensor}, storage_writer=CastoreWriter(repository))
    assert isinstance(cause(e.value), InvalidInputError)
    assert "'bad'" in str(cause(e.value))
    assert list(repository.snapshots()) == []


def test_a_damaged_blob_never_reaches_a_tensor(repository: Repository) -> None:
    writer = CastoreWriter(repository, "t", options=Options(compression="none"))
    state = {"w": torch.randn(BIG), "other": torch.randn(BIG)}
    dcp.save(state, storage_writer=writer)
    assert writer.snapshot is not None
    tree = repository.tree(writer.snapshot)
    largest = max(tree.blob_lengths().items(), key=lambda b: b[1])[0]
    flip_object(repository, largest, 5000)
    again = blank(state)
    with pytest.raises(CheckpointException) as e:
        dcp.load(again, storage_reader=CastoreReader(repository, "t"))
    assert isinstance(cause(e.value), CorruptObjectError)
    assert any(not t.any() for t in again.values())
    assert list(DcpDriver().verify(repository, writer.snapshot))


def test_a_description_that_puts_elements_unaligned_is_read_all_the_same(
    repository: Repository,
) -> None:
    """torch ends the process where it copies complex128 from an unaligned address."""
    from castore import Draft, MemoryFile
    from castore_dcp.layout import Chunk, Item, Layout, TensorEntry

    values = torch.randn(50, dtype=torch.complex128)
    entry = TensorEntry("complex128", (50,), (Chunk((0,), (50,)),))
    layout = Layout({"z": entry}, (Item("z", (0,), 0, "f", 3, 803),), {"z": ("z",)})
    entries = {
        "dcp.json": MemoryFile(layout.encode()),
        "f": MemoryFile(bytes(3) + shown(values)[2]),
    }
    repository.commit(Draft(entries, "dcp"), namespace="t")
    again = {"z": torch.zeros(50, dtype=torch.complex128)}
    dcp.load(again, storage_reader=CastoreReader(repository, "t"))
    assert shown(again["z"]) == shown(values)


def test_a_file_shorter_than_its_description_is_refused(repository: Repository) -> None:
    from castore import Draft, MemoryFile
    from castore_dcp.layout import Chunk, Item, Layout, TensorEntry

    entry = TensorEntry("float32", (50,), (Chunk((0,), (50,)),))
    layout = Layout({"z": entry}, (Item("z", (0,), 0, "f", 0, 200),))
    entries = {"dcp.json": MemoryFile(layout.encode()), "f": MemoryFile(bytes(100))}
    name = repository.commit(Draft(entries, "dcp"), namespace="t").name
    with pytest.raises(CheckpointException) as e:
        dcp.load({"z": torch.zeros(50)}, storage_reader=CastoreReader(repository, "t"))
    assert isinstance(cause(e.value), LayoutError)
    assert list(DcpDriver().verify(repository, name))


# -- parts


class Between(CastoreWriter):
    """Does something when all ranks have written and nothing is committed yet."""

    def finish(self, metadata: Any, results: Any) -> None:
        self.between()  # type: ignore[attr-defined]
        super().finish(metadata, results)


def test_ranks_with_one_number_are_refused(repository: Repository) -> None:
    """A class around the writer that drops the keywords would lose all but one rank's file."""
    writers = [CastoreWriter(repository, "t") for _ in range(2)]
    results, metadata = [], None
    for i, writer in enumerate(writers):
        planner = DefaultSavePlanner()
        planner.set_up_planner({f"w{i}": torch.ones(3)}, is_coordinator=True)
        writer.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        results.append(writer.write_data(planner.finish_plan(plans[0]), planner).wait())
    assert metadata is not None
    with pytest.raises(InvalidInputError, match="two ranks wrote files of one name"):
        writers[0].finish(metadata, results)
    assert list(repository.snapshots("t")) == []


def test_a_prune_between_the_parts_and_the_whole_takes_nothing(repository: Repository) -> None:
    state = {"w": torch.randn(BIG)}
    writer = Between(repository, "t")
    kept = CastoreWriter(repository, "gone")
    dcp.save(state, storage_writer=kept)  # the blobs are old, and soon nobody's but the parts'
    assert kept.snapshot is not None
    repository.forget(kept.snapshot)
    seen: list[str] = []

    def between() -> None:
        seen.extend(n.namespace for n in repository.snapshots())
        prune(repository, grace=0)

    writer.between = between  # type: ignore[attr-defined]
    dcp.save(state, storage_writer=writer)
    assert seen == ["t.parts"]
    assert [n.namespace for n in repository.snapshots()] == ["t"]
    prune(repository, grace=0)
    assert list(repository.forgotten()) == []
    again = blank(state)
    dcp.load(again, storage_reader=CastoreReader(repository, "t"))
    assert shown(again) == shown(state)
    assert list(check(repository, read_data=True)) == []


def test_parts_that_are_gone_are_an_error_and_no_checkpoint(repository: Repository) -> None:
    writer = Between(repository, "t")

    def between() -> None:
        for name in list(repository.snapshots()):
            repository.forget(name)
        prune(repository, grace=0)

    writer.between = between  # type: ignore[attr-defined]
    with pytest.raises(CheckpointException, match="ObjectNotFound|missing"):
        dcp.save({"w": torch.randn(BIG)}, storage_writer=writer)
    assert list(repository.snapshots()) == []


def test_abandoned_parts_are_forgotten_by_a_later_save(repository: Repository) -> None:
    class Dies(CastoreWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(CheckpointException):
        dcp.save({"w": torch.randn(BIG)}, storage_writer=Dies(repository, "t"))
    assert [n.namespace for n in repository.snapshots()] == ["t.parts"]
    dcp.save({"n": 1}, storage_writer=CastoreWriter(repository, "t"))
    assert {n.namespace for n in repository.snapshots()} == {"t", "t.parts"}  # may be under way
    dcp.save({"n": 1}, storage_writer=CastoreWriter(repository, "t", abandoned_after=0))
    assert {n.namespace for n in repository.snapshots()} == {"t"}


def test_a_damaged_previous_checkpoint_does_not_stop_a_save(repository: Repository) -> None:
    state = {"w": torch.randn(BIG)}
    writer = CastoreWriter(repository, "t", keep_bytes=0)
    dcp.save(state, checkpoint_id="1", storage_writer=writer)
    assert writer.snapshot is not None
    repository.backend.delete(object_name(repository.snapshot(writer.snapshot).tree))
    later = {"w": state["w"] + 1}
    dcp.save(later, checkpoint_id="2", storage_writer=writer)
    again = blank(state)
    dcp.load(again, storage_reader=CastoreReader(repository, "t"))
    assert shown(again) == shown(later)


def test_ranks_that_found_different_latest_load_the_coordinators(repository: Repository) -> None:
    """A save ended between two ranks' looks: never a mixture."""
    writer = CastoreWriter(repository, "t")
    first, second = ({"w": torch.full((BIG,), float(i))} for i in (1, 2))
    dcp.save(first, storage_writer=writer)
    coordinator, other = CastoreReader(repository, "t"), CastoreReader(repository, "t")
    plans, planners, targets = [], [], []
    for reader in (coordinator, other):
        planner, target = DefaultLoadPlanner(), blank(first)
        planner.set_up_planner(target, reader.read_metadata(), reader is coordinator)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
        planners.append(planner)
        targets.append(target)
        dcp.save(second, storage_writer=writer)
    assert plans[0].storage_data != plans[1].storage_data
    planned = coordinator.prepare_global_plan(plans)
    for reader, plan, planner in zip((coordinator, other), planned, planners, strict=True):
        reader.read_data(plan, planner)
    assert [shown(t) for t in targets] == [shown(first)] * 2
    assert other.snapshot == coordinator.snapshot
    dcp.save({"w": torch.zeros(3)}, storage_writer=writer)
    late = CastoreReader(repository, "t")
    late.read_metadata()
    plans[1] = late.prepare_local_plan(plans[1])
    with pytest.raises(InvalidInputError, match="laid out differently"):
        coordinator.prepare_global_plan(plans)


def test_a_writer_pickles_without_what_it_keeps(repository: Repository) -> None:
    writer = CastoreWriter(repository, "t")
    dcp.save({"w": torch.randn(BIG)}, storage_writer=writer)
    data = pickle.dumps(writer)
    assert len(data) < 5000
    again = pickle.loads(data)
    dcp.save({"n": 2}, storage_writer=again)
    assert len(list(repository.snapshots("t"))) == 2


# -- the driver and its command


class TestDcpDriver(DriverTests):
    driver = DcpDriver()

    def lay(self, root: Path) -> None:
        store = Repository.init(root.parent / "made")
        writer = CastoreWriter(store)
        dcp.save({"w": torch.randn(BIG), "n": 1}, storage_writer=writer)
        assert writer.snapshot is not None
        store.checkout(writer.snapshot, root, force=True)


def test_the_command_lists_what_a_checkpoint_holds(repository: Repository) -> None:
    state = {"w": torch.ones(3, 4, dtype=torch.bfloat16), "n": 1}
    dcp.save(state, checkpoint_id="7", storage_writer=CastoreWriter(repository, "t"))
    command = ["dcp", "show", "-r", repository.url, "-n", "t", "-c", "step-7"]
    shown_ = CliRunner().invoke(app, command)
    assert shown_.exit_code == 0
    assert "bfloat16" in shown_.output and "[3, 4]" in shown_.output
