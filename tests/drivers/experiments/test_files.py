"""A root's files where the store answers badly, or not at all."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from castore import AlreadyExistsError, BackendError
from castore.backend import MISSING, UnansweredError
from castore.backends import open_backend
from castore_experiments import local_files
from castore_experiments.files import RemoteFiles, open_files
from castore_experiments.layout import MANIFEST
from castore_experiments.local_files import LocalFiles
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
    assert [r.name for r in caplog.records if "two writers" in r.message] == ["castore"]


def test_a_root_in_memory() -> None:
    """Any other fsspec store, as long as one process writes."""
    url = memory_url()
    mine = ManifestFile(open_files(url), Manifest, report=print, clock=time.time)
    mine.update(Change({HASH: entry_of(HASH, created=TIME, last_used=TIME)}, HASH, TIME))
    assert open_files(url).stat(MANIFEST).version != MISSING
    assert [s.name for s in open_files(url).list("checkpoints")] == [MANIFEST]


# -- a large local file that goes


def large(root: Path) -> tuple[LocalFiles, Path]:
    path = root / "checkpoints/models/x.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(local_files._LARGE))
    return LocalFiles(str(root)), path


def held(path: Path) -> list[str]:
    """What this process has open of a file that has no name any more."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [f for f in found if f.startswith(str(path))]


def test_a_large_file_is_gone_at_once_and_its_room_soon(tmp_path: Path) -> None:
    files, path = large(tmp_path)
    files.delete("checkpoints/models/x.pt")
    assert not path.exists()
    files.delete("checkpoints/models/x.pt")  # none there is no error
    deadline = time.monotonic() + 60
    while held(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held(path) == []
    assert not local_files._gone


def test_a_forked_child_does_not_keep_the_room_of_a_deleted_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent's thread has not come to it yet, and is not in the child."""
    files, path = large(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    files.delete("checkpoints/models/x.pt")
    monkeypatch.undo()
    assert held(path) != []
    child = os.fork()
    if child == 0:
        os._exit(1 if held(path) or local_files._gone else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for fd in list(local_files._gone):
        local_files._let_go(fd)
    assert held(path) == []


def test_a_large_file_goes_while_python_ends(tmp_path: Path) -> None:
    """No thread gets to run any more: who waited for one to start never came to an end."""
    _, path = large(tmp_path)
    program = f"""
from castore_experiments.local_files import LocalFiles

class Last:
    files = LocalFiles({str(tmp_path)!r})

    def __del__(self):
        self.files.delete("checkpoints/models/x.pt")

last = Last()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    assert not path.exists()


def test_a_large_file_goes_where_no_thread_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    files, path = large(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    files.delete("checkpoints/models/x.pt")
    assert not path.exists()
    assert held(path) == []


def test_a_large_link_or_folder_is_not_followed(tmp_path: Path) -> None:
    files, path = large(tmp_path)
    other = path.with_name("y.pt")
    other.symlink_to(path)
    files.delete("checkpoints/models/y.pt")
    assert path.exists()
    assert not other.is_symlink()
