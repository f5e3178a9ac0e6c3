"""One real run for the tests that only read it, and copies for those that damage it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.receipts import runs


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Receipts of steps 20, 40 and 60 and a final evaluation. Not to be changed."""
    root = tmp_path_factory.mktemp("receipts") / "run"
    callback = runs.run(root, 60, watched={"limits": [1.0, 2.0]}, replay_buffer=True)
    callback.final_evaluation()
    return root


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """The same, to damage; without its repository."""
    at = tmp_path / "run"
    shutil.copytree(made, at, ignore=shutil.ignore_patterns(".castore"))
    return at


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any] | None]:
    """A destination's URL and its storage options, on each kind of store."""
    if request.param == "s3":
        return request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options")
    if request.param == "memory":
        from tests.helpers import memory_url

        return memory_url(), None
    return str(tmp_path / "run"), None
