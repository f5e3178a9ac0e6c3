"""Every file of docs/examples runs, as it is, in an empty folder.

Each makes what it needs in a temporary folder and asserts what it shows. They run one after the
other in this process, since importing the libraries takes longer than they do; those that start
processes of their own (``dcp_*``, ``dask_*``) get a fresh one.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "docs/examples").glob("*.py"))
FRESH = ("dcp_", "dask_")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_example_runs(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("AWS_", "CASTORE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if example.name.startswith(FRESH):
        paths = os.pathsep.join([str(ROOT), str(ROOT / "drivers")])
        env = {**os.environ, "PYTHONPATH": paths}
        subprocess.run([sys.executable, str(example)], check=True, env=env, timeout=280)
    else:
        runpy.run_path(str(example), run_name="__main__")
    left = [n for n in os.listdir(tmp_path) if n != "state"]
    assert not left, f"{example.name} leaves {left} where it was started"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 7
