"""The root that version 2.0.3 of the public tool wrote, and what is known of its content."""

from __future__ import annotations

import hashlib
import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from castore_experiments.files import Files, open_files

FOLDER = Path(__file__).parent / "fixtures" / "weightslab"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "single.expected.json").read_text())
ROOT: dict[str, Any] = EXPECTED["roots"]["."]
HASHES: dict[str, Any] = ROOT["hashes"]
LATEST = "fb69bfcd39ada4095637b652"


def members() -> Iterator[tuple[str, bytes]]:
    """Every file of the root: name relative to it, and bytes."""
    with tarfile.open(FOLDER / "single.tar.xz") as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name.removeprefix("single/"), file.read()


def lay(root: str, leave_out: frozenset[str] = frozenset()) -> Files:
    """Put the root at a path or URL where nothing is."""
    files = open_files(root)
    for name, data in members():
        if name not in leave_out:
            files.create(name, data)
    return files


def state_of(files: Files) -> dict[str, tuple[int, str, str]]:
    """Size, version and digest of every file: nothing touched one if this stays equal."""
    return {
        s.name: (s.size, s.version, hashlib.sha256(files.get(s.name)).hexdigest())
        for s in files.list("")
    }


def digests(files: Files) -> dict[str, str]:
    """SHA-256 of every file by name."""
    return {name: digest for name, (_, _, digest) in state_of(files).items()}


# -- digests, as the expectations were made


def tensor_digest(tensor: torch.Tensor) -> str:
    """Type, shape and values."""
    head = f"{tensor.dtype}|{tuple(tensor.shape)}|".encode()
    return hashlib.sha256(head + tensor.contiguous().numpy().tobytes()).hexdigest()


def tree_digest(value: object) -> str:
    """A nesting of mappings, lists, tensors and plain values."""
    if isinstance(value, torch.Tensor):
        return "T" + tensor_digest(value)
    if isinstance(value, dict):
        return "D" + _sha([[repr(k), tree_digest(v)] for k, v in value.items()])
    if isinstance(value, list | tuple):
        return "L" + _sha([tree_digest(v) for v in value])
    return "V" + repr(value)


def rows_digest(frame: pd.DataFrame) -> str:
    """Rows of the table per_sample, in any order."""
    columns = ["metric_name", "experiment_hash", "sample_id", "step", "value"]
    return _sha(sorted(frame[columns].astype(object).values.tolist()))


def _sha(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def next_randoms() -> list[list[float]]:
    two = range(2)
    python, numpy = [random.random() for _ in two], [float(np.random.rand()) for _ in two]
    return [python, numpy, [torch.rand(1).item() for _ in two]]


# -- the training that wrote it


class TinyNet(nn.Module):
    """Modules and shapes of the model that wrote the root."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.bn = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.drop(torch.relu(self.bn(self.fc1(x)))))
        return out


class Program:
    """What a program that goes on with the root watches.

    The configuration is not among it by default: its ``root_log_dir`` counts in that scheme, and
    the root of a test lies elsewhere.
    """

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.net = TinyNet()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=0.5)
        self.data = pd.DataFrame(
            {"sample_id": [str(i) for i in range(24)], "annotation_id": 0, "discarded": False}
        )
        data = TensorDataset(torch.randn(24, 8), torch.randint(0, 3, (24,)))
        self.loader: DataLoader[Any] = DataLoader(data, batch_size=6, shuffle=True)

    def watched(self) -> dict[str, Any]:
        return {
            "model": self.net,
            "optimizer": self.opt,
            "data": self.data,
            "dataloaders": {"train_loader": self.loader},
        }
