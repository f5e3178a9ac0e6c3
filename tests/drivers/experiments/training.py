"""A small training with everything that a manager watches, for the tests of the manager."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch.utils.data import DataLoader, TensorDataset

from castore_experiments import CheckpointManager

SAMPLES = 24


class Net(torch.nn.Module):
    """Two layers with dropout and a buffer."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.first = torch.nn.Linear(4, width)
        self.drop = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(width, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        out: torch.Tensor = self.last(self.drop(torch.relu(self.first(x))))
        return out


class Indexed(torch.utils.data.Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Samples that tell their number."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(7)
        self.inner = TensorDataset(
            torch.randn(SAMPLES, 4, generator=made), torch.randint(0, 2, (SAMPLES,), generator=made)
        )

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        x, y = self.inner[i]
        return i, x, y


def samples() -> pd.DataFrame:
    """The data state: ids, discards, two tags."""
    return pd.DataFrame(
        {
            "sample_id": [f"s{i}" for i in range(SAMPLES)],
            "discarded": False,
            "tag:hard": False,
            "tag:odd": [i % 2 == 1 for i in range(SAMPLES)],
        }
    )


def config() -> dict[str, Any]:
    return {"lr": 1e-2, "betas": (0.9, 0.99), "layers": [8, 2], "experiment_name": "first"}


@dataclass
class Training:
    """Model, optimizer, scheduler, loader, configuration and data, and what was seen."""

    width: int = 8
    seed: int = 0
    workers: int = 0
    optimizer: str = "adamw"
    seen: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.net = Net(self.width)
        if self.optimizer == "adamw":
            self.opt: Any = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        else:
            self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-2, momentum=0.9)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 5, 0.5)
        self.loader: Any = DataLoader(
            Indexed(), batch_size=4, shuffle=True, num_workers=self.workers
        )
        self.config, self.data = config(), samples()
        self.step = 0

    def watch(self, manager: CheckpointManager, **more: Any) -> None:
        manager.watch(
            model=self.net,
            optimizer=self.opt,
            scheduler=self.sched,
            hyperparameters=self.config,
            data=self.data,
            dataloaders={"train": self.loader},
            **more,
        )

    def train(self, to: int, manager: CheckpointManager | None = None, save: int = 0) -> None:
        """Step until ``to``; saves every ``save`` steps, from within the loop."""
        while self.step < to:
            for ids, x, y in self.loader:
                self.opt.zero_grad()
                loss = torch.nn.functional.cross_entropy(self.net(x), y)
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.step += 1
                self.seen += ids.tolist()
                self.losses.append(loss.item())
                if manager is not None:
                    manager.log("loss", loss.item(), self.step)
                    if save and self.step % save == 0:
                        manager.save_model_checkpoint(step=self.step)
                if self.step == to:
                    break

    def weights(self) -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in self.net.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
