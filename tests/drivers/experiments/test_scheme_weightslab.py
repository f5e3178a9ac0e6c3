"""Scheme weightslab-2 gives the values that the public tool gives."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pandas as pd
import pytest
from torch import nn

from castore import InvalidInputError
from castore_experiments import weightslab
from castore_experiments.samples import DataState


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.train_dataset_tracker = nn.Identity()


def test_values_of_version_2_0_3() -> None:
    """Values that a run of the tool gave."""
    config = {"lr": 0.1, "opt": {"name": "adam", "betas": [0.9, 0.999]}}
    assert weightslab.hp_digest(config)[:8] == "8fb88986"
    assert weightslab.hp_digest({})[:8] == "92eee20f"
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert weightslab.model_digest(model, 0)[:8] == "b5a79a78"
    state = DataState.from_any({"discarded": {"a": False, "b": True}, "tag": {"a": ["x", "w"]}})
    assert weightslab.data_digest(state, tags=True)[:8] == "c0d16d4f"
    assert weightslab.data_digest(DataState.from_any({}))[:8] == "e3b0c442"


# Configurations and samples of the roots that a run of version 2.0.3 wrote, and their segments.
CONFIG: dict[str, Any] = {
    "checkpoint_manager": {"dump_model_architecture": False},
    "data": {"train_loader": {"batch_size": 4, "shuffle": True}},
    "device": "cpu",
    "experiment_dump_to_train_steps_ratio": 2,
    "experiment_name": "fixture",
    "flag": True,
    "ledger_enable_flushing_threads": False,
    "ledger_enable_h5_persistence": True,
    "notes": "h\xe9llo",
    "nothing": None,
    "optimizer": {"betas": [0.9, 0.999], "lr": 0.01},
    "root_log_dir": "/data/weightslab/single",
    "serving_cli": False,
    "serving_grpc": False,
    "skip_checkpoint_load": False,
}


def test_segments_of_a_real_root() -> None:
    assert weightslab.hp_digest(CONFIG)[:8] == "bccaa279"
    ids = [str(i) for i in range(24)]
    table = pd.DataFrame({"sample_id": ids, "annotation_id": 0, "discarded": False})
    assert weightslab.data_digest(DataState.from_any(table))[:8] == "5637b652"
    table["discarded"] = table["sample_id"].isin(["3", "7"])
    table["tag:hard"] = table["sample_id"].isin(["1", "2", "5"])
    state = DataState.from_any(table)
    assert weightslab.data_digest(state)[:8] == "448e10ce", "there tags of a frame never count"
    assert weightslab.data_digest(state, tags=True)[:8] != "448e10ce"


def test_what_counts_there() -> None:
    base = weightslab.hp_digest({"lr": 1})
    switches = {"lr": 1, "is_training": 1, "pause_at_step": 2, "experiment_name": "n"}
    assert (
        weightslab.hp_digest(switches)
        == base
        == weightslab.hp_digest({"lr": 1, "auditor_mode": False})
    )
    assert weightslab.hp_digest({"lr": 1, "root_log_dir": "a"}) != base
    assert weightslab.hp_digest({"lr": "1"}) != base
    model, inner = SmallNet(), SmallNet()

    class Holder:
        model = inner

    assert weightslab.model_digest(model) == weightslab.model_digest(Holder())
    assert weightslab.model_digest(model, 6) != weightslab.model_digest(model)
    before = weightslab.model_digest(model)
    model.fc1 = nn.Linear(4, 9)
    assert weightslab.model_digest(model) == before, "sizes do not count there"
    model.train_dataset_tracker = nn.ReLU()  # type: ignore[assignment]
    assert weightslab.model_digest(model) == before
    model.fc1.in_neurons, model.fc1.out_neurons = 4, 9  # type: ignore[assignment]
    assert weightslab.model_digest(model) != before


def test_no_address_and_no_constant() -> None:
    """HC4: where that tool's value is an address or a constant, ours is an error."""
    config: Any
    for config in ({"a": object()}, {"a": lambda: 0}, {1: "a", "b": 2}):
        with pytest.raises(InvalidInputError, match="scheme weightslab-2 has no value"):
            weightslab.hp_digest(config)
    with pytest.raises(InvalidInputError, match="model"):
        weightslab.model_digest(3)


PROGRAM = """
from castore_experiments.weightslab import hp_digest
print(hp_digest({"a": {"x", "y", "z"}, "b": frozenset("pqr"), "c": set()}))
"""


def test_sets_in_every_process() -> None:
    found = set()
    for seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1
    assert weightslab.hp_digest({"a": {"x"}}) == weightslab.hp_digest({"a": "{'x'}"})
