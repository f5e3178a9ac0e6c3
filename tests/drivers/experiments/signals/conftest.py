"""One repository, on a local disk and on S3, and somewhere for local files."""

from __future__ import annotations

from pathlib import Path

import pytest

from castore import Repository


@pytest.fixture(params=["local", "s3"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    if request.param == "local":
        return Repository.init(tmp_path / "store")
    url, options = request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options")
    return Repository.init(url, storage_options=options)


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    return Repository.init(tmp_path / "store")


@pytest.fixture
def wal(tmp_path: Path) -> Path:
    return tmp_path / "wal"
