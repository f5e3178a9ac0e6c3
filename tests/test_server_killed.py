"""The S3 server dies in the middle of a commit: what was committed stays, the rest is an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from castore.errors import BackendError
from castore.repository import Repository
from castore.testing.faulty import Call, FaultyBackend
from castore.testing.s3server import S3Server
from tests.conftest import _server
from tests.helpers import contents, draft, noise, problems, with_backend


@pytest.fixture
def mortal() -> Iterator[S3Server]:
    """A server of this test's own."""
    yield from _server("seaweedfs")


@pytest.mark.parametrize("moment", ["objects/", "pending/", "snapshots/"])
def test_a_commit_whose_server_is_killed_fails_and_loses_nothing(
    moment: str, mortal: S3Server, tmp_path: Path
) -> None:
    options = mortal.fsspec_options()
    repository = Repository.init("s3://test/store", storage_options=options)
    first = {"m": noise(3 << 20), "n": b"1"}
    before = repository.commit(draft(first)).name
    killed = threading.Event()

    def kill(call: Call) -> None:
        writes = call.method in ("create", "create_many", "write_many")
        if writes and call.name.startswith(moment) and not killed.is_set():
            killed.set()
            mortal.kill()

    dying = with_backend(
        repository, FaultyBackend(repository.backend, hook=kill), sleep=lambda _: None, tries=2
    )
    second = {f"{i}": noise(1 << 20, i) for i in range(8)}
    with pytest.raises(BackendError, match="s3://test/store"):
        dying.commit(draft(second))
    assert killed.is_set()
    with pytest.raises(BackendError):
        list(repository.snapshots())  # an outage is no empty repository
    mortal.restart()
    again = Repository.open("s3://test/store", storage_options=options)
    assert list(again.snapshots()) == [before]
    assert contents(again, before) == first
    assert problems(again) == []
    name = again.commit(draft(second)).name
    assert contents(again, name) == second
    assert problems(again) == []
