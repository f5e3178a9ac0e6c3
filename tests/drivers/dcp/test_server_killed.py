"""The S3 server dies in the middle of a save: an error, nothing torn, and the next save works."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from castore import BackendError, Repository
from castore.check import check
from castore.testing.faulty import Call, FaultyBackend
from castore.testing.s3server import S3Server
from castore_dcp import CastoreReader, CastoreWriter
from tests.conftest import _server
from tests.drivers.dcp.states import BIG, blank, shown
from tests.helpers import with_backend

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is :UserWarning")
URL = "s3://test/store"


@pytest.fixture
def mortal() -> Iterator[S3Server]:
    """A server of this test's own."""
    yield from _server("seaweedfs")


def dying(repository: Repository, server: S3Server, moment: str) -> Repository:
    """The server is killed at the first write of ``moment``."""
    killed = threading.Event()

    def kill(call: Call) -> None:
        writes = call.method in ("create", "create_many", "write_many")
        if writes and call.name.startswith(moment) and not killed.is_set():
            killed.set()
            server.kill()

    backend = FaultyBackend(repository.backend, hook=kill)
    return with_backend(repository, backend, sleep=lambda _: None, tries=2)


def loads(repository: Repository, expected: dict[str, torch.Tensor]) -> None:
    again = blank(expected)
    dcp.load(again, storage_reader=CastoreReader(repository, "t"))
    assert shown(again) == shown(expected)


@pytest.mark.parametrize("moment", ["objects/", "snapshots/t/"])
def test_a_save_whose_server_is_killed_makes_nothing(moment: str, mortal: S3Server) -> None:
    repository = Repository.init(URL, storage_options=mortal.fsspec_options())
    first, second = ({f"w{i}": torch.randn(BIG) for i in range(6)} for _ in range(2))
    dcp.save(first, storage_writer=CastoreWriter(repository, "t", step=1))
    with pytest.raises(CheckpointException) as e:
        dcp.save(second, storage_writer=CastoreWriter(dying(repository, mortal, moment), "t"))
    assert isinstance(e.value.failures[0][0], BackendError)
    mortal.restart()
    repository = Repository.open(URL, storage_options=mortal.fsspec_options())
    assert [n.key for n in repository.snapshots("t")] == ["step.1"]
    loads(repository, first)
    dcp.save(second, storage_writer=CastoreWriter(repository, "t", step=2))
    loads(repository, second)
    assert list(check(repository, read_data=True)) == []


def test_a_checkpoint_stands_though_its_parts_cannot_be_forgotten(
    mortal: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """The server dies after the commit: the save succeeds and says what is left."""
    repository = Repository.init(URL, storage_options=mortal.fsspec_options())
    state = {"w": torch.randn(BIG)}
    writer = CastoreWriter(dying(repository, mortal, "forgotten/"), "t", step=1)
    with caplog.at_level(logging.WARNING, "castore"):
        dcp.save(state, storage_writer=writer)
    assert "was saved; its parts could not be forgotten" in caplog.text
    mortal.restart()
    repository = Repository.open(URL, storage_options=mortal.fsspec_options())
    loads(repository, state)
    assert {n.namespace for n in repository.snapshots()} == {"t", "t.parts"}
    dcp.save(state, storage_writer=CastoreWriter(repository, "t", abandoned_after=-5))
    assert {n.namespace for n in repository.snapshots()} == {"t"}
