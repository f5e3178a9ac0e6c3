"""The manifest where it lies: many writers, other programs, damage; local and on S3."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from castore import BackendError, FormatError, ObjectNotFoundError
from castore.backends import open_backend
from castore_experiments import manifest_file
from castore_experiments.files import open_files
from castore_experiments.layout import MANIFEST
from castore_experiments.local_files import LocalFiles
from castore_experiments.manifest import Change, Manifest, entry_of, parse, render
from castore_experiments.manifest_file import LocalSwap, ManifestFile
from tests.drivers.experiments.places import KINDS, place, run_all
from tests.helpers import ODD_ROOTS

TIME = "2026-11-30T03:11:40.130644"
LATER = "2026-11-30T03:11:41.130644"

WRITER = """
import sys, time
root, start, count, lock = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if lock == "none":
    import fcntl
    fcntl.flock = lambda *_: None
from castore_experiments.files import open_files
from castore_experiments.manifest import Change, Manifest, entry_of
from castore_experiments.manifest_file import ManifestFile
file = ManifestFile(open_files(root), Manifest, report=print, clock=time.time)
for i in range(start, start + count):
    hash = f"{i:08d}" * 3
    entry = entry_of(hash, created="2026-11-30T03:11:40", last_used="2026-11-30T03:11:40")
    found = file.update(Change({hash: entry}, hash, "2026-11-30T03:11:40", i))
    assert hash in found.entries
"""


def hash_of(i: int) -> str:
    return f"{i:08d}" * 3


def change(i: int, time: int = 0) -> Change:
    entry = entry_of(hash_of(i), created=TIME, last_used=TIME)
    return Change({hash_of(i): entry}, hash_of(i), TIME, time)


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, request, tmp_path)


class Reports(list[str]):
    """What was reported, and files that report here."""

    def open(
        self, root: str, rebuild: Callable[[], Manifest] = Manifest, timeout: float = 60.0
    ) -> ManifestFile:
        return ManifestFile(
            open_files(root), rebuild, report=self.append, clock=time.time, timeout=timeout
        )


@pytest.fixture
def reports() -> Reports:
    return Reports()


def test_written_and_read_by_another(root: str, reports: Reports) -> None:
    mine, other = reports.open(root), reports.open(root)
    assert mine.read() == Manifest()
    with pytest.raises(ObjectNotFoundError):
        open_files(root).get(MANIFEST)
    for i in range(1, 6):
        written = (mine if i % 2 else other).update(change(i, i))
        assert list(written.entries) == [hash_of(n) for n in range(1, i + 1)]
        assert mine.read() == other.read() == written
    assert written.latest_hash == hash_of(5)
    assert parse(open_files(root).get(MANIFEST), "x") == written
    assert reports == []


def test_another_process_is_seen_within_one_call_s31(root: str, reports: Reports) -> None:
    """S31: A sees B within one call; reading is never cut to an old length."""
    mine = reports.open(root)
    mine.update(change(1))
    assert len(mine.read().entries) == 1
    run_all(WRITER, [[root, "2", "30", "lock"]])
    assert len(mine.read().entries) == 31


def test_nothing_is_written_if_nothing_changes(root: str, reports: Reports) -> None:
    mine = reports.open(root)
    mine.update(change(1))
    version = open_files(root).stat(MANIFEST).version
    mine.update(change(1))
    reports.open(root).update(change(1))
    assert open_files(root).stat(MANIFEST).version == version
    open_files(root).delete(MANIFEST)
    mine.update(change(1))  # what was known is no proof that it still stands there
    assert open_files(root).get(MANIFEST)


@pytest.mark.parametrize("name", ODD_ROOTS)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_names_s37(
    kind: str, name: str, request: pytest.FixtureRequest, tmp_path: Path, reports: Reports
) -> None:
    """S37: literal treatment everywhere, same behaviour local and S3."""
    root = place(kind, request, tmp_path, f"runs/{name}")
    reports.open(root).update(change(1))
    assert reports.open(root).update(change(2)).entries.keys() == {hash_of(1), hash_of(2)}


def test_two_processes_of_60_hashes_lose_none(root: str, reports: Reports) -> None:
    run_all(WRITER, [[root, str(start), "60", "lock"] for start in (100, 200)])
    wanted = {hash_of(i) for start in (100, 200) for i in range(start, start + 60)}
    found = reports.open(root).read()
    assert found.entries.keys() == wanted
    assert found.latest_hash == hash_of(259)
    data = open_files(root).get(MANIFEST)
    assert yaml.safe_load(data)["experiments"].keys() == wanted


def test_none_is_lost_where_locks_do_nothing_fs2(tmp_path: Path, reports: Reports) -> None:
    """FS2: the lock primitive replaced by one that always succeeds; run MC2."""
    root = str(tmp_path / "root")
    run_all(WRITER, [[root, str(100 * n), "20", "none"] for n in range(1, 5)])
    wanted = {hash_of(100 * n + i) for n in range(1, 5) for i in range(20)}
    assert reports.open(root).read().entries.keys() == wanted
    assert parse((tmp_path / "root" / MANIFEST).read_bytes(), "x").entries.keys() == wanted


def test_a_lock_that_is_held_is_told_by_its_holder_fs2(tmp_path: Path, reports: Reports) -> None:
    """FS2: acquiring has a timeout and names the holder."""
    mine = reports.open(str(tmp_path), timeout=0.2)
    mine.update(change(1))
    lock = open_backend(tmp_path / ".castore/manifest")
    with lock.lock(exclusive=True, timeout=1), pytest.raises(BackendError, match=f"{os.getpid()}"):
        mine.update(change(2))
    mine.update(change(2))


def test_every_read_meanwhile_is_whole_mc2(tmp_path: Path, reports: Reports) -> None:
    """MC2: one reader polling the manifest meanwhile; each read parses."""
    root = str(tmp_path)
    mine, path = reports.open(root), tmp_path / MANIFEST
    mine.update(change(0))
    counts: list[int] = []
    done = threading.Event()

    def poll() -> None:
        last = False
        while not last:
            last = done.is_set()
            counts.append(len(yaml.load(path.read_bytes(), yaml.CSafeLoader)["experiments"]))

    reader = threading.Thread(target=poll)
    reader.start()
    for i in range(1, 60):
        mine.update(change(i))
    done.set()
    reader.join()
    assert counts == sorted(counts) and counts[-1] == 60


def test_threads(root: str, reports: Reports) -> None:
    mine = reports.open(root)
    threads = [
        threading.Thread(target=lambda n=n: [mine.update(change(10 * n + i)) for i in range(5)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports.open(root).read().entries) == 20


# -- a writer that stops half way


def swap_of(root: Path) -> tuple[LocalSwap, LocalFiles]:
    files = LocalFiles(str(root))
    return LocalSwap(files, 5.0), files


def test_a_writer_that_died_before_its_rename_is_finished_by_the_next(
    tmp_path: Path, reports: Reports
) -> None:
    mine = reports.open(str(tmp_path))
    first = mine.update(change(1))
    swap, _ = swap_of(tmp_path)
    _, version = swap.get()
    second = render(Manifest({**first.entries, **change(2).entries}, hash_of(2), TIME))
    swap._claim(second, version)  # and there it died
    assert mine.read().entries.keys() == {hash_of(1), hash_of(2)}
    third = reports.open(str(tmp_path)).update(change(3))
    assert third.entries.keys() == {hash_of(1), hash_of(2), hash_of(3)}
    assert parse((tmp_path / MANIFEST).read_bytes(), "x") == third


def test_a_rename_that_comes_late_loses_nothing(tmp_path: Path, reports: Reports) -> None:
    mine = reports.open(str(tmp_path))
    for i in range(1, 4):
        mine.update(change(i))
    late = (tmp_path / MANIFEST).read_bytes()
    for i in range(4, 8):
        mine.update(change(i))
    (tmp_path / MANIFEST).write_bytes(late)
    assert len(reports.open(str(tmp_path)).read().entries) == 7
    assert len(mine.update(change(8)).entries) == 8
    assert len(parse((tmp_path / MANIFEST).read_bytes(), "x").entries) == 8


def test_successors_do_not_pile_up_and_lapse(tmp_path: Path, reports: Reports) -> None:
    """A content may come back from a backup: what followed it long ago is not its successor."""
    mine = reports.open(str(tmp_path))
    for i in range(1, 40):
        mine.update(change(i))
    old = (tmp_path / MANIFEST).read_bytes()
    mine.update(change(40))
    successors = list((tmp_path / ".castore/manifest").glob("next-*"))
    assert 0 < len(successors) <= 16
    for path in successors:
        os.utime(path, (0, 0))
    (tmp_path / MANIFEST).write_bytes(old)
    assert len(mine.read().entries) == 39
    assert mine.update(change(41)).entries.keys() == {hash_of(i) for i in (*range(1, 40), 41)}


# -- other programs, and damage


def test_what_another_program_wrote_is_kept(root: str, reports: Reports) -> None:
    """The public tool rewrites the whole, unquoted and with its own keys; ours stay in it."""
    mine, files = reports.open(root), open_files(root)
    mine.update(Change({hash_of(1): {**change(1).entries[hash_of(1)], "castore": {"a": 1}}}))
    document = yaml.safe_load(files.get(MANIFEST))
    document["experiments"][hash_of(1)]["notes"] = "theirs"
    document["experiments"]["abcdef01" * 3] = {"hp_hash": "abcdef01", "odd": [1, 2]}
    document.update(latest_hash="abcdef01" * 3, last_updated=LATER, extra=1)
    data = yaml.dump(document, sort_keys=False).encode()
    files.replace(MANIFEST, data, files.stat(MANIFEST).version)
    found = mine.update(change(2))
    assert list(found.entries) == [hash_of(1), "abcdef01" * 3, hash_of(2)]
    assert found.entries[hash_of(1)]["notes"] == "theirs"
    assert found.entries[hash_of(1)]["castore"] == {"a": 1}
    assert found.entries["abcdef01" * 3]["odd"] == [1, 2]
    assert (found.last_updated, found.rest) == (LATER, {"extra": 1})


def damaged(whole: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "noise": b"\x00\xff" * 50,
        "newer": whole.replace(b'"format": 1', b'"format": 2'),
        "unquoted": whole.replace(f'"{hash_of(1)}"'.encode(), hash_of(1).encode()),
    }


@pytest.mark.parametrize("how", ["empty", "cut", "noise", "newer", "unquoted"])
def test_a_damaged_one_is_kept_aside_told_and_rebuilt(
    root: str, how: str, reports: Reports
) -> None:
    snapshots = Manifest({**change(1).entries, **change(2).entries}, hash_of(2), TIME)
    files = open_files(root)
    reports.open(root).update(change(1))
    bad = damaged(files.get(MANIFEST))[how]
    files.replace(MANIFEST, bad, files.stat(MANIFEST).version)
    mine = reports.open(root, lambda: snapshots)
    with pytest.raises(FormatError):
        mine.read()
    found = mine.update(change(3))
    assert found.entries.keys() == {hash_of(1), hash_of(2), hash_of(3)}
    aside = [s.name for s in files.list("checkpoints") if ".damaged-" in s.name]
    assert [files.get(name) for name in aside] == [bad]
    assert len(reports) == 1 and aside[0] in reports[0]
    assert mine.read() == found


def test_a_missing_one_is_rebuilt(root: str, reports: Reports) -> None:
    """A manifest can be deleted and rebuilt from snapshots."""
    snapshots = Manifest(change(1).entries, hash_of(1), TIME)
    mine = reports.open(root, lambda: snapshots)
    assert mine.read() == snapshots
    assert mine.update(change(2)).entries.keys() == {hash_of(1), hash_of(2)}
    assert reports == []


def test_one_that_is_just_being_written_is_waited_for(
    tmp_path: Path, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public tool writes in place: for a moment its manifest is empty."""
    mine, path = reports.open(str(tmp_path)), tmp_path / MANIFEST
    mine.update(change(1))
    data = yaml.dump(yaml.safe_load(path.read_bytes())).encode()
    path.write_bytes(b"")
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        """Whoever waits three times for the other program finds its work done."""
        waited.append(seconds)
        if len(waited) == 3:
            path.write_bytes(data)

    monkeypatch.setattr(manifest_file, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    assert mine.update(change(2)).entries.keys() == {hash_of(1), hash_of(2)}
    assert len(waited) == 3 and reports == []


def test_no_permission_is_no_empty_manifest(tmp_path: Path, reports: Reports) -> None:
    (tmp_path / MANIFEST).mkdir(parents=True)
    with pytest.raises(BackendError, match="not a regular file"):
        reports.open(str(tmp_path)).update(change(1))


def test_windows_like_refusals_fs1(
    tmp_path: Path, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FS1: os.replace raising PermissionError twice, then always: bounded retry, then the path."""
    mine, real, refused = reports.open(str(tmp_path)), os.replace, [0]
    mine.update(change(1))

    def refuse(source: str, target: str, times: int) -> None:
        if str(target).endswith("manifest.yaml") and refused[0] < times:
            refused[0] += 1
            raise PermissionError(13, "in use", str(source), None, str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", lambda a, b: refuse(a, b, 2))
    mine.update(change(2))
    assert refused == [2]
    monkeypatch.setattr(os, "replace", lambda a, b: refuse(a, b, 1000))
    with pytest.raises(BackendError, match=r"manifest\.yaml"):
        mine.update(change(3))
    monkeypatch.undo()
    assert not list(tmp_path.glob("checkpoints/.castore-*"))
    assert reports.open(str(tmp_path)).update(change(4)).entries.keys() >= {
        hash_of(i) for i in (1, 2, 4)
    }


def test_a_reader_that_holds_it_fs1(tmp_path: Path, reports: Reports) -> None:
    """FS1: reader loop on the manifest while a writer replaces it."""
    mine = reports.open(str(tmp_path))
    mine.update(change(1))
    with open(tmp_path / MANIFEST, "rb") as held:
        before = held.read()
        mine.update(change(2))
        held.seek(0)
        assert held.read() == before
