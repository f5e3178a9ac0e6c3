"""Several ranks, one snapshot: all of them or none, and any other number loads it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from castore import Repository
from castore.check import check
from castore_dcp import CastoreReader, CastoreWriter, DcpDriver
from tests.drivers.dcp import ranks, scenarios
from tests.drivers.dcp.states import shown

Place = tuple[str, dict[str, Any] | None]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is :UserWarning")


def value(answer: Any) -> Any:
    assert isinstance(answer, bytes), answer
    return shown(torch.load(io.BytesIO(answer), weights_only=True))


def whole(place: Place, step: int) -> Any:
    """A step loaded in this one process, without a template."""
    reader = CastoreReader(place[0], "train", step=step, storage_options=place[1])
    return shown(_load_state_dict_from_keys(storage_reader=reader))


def sound(repository: Repository) -> None:
    """Whole checkpoints only, undamaged, as described; no part is left."""
    assert {n.namespace for n in repository.snapshots()} <= {"train"}
    assert list(check(repository, read_data=True, layout=True)) == []
    for name in repository.snapshots("train"):
        assert list(DcpDriver().verify(repository, name)) == []


def test_four_ranks_save_one_snapshot(place: Place, tmp_path: Path) -> None:
    """FSDP2 with AdamW, DTensors, values; saved, trained and saved, saved on a thread."""
    repository = Repository.open(place[0], storage_options=place[1])
    answers = [value(a) for a in ranks.run(4, scenarios.save_all_ways, tmp_path, *place)]
    assert all(a == answers[0] for a in answers)
    assert [n.key for n in repository.snapshots("train")] == ["step.3", "step.2", "step.1"]
    files = dict(repository.tree("train@latest").files())
    assert sorted(files) == ["dcp.json", *(f"rank_{i:05d}/000.safetensors" for i in range(4))]
    assert whole(place, 3) == whole(place, 2) == answers[0] != whole(place, 1)
    sound(repository)


def test_other_numbers_of_ranks_load(tmp_path: Path) -> None:
    """2 ranks save, 1 loads and saves, 4 load that and save, 2 load that: the same all along."""
    url = str(tmp_path / "store")
    repository = Repository.init(url)
    first = ranks.run(2, scenarios.save_first, tmp_path, url)
    one = ranks.run(1, scenarios.load_and_save, tmp_path, url, None, 1, 2)
    four = ranks.run(4, scenarios.load_and_save, tmp_path, url, None, 2, 3)
    two = ranks.run(2, scenarios.load, tmp_path, url, None, 3)
    expected = value(first[0])
    assert [value(a) for a in [*one, *four, *two]] == [expected] * 7
    assert [whole((url, None), s) for s in (1, 2, 3)] == [expected] * 3
    sound(repository)


def test_saves_in_background_processes(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    repository = Repository.init(url)
    answers = ranks.run(2, scenarios.save_in_a_process, tmp_path, url, [1, 2])
    assert [n.key for n in repository.snapshots("train")] == ["step.2", "step.1"]
    assert [whole((url, None), s) for s in (1, 2)] == [value(answers[0])] * 2
    sound(repository)


def test_ranks_with_stores_of_their_own_are_told(tmp_path: Path) -> None:
    urls = [str(tmp_path / n) for n in "ab"]
    for url in urls:
        Repository.init(url)
    for answer in ranks.run(2, scenarios.save_apart, tmp_path, urls):
        assert isinstance(answer, ranks.Error)
        assert "another repository" in answer
    assert not [n for u in urls for n in Repository.open(u).snapshots("train")]


def test_what_one_rank_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    repository = Repository.init(url)
    for answer in ranks.run(2, scenarios.fail_on_one, tmp_path, url):
        assert isinstance(answer, ranks.Error)
        assert "of-1" in answer and "UntrustedPickle" in answer
    assert list(repository.snapshots("train")) == []


KILLS = [
    ("local", 1, "objects/"),
    ("local", 1, "snapshots/train.parts/"),
    ("local", 0, "snapshots/train/"),
    ("s3", 1, "objects/"),
]


@pytest.mark.parametrize(("place", "doomed", "moment"), KILLS, indirect=["place"])
def test_a_killed_rank_leaves_no_checkpoint(
    doomed: int, moment: str, place: Place, tmp_path: Path
) -> None:
    """The others end with an error, nothing is torn, and the next save works."""
    repository = Repository.open(place[0], storage_options=place[1])
    first = {"w": torch.ones(5)}
    writer = CastoreWriter(repository, "train", abandoned_after=-5)  # S3 tells whole seconds
    dcp.save(first, checkpoint_id="step-8", storage_writer=writer)
    answers = ranks.run(2, scenarios.save_and_die, tmp_path, *place, doomed, moment)
    assert answers[doomed] is None
    assert isinstance(answers[1 - doomed], ranks.Error)
    assert [n.key for n in repository.snapshots("train")] == ["step.8"]
    assert list(check(repository, read_data=True)) == []
    dcp.save(first, checkpoint_id="step-10", storage_writer=writer)
    assert [n.key for n in repository.snapshots("train")] == ["step.10", "step.8"]
    sound(repository)
    assert whole(place, 10) == shown(first)
