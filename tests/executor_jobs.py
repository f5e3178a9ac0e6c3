"""Jobs for workers. A module of its own, since each new worker imports it."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def dies_once(flag: str, i: int) -> tuple[int, int]:
    """A job whose worker is killed the first time."""
    if i == 3:
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return i, os.getpid()
        os.kill(os.getpid(), signal.SIGKILL)
    return i, os.getpid()


def looks(path: str) -> str:
    """What a file holds now."""
    return Path(path).read_text()


def always_dies(i: int) -> int:
    if i == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return i
