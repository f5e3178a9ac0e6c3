"""Where the tests of roots put one: a local folder, or a prefix on a real S3 server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

KINDS = ["local", "s3"]


def place(kind: str, request: pytest.FixtureRequest, tmp_path: Path, name: str = "root") -> str:
    """A URL below which nothing is; the environment is enough to reach it, also for children."""
    if kind == "local":
        return str(tmp_path / name)
    request.getfixturevalue("s3_env")
    return f"{request.getfixturevalue('s3_url')}/{name}"


def run_all(script: str, arguments: Sequence[Sequence[str]]) -> list[str]:
    """Run ``script`` once for each of ``arguments``, all at once; what each printed."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, *a],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for a in arguments
    ]
    outputs = [c.communicate(timeout=200) for c in children]
    for child, (_, err) in zip(children, outputs, strict=True):
        assert child.returncode == 0, err
    return [out for out, _ in outputs]
