"""The guide's code blocks, run one after the other in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doc_blocks import ROOT, run


@pytest.mark.timeout(900)
def test_every_block_of_the_guide_works(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    done = run(ROOT / "docs/guides/experiments.md", folder, timeout=840)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    assert "hp: lr: 0.01 -> 0.003" in done.stdout
    assert "data: 2 samples discarded: 3, 7" in done.stdout
    assert "no problems found" in done.stderr
