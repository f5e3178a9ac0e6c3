"""Stores for distributed checkpoints: a local folder and the real S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from castore import Repository


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any] | None]:
    """URL and storage options of an empty repository."""
    url: str = str(tmp_path / "store")
    options = None
    if request.param == "s3":
        url = request.getfixturevalue("s3_url")
        options = request.getfixturevalue("s3_options")
    Repository.init(url, storage_options=options)
    return url, options


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """An empty one in a folder."""
    return Repository.init(tmp_path / "store")
