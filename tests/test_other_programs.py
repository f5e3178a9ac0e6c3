"""What comes out of a checkout, judged by the programs that people use, not by castore."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from castore.repository import Repository
from castore.tree import File
from tests.helpers import new_repository


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    big = torch.randn(300, 400, generator=generator)
    later = torch.Generator().manual_seed(step)
    return {
        "w": big * (1 + 1e-4 * torch.randn(300, 400, generator=later)),
        "half": big.to(torch.bfloat16),
        "small": torch.arange(10) + step,
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture(params=["local", "memory"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    return new_repository(request.param, tmp_path)


def test_torch_safetensors_numpy_and_sha256sum_agree(
    repository: Repository, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    for step in (1, 2, 3):
        torch.save({"model": tensors(step), "step": step}, run / f"step_{step}.pt")
        save_file(tensors(step), run / f"step_{step}.safetensors", {"step": str(step)})
        np.savez(run / f"step_{step}.npz", w=tensors(step)["w"].numpy())
    (run / "empty").write_bytes(b"")
    sums = subprocess.run(
        ["sha256sum", *sorted(p.name for p in run.iterdir())],
        cwd=run,
        check=True,
        capture_output=True,
    ).stdout
    commit = repository.commit([run])
    assert commit.added < 0.6 * commit.snapshot.size  # tensors once, later ones as differences
    repository.checkout(commit.name, out)
    subprocess.run(["sha256sum", "--check", "--strict", "-"], cwd=out, input=sums, check=True)
    told = {
        path: entry.sha256
        for path, entry in repository.tree(commit.name).entries.items()
        if isinstance(entry, File)
    }
    assert told == {line.split()[1]: line.split()[0] for line in sums.decode().splitlines()}
    for step in (1, 2, 3):
        wanted = tensors(step)
        found = torch.load(out / f"step_{step}.pt", weights_only=True)
        assert found["step"] == step
        for loaded in (found["model"], load_file(out / f"step_{step}.safetensors")):
            assert loaded.keys() == wanted.keys()
            assert all(torch.equal(loaded[k], wanted[k]) for k in wanted)
        with np.load(out / f"step_{step}.npz") as archive:
            assert np.array_equal(archive["w"], wanted["w"].numpy())
