"""Run the code blocks of a page one after the other, as a newcomer would in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALLS = "./scripts/"
_NAME = re.compile(r"# file: (\S+)\n")


def script(text: str, folder: Path) -> str:
    """One bash script; a Python block becomes a file that it runs, or, named, that others import.

    Blocks that install are left out.
    """
    lines = ["set -euxo pipefail"]
    for number, (kind, code) in enumerate(BLOCK.findall(text)):
        if code.startswith(INSTALLS):
            continue
        named = _NAME.match(code)
        if kind == "python":
            path = folder / (named[1] if named else f"block_{number}.py")
            path.write_text(code)
            code = "" if named else f"python {path.name}\n"
        lines.append(code)
    return "\n".join(lines)


def run(page: Path, folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """What the page's blocks print, run in ``folder``; an S3 server they started is stopped."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CASTORE_"))}
    # The program itself may not be installed beside this Python.
    tools = folder.parent / "bin"
    tools.mkdir()
    for name, module in (("castore", "-m castore.cli"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (tools / name).chmod(0o755)
    env["PATH"] = f"{tools}:{env['PATH']}"
    env["PYTHONPATH"] = f"{ROOT}:{ROOT}/drivers"
    try:
        return subprocess.run(
            ["bash", "-c", script(page.read_text(), folder)],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
    finally:
        subprocess.run(
            [sys.executable, "-m", "castore.testing.s3server", "stop", "--dir", folder / "s3"],
            env=env,
            check=False,
            capture_output=True,
        )
