"""N + M steps with a stop between, in another process, are N + M steps straight, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drivers.experiments import exact_program as program

PROGRAM = Path(program.__file__)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases run up to their stops in one process, and on from each in another."""
    folder = tmp_path_factory.mktemp("exact")
    for part in ("first", "second"):
        command = [sys.executable, str(PROGRAM), str(folder), part]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", program.CASES)
def test_a_stop_changes_nothing(name: str, stopped: Path) -> None:
    """ "RNG state ... restored on load so the exact sampling order resumes." and "resuming a
    checkpoint continues training deterministically rather than just reloading weights."

    Weights, moments, losses, sample order, learning rate and all random streams.
    """
    case = program.CASES[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = program.straight(case)
    finally:
        torch.set_num_threads(threads)
    here = stopped / str(list(program.CASES).index(name))
    before = torch.load(here / "log", weights_only=False)
    assert before == expected["log"][: case.stops[-1]]
    for stop in case.stops:
        found: dict[str, Any] = torch.load(here / f"{stop}.result", weights_only=False)
        assert found["log"] == expected["log"][stop:], stop
        assert found["lr"] == expected["lr"]
        for part in ("model", "optimizer"):
            pairs = zip(found[part], expected[part], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), (stop, part)
