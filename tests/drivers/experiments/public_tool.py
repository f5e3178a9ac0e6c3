"""Run by the public tool's own interpreter: opens a root and tells, as JSON, what it resumed.

python public_tool.py ROOT ANSWER.json
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


def digest(tensor: torch.Tensor) -> str:
    head = f"{tensor.dtype}|{tuple(tensor.shape)}|".encode()
    return hashlib.sha256(head + tensor.contiguous().numpy().tobytes()).hexdigest()


def digests(state: dict[str, Any]) -> dict[str, str]:
    return {k: digest(v) for k, v in state.items() if isinstance(v, torch.Tensor)}


def main(root: str, answer: str) -> None:
    torch.manual_seed(77)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    frame = LedgeredDataFrameManager(enable_flushing_threads=False)
    ledgers.register_dataframe(frame)
    frame.upsert_df(table())
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
        "hashes": manager.get_all_hashes(),
        "runs": {
            r["hash"]: [r["experiment_name"], r["notes"], r["latest_weight_step"], r["is_current"]]
            for r in manager.list_runs()
        },
        "weights": digests(net.state_dict()),
        "optimizer": digests(optimizer.state_dict()["state"][0]),
        "step": getattr(net, "current_step", None),
        "config": dict(ledgers.get_hyperparams()),
        "randoms": randoms,
        "discarded": marked(view, "discarded"),
        "hard": marked(view, "tag:hard") if "tag:hard" in view else None,
        "signals": curves(logger),
        "per_sample": logger.get_signal_history_per_sample(),
        "states": {h: state(manager, h) for h in hashes_of(manager)},
    }
    Path(answer).write_text(json.dumps(found, default=str))
    os._exit(0)  # its threads would keep the interpreter


def table() -> pd.DataFrame:
    ids = [f"s{i}" for i in range(SAMPLES)]
    rows = pd.DataFrame({"sample_id": ids, "annotation_id": 0, "discarded": False})
    return rows.set_index(["sample_id", "annotation_id"])


def marked(view: pd.DataFrame, column: str) -> list[str]:
    return sorted(view["sample_id"][view[column].fillna(False).astype(bool)].astype(str))


def curves(logger: LoggerQueue) -> dict[str, Any]:
    history = logger.get_signal_history(max_points=None)
    return {"rows": [str(r) for r in history]} if isinstance(history, list) else history


def hashes_of(manager: CheckpointManager) -> list[str]:
    return list(manager._load_manifest()["experiments"])


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
    main(sys.argv[1], sys.argv[2])
