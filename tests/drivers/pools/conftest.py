"""Places for the pools driver's tests: local and S3, by one fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from castore import Repository
from tests.drivers.pools.models import collect


@pytest.fixture(autouse=True)
def fresh_clients() -> Iterator[None]:
    """fsspec keeps file systems by their options; the environment they were made in may be gone."""
    yield
    S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["local", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place on a local disk, and on the real S3 server with its environment set."""
    if request.param == "local":
        return str(tmp_path / "there")
    request.getfixturevalue("s3_env")
    found: str = request.getfixturevalue("s3_url")
    return found


@pytest.fixture
def repository(url: str, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """An empty repository, named by ``CASTORE_REPOSITORY`` as well."""
    monkeypatch.setenv("CASTORE_REPOSITORY", url)
    return Repository.init(url)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layout with a pool of each kind; nobody changes it."""
    root = tmp_path_factory.mktemp("zoo")
    for arch in ("bertbase", "t5small", "wordavg"):
        collect(root, arch)
    return root
