"""The README's code blocks, run one after the other as a newcomer would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.doc_blocks import BLOCK, ROOT, run

README = ROOT / "README.md"


@pytest.mark.timeout(900)
def test_every_block_works(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    done = run(README, folder, timeout=800)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "learning_rate: 0.001" in done.stdout


def test_the_two_commands_come_first() -> None:
    first = BLOCK.findall(README.read_text())[0][1]
    assert first == "./scripts/quickstart.sh\n./scripts/test.sh\n"
    for line in first.split():
        assert os.access(README.parent / line, os.X_OK)
