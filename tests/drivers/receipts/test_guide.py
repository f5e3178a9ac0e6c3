"""The guide's own code, with smaller numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from castore_receipts import verify_all

GUIDE = Path(__file__).parents[3] / "docs/guides/receipts.md"
SMALLER = {"every=1_000": "every=100", "learn(10_000": "learn(220", "4_000": "100", "6_000": "120"}


def test_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        for large, small in SMALLER.items():
            block = block.replace(large, small)
        exec(block, names)  # noqa: S102
    found = list(verify_all(["runs/pendulum", "runs/pendulum-again"]))
    assert [r.receipt["step"] for r in found] == [100, 200, 220, 220, 200, 220]
    assert all(r.sound for r in found)
    again = {r.receipt["step"]: r.receipt for r in found[4:]}
    assert again[220]["checkpoint_sha256"] == found[2].receipt["checkpoint_sha256"]
    assert capsys.readouterr().out.count("checkpoint") == 10
