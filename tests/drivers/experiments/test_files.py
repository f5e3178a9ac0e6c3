"""A root's files where the store answers badly, or not at all."""

from __future__ import annotations

import time
from typing import Any

import pytest

from castore import AlreadyExistsError, BackendError
from castore.backend import MISSING, UnansweredError
from castore.backends import open_backend
from castore_experiments.files import RemoteFiles, open_files
from castore_experiments.layout import MANIFEST
from castore_experiments.manifest import Change, Manifest, entry_of
from castore_experiments.manifest_file import ManifestFile
from castore_experiments.root import read_pending, read_root
from castore_experiments.view import View
from tests.faults import Outage, Wrapped
from tests.helpers import memory_url

HASH = "0a" * 12
TIME = "2026-11-30T03:11:40.130644"


class LostAnswers(Wrapped):
    """The next ``count`` writes get no answer; they happened, or did not."""

    def __init__(self, inner: Any, count: int, happened: bool):
        super().__init__(inner)
        self.count, self.happened = count, happened

    def replace(self, name: str, data: Any, if_version: str) -> Any:
        if self.count == 0:
            return self.inner.replace(name, data, if_version)
        self.count -= 1
        if self.happened:
            self.inner.replace(name, data, if_version)
        raise UnansweredError("no answer")


@pytest.mark.parametrize("happened", [True, False])
def test_a_look_decides_where_no_answer_came(happened: bool) -> None:
    backend = open_backend(memory_url())
    files = RemoteFiles(LostAnswers(backend, 1, happened))
    version = files.create("a", b"1")
    assert backend.get_versioned("a") == (b"1", version)
    files = RemoteFiles(LostAnswers(backend, 1, happened))
    assert files.replace("a", b"2", version) == backend.stat("a").version
    with pytest.raises(AlreadyExistsError):
        files.replace("a", b"3", version)
    with pytest.raises(UnansweredError):
        RemoteFiles(LostAnswers(backend, 99, False)).create("b", b"1")


@pytest.mark.parametrize("happened", [True, False])
def test_a_manifest_whose_write_got_no_answer(happened: bool) -> None:
    backend = open_backend(memory_url())
    files = RemoteFiles(LostAnswers(backend, 1, happened))
    entry = entry_of(HASH, created=TIME, last_used=TIME)
    mine = ManifestFile(files, Manifest, report=print, clock=time.time)
    assert list(mine.update(Change({HASH: entry}, HASH, TIME)).entries) == [HASH]
    assert mine.read().latest_hash == HASH


def test_an_outage_is_never_taken_for_an_empty_root() -> None:
    files = RemoteFiles(Outage(open_backend(memory_url()), lambda call, name: True))
    mine = ManifestFile(files, Manifest, report=print, clock=time.time)
    for call in (
        mine.read,
        lambda: mine.update(Change()),
        lambda: read_root(files),
        lambda: read_pending(files),
        lambda: View(files, lambda *_: True).weights(),
    ):
        with pytest.raises(BackendError):
            call()


def test_a_store_without_conditions_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MC2: a backend lacking conditional put is detected, not assumed."""
    backend = open_backend(memory_url())
    monkeypatch.setattr(type(backend), "probe", lambda self: False)
    files = RemoteFiles(backend)
    files.create("a", b"1")
    files.create("b", b"1")
    assert len(caplog.records) == 1 and "two writers" in caplog.text


def test_a_root_in_memory() -> None:
    """Any other fsspec store, as long as one process writes."""
    url = memory_url()
    mine = ManifestFile(open_files(url), Manifest, report=print, clock=time.time)
    mine.update(Change({HASH: entry_of(HASH, created=TIME, last_used=TIME)}, HASH, TIME))
    assert open_files(url).stat(MANIFEST).version != MISSING
    assert [s.name for s in open_files(url).list("checkpoints")] == [MANIFEST]
