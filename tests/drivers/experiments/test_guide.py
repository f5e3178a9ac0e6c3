"""The guide's code blocks, run one after the other in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# file: (\S+)\n")


def script(text: str, folder: Path) -> str:
    """One bash script; a Python block becomes a file that it runs, or that others import."""
    lines = ["set -euxo pipefail"]
    for number, (kind, code) in enumerate(BLOCK.findall(text)):
        named = NAME.match(code)
        if kind == "python":
            path = folder / (named[1] if named else f"block_{number}.py")
            path.write_text(code)
            code = "" if named else f"python {path.name}\n"
        lines.append(code)
    return "\n".join(lines)


@pytest.mark.timeout(280)
def test_every_block_of_the_guide_works(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CASTORE_"))}
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, module in (("castore", "-m castore.cli"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (tools / name).chmod(0o755)
    env["PATH"] = f"{tools}:{env['PATH']}"
    env["PYTHONPATH"] = f"{ROOT}:{ROOT}/drivers"
    folder = tmp_path / "empty"
    folder.mkdir()
    text = (ROOT / "docs/guides/experiments.md").read_text()
    try:
        done = subprocess.run(
            ["bash", "-c", script(text, folder)],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=260,
            stdin=subprocess.DEVNULL,
        )
    finally:
        subprocess.run(
            [sys.executable, "-m", "castore.testing.s3server", "stop", "--dir", folder / "s3"],
            env=env,
            check=False,
            capture_output=True,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    assert "hp: lr: 0.01 -> 0.003" in done.stdout
    assert "data: 2 samples discarded: 3, 7" in done.stdout
    assert "no problems found" in done.stderr
