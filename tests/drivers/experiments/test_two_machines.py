"""Two machines on one root at once, one with a fast clock: nothing is lost, newest is newest.

The same for a minute: ``benchmarks/two_machines.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.experiments import machines
from tests.drivers.experiments.places import KINDS, place


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, request, tmp_path)


def test_two_machines_on_one_root(root: str) -> None:
    """They save, log, edit, branch and export at once, the second one's clock ten minutes fast.
    Afterwards: every hash, weight file, point and manifest entry that was answered is there with
    its content, each machine sees the other's, and a third one resumes the last save."""
    base = machines.start(root)
    answers = machines.run(root, seconds=2.0)
    assert list(machines.judge(root, base, answers)) == []
    done = machines.counts(answers)
    assert done["exports"] >= 2 and done["branches"] >= 4 and done["saves"] >= 24
