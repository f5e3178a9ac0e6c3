"""The README's code blocks, run one after the other as a newcomer would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALLS = "./scripts/"


def blocks(text: str) -> list[tuple[str, str]]:
    return [(kind, code) for kind, code in BLOCK.findall(text) if not code.startswith(INSTALLS)]


def script(text: str, folder: Path) -> str:
    """All blocks as one bash script; a Python block becomes a file that it runs."""
    lines = ["set -euxo pipefail", f"export PATH={Path(sys.executable).parent}:$PATH"]
    for number, (kind, code) in enumerate(blocks(text)):
        if kind == "python":
            path = folder / f"block_{number}.py"
            path.write_text(code)
            code = f"python {path.name}\n"
        lines.append(code)
    return "\n".join(lines)


@pytest.mark.timeout(240)
def test_every_block_works(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CASTORE_"))}
    # The program itself may not be installed beside this Python: it is found on PATH then.
    tools = tmp_path / "bin"
    tools.mkdir()
    command = tools / "castore"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m castore.cli "$@"\n')
    command.chmod(0o755)
    env["PATH"] = f"{env['PATH']}:{tools}"
    env["PYTHONPATH"] = str(README.parent)
    try:
        done = subprocess.run(
            ["bash", "-c", script(README.read_text(), tmp_path)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
            stdin=subprocess.DEVNULL,
        )
    finally:
        subprocess.run(
            [sys.executable, "-m", "castore.testing.s3server", "stop", "--dir", tmp_path / "s3"],
            env=env,
            check=False,
            capture_output=True,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "learning_rate: 0.001" in done.stdout


def test_the_two_commands_come_first() -> None:
    first = BLOCK.findall(README.read_text())[0][1]
    assert first == "./scripts/quickstart.sh\n./scripts/test.sh\n"
    for line in first.split():
        assert os.access(README.parent / line, os.X_OK)
