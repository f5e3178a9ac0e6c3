"""Run by the public tool's own interpreter: opens a root and tells, as JSON, what it resumed.

python public_tool.py ROOT ANSWER.json training|fixture [STEP]

With STEP it saves weights of ones under that step, after it told.
"""

from __future__ import annotations

import os

# Before its import: no messages home, no downloads, no certificates.
os.environ.update(
    WL_NO_TELEMETRY="1",
    WEIGHTSLAB_OPENCODE_AUTOINSTALL="0",
    WEIGHTSLAB_SKIP_SECURE_INIT="true",
    GRPC_TLS_ENABLED="false",
    WL_ENABLE_HP_SYNC="0",
)

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from weightslab.backend import ledgers
from weightslab.backend.logger import LoggerQueue
from weightslab.components.checkpoint_manager import CheckpointManager
from weightslab.data.dataframe_manager import LedgeredDataFrameManager

SAMPLES = 24


class Net(torch.nn.Module):
    """As the training that wrote the root has it; other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.drop = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(8, 2)
        self.register_buffer("count", torch.zeros(()))


class TinyNet(torch.nn.Module):
    """As the training that wrote the fixture has it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(8, 16)
        self.bn = torch.nn.BatchNorm1d(16)
        self.drop = torch.nn.Dropout(0.2)
        self.fc2 = torch.nn.Linear(16, 3)


def digest(tensor: torch.Tensor) -> str:
    head = f"{tensor.dtype}|{tuple(tensor.shape)}|".encode()
    return hashlib.sha256(head + tensor.contiguous().numpy().tobytes()).hexdigest()


def digests(state: dict[str, Any]) -> dict[str, str]:
    return {k: digest(v) for k, v in state.items() if isinstance(v, torch.Tensor)}


def main(root: str, answer: str, model: str, step: str = "") -> None:
    torch.manual_seed(77)
    net: torch.nn.Module = Net() if model == "training" else TinyNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    frame = LedgeredDataFrameManager(enable_flushing_threads=False)
    ledgers.register_dataframe(frame)
    frame.upsert_df(table("s" if model == "training" else ""))
    logger = LoggerQueue()
    ledgers.register_model(net)
    ledgers.register_optimizer(optimizer)
    manager = CheckpointManager(root, load_config=True)
    randoms = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    view = frame.get_df_view().reset_index()
    latest = manager.get_latest_hash()
    found = {
        "current": manager.current_exp_hash,
        "latest": latest,
        "errors": manager.error_loading_checkpoint,
        "hashes": [h["hash"] for h in manager.get_all_hashes()],
        "runs": {
            r["hash"]: [r["experiment_name"], r["notes"], r["latest_weight_step"], r["is_current"]]
            for r in manager.list_runs()
        },
        "weights": digests(net.state_dict()),
        "optimizer": digests(optimizer.state_dict()["state"].get(0, {})),
        "step": [int(ledgers.get_model().current_step), manager._model_init_step],
        "config": json.loads(json.dumps(dict(ledgers.get_hyperparams()), default=resolved)),
        "randoms": randoms,
        "discarded": marked(view, "discarded"),
        "hard": marked(view, "tag:hard") if "tag:hard" in view else None,
        "signals": curves(logger),
        "per_sample": samples(logger),
        "states": {h["hash"]: state(manager, h["hash"]) for h in manager.get_all_hashes()},
    }
    Path(answer).write_text(json.dumps(found, default=str))
    if step:
        for parameter in net.parameters():
            torch.nn.init.ones_(parameter)
        logger.chkpt_manager = manager
        logger.add_scalars("loss", {"loss": 0.125}, int(step), {}, aggregate_by_step=False)
        saved = manager.save_model_checkpoint(step=int(step))
        manager.flush_logger_to_disk()
        print(saved)
    os._exit(0)  # its threads would keep the interpreter


def table(prefix: str) -> pd.DataFrame:
    ids = [f"{prefix}{i}" for i in range(SAMPLES)]
    rows = pd.DataFrame({"sample_id": ids, "annotation_id": 0, "discarded": False})
    return rows.set_index(["sample_id", "annotation_id"])


def resolved(value: Any) -> Any:
    """What stands behind one of that tool's proxies of a value."""
    return value._resolve()


def marked(view: pd.DataFrame, column: str) -> list[str]:
    return sorted(view["sample_id"][view[column].fillna(False).astype(bool)].astype(str))


def curves(logger: LoggerQueue) -> list[dict[str, Any]]:
    """Every point as its own query gives it."""
    history = logger.get_signal_history(max_points=None)
    return [
        {"metric": metric, "hash": hash, "step": int(step), "value": point["metric_value"]}
        for metric, by_hash in history.items()
        for hash, by_step in by_hash.items()
        for step, points in by_step.items()
        for point in points
    ]


def samples(logger: LoggerQueue) -> list[list[Any]]:
    history = logger.get_signal_history_per_sample()
    return [
        [metric, hash, p["sample_id"], p["model_age"], p["metric_value"]]
        for metric, by_hash in history.items()
        for hash, points in by_hash.items()
        for p in points
    ]


def state(manager: CheckpointManager, hash: str) -> dict[str, Any]:
    """What it reads of one hash, at every step it is asked for."""
    found = manager.load_checkpoint(hash, load_config=True, force=True)
    steps = {}
    for target in (0, 3, 4, 5, 10**6):
        weights = manager.load_checkpoint(hash, target_step=target, force=True)["weights"]
        steps[target] = weights["step"] if weights else None
    weights, data = found["weights"], found["data_state"]
    return {
        "components": sorted(found["loaded_components"]),
        "weights": digests(weights["model_state_dict"]),
        "config": found["config"],
        "rows": len(data["snapshot"]) if data else 0,
        "loaders": found.get("dataloader_iteration_state"),
        "steps": steps,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
