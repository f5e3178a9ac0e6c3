"""What goes wrong for people who do this job, each case by its name: S31 to S34, FS1 to FS3, GC2,
GC4, GC8, CC5, UX1, SE1, SE3. Other cases stand where their module is tested (HC8 and FS6 in
test_commit, CC7, AU1, S37 and SE2 in test_repository, AU4 and AU5 in test_check, GC1, GC7 and UX6
in test_prune, SE6 in test_cut).
"""

from __future__ import annotations

import ast
import asyncio
import fcntl
import io
import logging
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from castore import save
from castore.backends import _folder_lock, local
from castore.backends.local import LocalBackend
from castore.cli import app
from castore.cutters import safetensors as safetensors_cutter
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    CastoreError,
    FormatError,
    InvalidInputError,
    ObjectNotFoundError,
)
from castore.objects import object_name
from castore.prune import prune
from castore.publish import Patience
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.source import DiskFile, Reader, scan
from castore.testing.faulty import Call, FaultyBackend
from castore.testing.s3server import S3Server
from tests.helpers import (
    age,
    clocked,
    contents,
    draft,
    drift,
    folder,
    headers,
    new_repository,
    noise,
    problems,
    raw,
    safetensors,
    series,
    weights,
    with_backend,
)
from tests.test_backend_local import GROUP, in_child, root_only
from tests.test_backend_s3 import Proxy, _Handler

kinds = pytest.mark.parametrize("kind", ["local", "memory"])
PACKAGE = Path(__file__).parent.parent / "castore"


@pytest.fixture(params=["local", "memory", "s3"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    """An empty repository on each kind of store."""
    if request.param != "s3":
        return new_repository(request.param, tmp_path)
    options = request.getfixturevalue("s3_options")
    return Repository.init(request.getfixturevalue("s3_url"), storage_options=options)


def elsewhere(code: str, *words: str) -> subprocess.Popen[bytes]:
    """Python code in a process of its own."""
    before = "import sys; from castore.repository import Repository; from tests.helpers import *\n"
    return subprocess.Popen([sys.executable, "-c", before + code, *words], cwd=PACKAGE.parent)


# -- S3


def test_s31_what_another_process_writes_is_seen_within_one_call(
    s3_url: str, s3_env: dict[str, str]
) -> None:
    """S31: caches of listings and sizes."""
    mine = Repository.init(s3_url)
    first = mine.commit(draft({"m": b"short"}), namespace="a").name
    version = mine.backend.create("note", b"short")
    assert list(mine.snapshots()) == [first]
    assert mine.backend.stat("note").size == 5
    other = elsewhere(
        "r = Repository.open(sys.argv[1])\n"
        "r.commit(draft({'m': b'longer' * 100_000}), namespace='a')\n"
        "r.commit(draft({'m': b'new'}), namespace='b')\n"
        "r.backend.replace('note', b'longer' * 100, sys.argv[2])\n",
        s3_url,
        version,
    )
    assert other.wait(120) == 0
    assert len(list(mine.snapshots("a"))) == 2
    assert mine.namespaces() == ["a", "b"]
    assert mine.read("a@latest", "m") == b"longer" * 100_000
    assert mine.backend.get("note") == b"longer" * 100
    assert mine.backend.stat("note").size == 600
    assert problems(mine) == []


class Torn(DiskFile):
    """A file whose ``at``-th read raises."""

    def open(self) -> Reader:
        class Tearing(Reader):
            def read(self, start: int, stop: int) -> bytes:
                if start >= 40 << 20:
                    raise KeyboardInterrupt
                return super().read(start, stop)

        return Tearing(self)


def test_s32_an_exception_in_the_middle_publishes_nothing_short(
    repository: Repository, tmp_path: Path
) -> None:
    """S32: a writer that is interrupted; FS too."""
    path = tmp_path / "m.bin"
    path.write_bytes(noise(60 << 20))
    [found] = scan([path]).values()
    assert isinstance(found, DiskFile)
    torn = Torn(found.path, found.size, found.executable, found.identity)
    with pytest.raises(KeyboardInterrupt):
        repository.commit(draft({"m.bin": torn}))
    assert list(repository.snapshots()) == []
    for stat in repository.store.list():  # each is whole: its content hashes to its name
        repository.store.read(stat.name.rpartition("/")[2])
    name = repository.commit([path]).name
    assert repository.read(name, "m.bin") == path.read_bytes()
    assert problems(repository) == []


def test_s32_a_writer_killed_while_it_uploads_leaves_missing_never_short(
    s3_url: str, s3_env: dict[str, str], tmp_path: Path
) -> None:
    repository = Repository.init(s3_url)
    path = tmp_path / "m.bin"
    path.write_bytes(noise(150 << 20))
    writer = elsewhere(
        "import itertools, time\n"
        "pieces = itertools.count()\n"
        "stop = lambda _: next(pieces) == 4 and time.sleep(600)\n"  # it waits to be killed
        "Repository.open(sys.argv[1]).commit([sys.argv[2]], progress=stop)",
        s3_url,
        str(path),
    )
    while not list(repository.backend.list("objects", limit=1)):
        assert writer.poll() is None, "it finished before it could be killed"
        time.sleep(0.01)
    writer.kill()
    writer.wait()
    assert list(repository.snapshots()) == []
    for stat in list(repository.store.list()):
        repository.store.read(stat.name.rpartition("/")[2])
    assert problems(repository) == []
    assert repository.read(repository.commit([path]).name, "m.bin") == path.read_bytes()


def read_m(repository: Repository) -> bytes:
    return repository.read("latest", "m")


class Samples:
    """A data set that reads from the repository its parent opened."""

    def __init__(self, repository: Repository):
        self.repository = repository

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        return self.repository.read("latest", "m")[i]


def test_s33_an_opened_repository_works_in_forked_workers_and_in_a_running_loop(
    s3_url: str, s3_env: dict[str, str]
) -> None:
    """S33: event loops do not survive a fork."""
    from torch.utils.data import DataLoader

    repository = Repository.init(s3_url)
    repository.commit(draft({"m": b"abcd"}))
    assert read_m(repository) == b"abcd"  # the loop thread runs before the fork
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, mp_context=fork) as pool:
        assert list(pool.map(read_m, [repository] * 4, timeout=120)) == [b"abcd"] * 4
    loader: Any = DataLoader(
        Samples(repository),  # type: ignore[arg-type]
        num_workers=2,
        multiprocessing_context="fork",
        timeout=120,
    )
    assert sorted(int(x) for x in loader) == sorted(b"abcd")

    async def cell() -> bytes:
        return read_m(repository)

    assert asyncio.run(cell()) == b"abcd"


class Framing(_Handler):
    """A server that keeps an upload's framing as content and knows no checksums."""

    def do_PUT(self) -> None:  # noqa: N802
        length = int(self.headers["Content-Length"])
        if "/objects/" not in self.path:
            self._pass_on()
            return
        body = self.rfile.read(length)
        framed = b"%x\r\n%b\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n" % (length, body)
        del self.headers["x-amz-checksum-sha256"]
        self.headers.replace_header("Content-Length", str(len(framed)))
        rfile, self.rfile = self.rfile, io.BytesIO(framed)  # type: ignore[assignment]
        try:
            self._pass_on()
        finally:
            self.rfile = rfile


def served(server: S3Server, handler: type[_Handler]) -> Iterator[Proxy]:
    proxy = Proxy(server)
    proxy.RequestHandlerClass = handler
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
    thread.start()
    yield proxy
    proxy.shutdown()
    thread.join()
    proxy.server_close()


@pytest.fixture
def framing(moto_server: S3Server) -> Iterator[Proxy]:
    yield from served(moto_server, Framing)


@pytest.fixture
def plain(s3server: S3Server) -> Iterator[Proxy]:
    yield from served(s3server, _Handler)


def test_s34_a_store_that_keeps_the_framing_of_uploads_is_found_out_at_commit(
    framing: Proxy, tmp_path: Path
) -> None:
    """S34 (b): the checksum trailer ends up inside the stored file."""
    place = f"s3://test/{os.urandom(6).hex()}"
    repository = Repository.init(place, storage_options=framing.options)
    with pytest.raises(ObjectNotFoundError, match="aws-chunked"):
        repository.commit(draft({"m": noise(100_000)}))
    assert list(repository.snapshots()) == []
    assert list(repository.backend.list("pending")) == []


def test_s34_one_put_an_object_and_single_deletes_are_all_that_is_asked_of_a_server(
    plain: Proxy, s3_url: str
) -> None:
    """S34 (a): DeleteObjects and multipart uploads are POST requests; none is made."""
    repository = Repository.init(s3_url, storage_options=plain.options)
    name = repository.commit(draft({"m": noise(40 << 20), "n": b"1"})).name
    repository.forget(name)
    age(repository)
    stored = len(list(repository.store.list()))
    report = prune(repository, grace=0)
    assert (report.objects, report.failed) == (stored, [])
    assert list(repository.store.list()) == []
    assert plain.seen.count("DELETE") >= stored
    assert "POST" not in plain.seen


# -- local file systems


def refusing(times: int, tries: list[int]) -> Callable[[Any, Any], None]:
    real = os.replace

    def replace(source: Any, target: Any, **how: Any) -> None:
        tries.append(len(tries) + 1)
        if len(tries) <= times:
            raise PermissionError(13, "Permission denied", str(source), None, str(target))
        real(source, target, **how)

    return replace


def test_fs1_a_rename_that_is_refused_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FS1: a reader, an indexer or antivirus holds the target."""
    backend = new_repository("local", tmp_path).backend
    version = backend.create("note", b"1")
    tries: list[int] = []
    monkeypatch.setattr(os, "replace", refusing(2, tries))
    version = backend.replace("note", b"2", version)
    assert len(tries) == 3
    assert backend.get("note") == b"2"
    monkeypatch.setattr(os, "replace", refusing(1_000_000, tries := []))
    with pytest.raises(BackendError, match=r"permission.*note"):
        backend.replace("note", b"3", version)
    assert 1 < len(tries) < 100
    assert backend.get("note") == b"2"
    assert os.listdir(tmp_path / "store" / "tmp") == []
    assert backend.create_many([("note", b"2")]) == [None]


def test_fs1_readers_see_old_or_new_while_a_writer_replaces(tmp_path: Path) -> None:
    backend = new_repository("local", tmp_path).backend
    texts = [b"%d" % i * (1 + 50 * (i % 7)) for i in range(300)]
    version, done, seen = backend.create("note", texts[0]), threading.Event(), set[bytes]()

    def read() -> None:
        while not done.is_set():
            seen.add(backend.get("note"))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for text in texts[1:]:
            version = backend.replace("note", text, version)
    finally:
        done.set()
        reader.join()
    assert seen <= set(texts)
    assert backend.get("note") == texts[-1]


def test_fs2_writers_do_without_a_lock_that_excludes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FS2: flock gives no exclusion at all; only a prune beside writers rests on it."""
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    place = tmp_path / "store"

    def init(_: int) -> bool:
        try:
            Repository.init(place)
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(init, range(8))) == 1
    files = series(8)

    def commit(i: int) -> tuple[SnapshotName, dict[str, bytes]]:
        own = {"m": files[i % 8], "n": b"%d" % (i // 2)}
        return Repository.open(place).commit(draft(own), namespace="x").name, own

    with ThreadPoolExecutor(8) as pool:
        made = dict(pool.map(commit, range(32)))
    repository = Repository.open(place)
    assert len(made) == 32
    assert set(repository.snapshots()) == made.keys()
    assert all(contents(repository, name) == own for name, own in made.items())
    assert problems(repository) == []


def test_fs2_a_lock_that_hangs_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = new_repository("local", tmp_path)
    version = repository.backend.create("note", b"1")
    before = raw(repository)

    def held(fd: int, how: int) -> None:
        if how != fcntl.LOCK_UN:
            raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", held)
    monkeypatch.setattr("castore.repository.LOCK_TIMEOUT", 0.1)
    monkeypatch.setattr(local, "_REPLACE_TIMEOUT", 0.1)
    for act in (
        lambda: repository.commit(draft({"m": b"1"})),
        lambda: repository.backend.replace("note", b"2", version),
    ):
        with pytest.raises(BackendError, match="is held by"):
            act()
    assert raw(repository) == before


def test_fs2_on_a_network_file_system_prune_wants_to_hear_that_nobody_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    repository = new_repository("local", tmp_path)
    repository.forget(repository.commit(draft({"m": b"1"})).name)
    assert _said(caplog) == []
    real = os.path.realpath(tmp_path).replace(" ", r"\040")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:21 / / rw - ext4 /dev/sda1 rw\n"
        f"23 22 0:22 / {real} rw shared:1 - nfs4 server:/data rw\n"
        f"24 22 0:23 / {real}/store-of-another rw - ext4 /dev/sdb1 rw\n"
    )
    monkeypatch.setattr(_folder_lock, "_MOUNTS", mounts)
    age(repository)
    before = raw(repository)
    with caplog.at_level(logging.WARNING), pytest.raises(BackendError, match="--offline"):
        prune(Repository.open(repository.url), grace=0)
    assert raw(repository) == before
    [said] = _said(caplog)
    assert "one process at a time" in said
    assert prune(Repository.open(repository.url), grace=0, offline=True).objects == 2
    assert LocalBackend(str(tmp_path / "store-of-another")).probe()


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """By castore: other tests' servers and clients may still talk."""
    return [r.getMessage() for r in caplog.records if r.name.partition(".")[0] == "castore"]


@root_only
def test_fs3_users_of_one_group_share_a_repository_whatever_their_umask() -> None:
    """FS3: the second user cannot write into what the first one made."""
    top = Path(tempfile.mkdtemp())
    top.chmod(0o777)
    place = top / "store"
    place.mkdir(mode=0o770)
    os.chown(place, 50001, GROUP)
    one, two = series(2)

    def first() -> None:
        Repository.init(place, shared=True).commit(draft({"m": one}), namespace="a")

    def second() -> None:
        repository = Repository.open(place)
        assert repository.commit(draft({"m": one}), namespace="a").added == 0
        repository.commit(draft({"m_1": two}), namespace="b", base="a@latest:m")
        assert problems(repository) == []
        repository.forget("a@latest")
        prune(repository, grace=0)

    def stranger() -> None:
        with pytest.raises(BackendError, match="permission"):
            Repository.open(place)

    try:
        assert in_child(first, 50001, GROUP, 0o077) == 0
        assert in_child(second, 50002, GROUP, 0o077) == 0
        assert in_child(second, 50001, GROUP, 0o022) == 0
        assert in_child(stranger, 50003, 50003) == 0
        assert {p.stat().st_gid for p in place.rglob("*")} == {GROUP}
        assert problems(Repository.open(place)) == []
    finally:
        shutil.rmtree(top)


# -- forget and prune


def test_gc2_a_dedupe_hit_that_a_prune_takes_before_the_commit_is_put_back(tmp_path: Path) -> None:
    """GC2: "already present", and deleted before the snapshot that needs it is made."""
    repository, clock = clocked(new_repository("memory", tmp_path))
    orphan = noise(100_000)
    repository.forget(repository.commit(draft({"m": orphan})).name)
    clock.sleep(60)
    swept = []

    def before(call: Call) -> None:
        if call.method == "create" and call.name.startswith("pending/") and not swept:
            swept.append(prune(repository, grace=0))

    faulty = FaultyBackend(clock, hook=before)
    writer = with_backend(repository, faulty, sleep=clock.sleep)
    name = writer.commit(draft({"m": orphan})).name
    assert swept[0].objects == 2  # what the writer had found present
    assert repository.read(name, "m") == orphan
    assert problems(repository) == []


def test_gc2_a_prune_waits_for_a_local_commit_that_stands_still(tmp_path: Path) -> None:
    """GC2: objects are uploaded, nothing refers to them yet, the writer is frozen."""
    repository = new_repository("local", tmp_path)
    orphan = noise(100_000)
    repository.forget(repository.commit(draft({"m": orphan})).name)
    frozen, go_on = threading.Event(), threading.Event()

    def before(call: Call) -> None:
        if call.method == "create" and call.name.startswith("snapshots/"):
            frozen.set()
            assert go_on.wait(60)

    writer = with_backend(repository, FaultyBackend(repository.backend, hook=before))
    with ThreadPoolExecutor(2) as pool:
        commit = pool.submit(writer.commit, draft({"m": orphan, "n": noise(1000, 1)}))
        assert frozen.wait(60)
        pruner = pool.submit(prune, Repository.open(repository.url), grace=0)
        time.sleep(0.3)
        waits = not pruner.done()
        go_on.set()
        name = commit.result(60).name
        pruner.result(60)
    assert waits
    assert repository.read(name, "m") == orphan
    assert problems(repository) == []


def test_gc4_a_prune_that_could_not_delete_all_says_so_and_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GC4: failures of single deletes counted as success."""
    repository = new_repository("local", tmp_path)
    repository.forget(repository.commit(draft({f"{i}": noise(500, i) for i in range(20)})).name)
    age(repository)
    stuck = sorted(headers(repository))[7]
    real = LocalBackend.delete_many

    def delete_many(self: Any, names: Any, expires: Any = None) -> list[Any]:
        return [
            BackendError("refused") if n.endswith(stuck) else real(self, [n], expires)[0]
            for n in names
        ]

    monkeypatch.setattr(LocalBackend, "delete_many", delete_many)
    words = ["prune", "-r", repository.url, "--grace", "0", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 3
    assert '"kind": "undeleted"' in result.stdout
    assert '"objects": 20' in result.stdout.splitlines()[-1]  # 20 files and a tree, less one
    assert set(headers(repository)) == {stuck}
    monkeypatch.undo()
    assert CliRunner().invoke(app, words).exit_code == 0
    assert headers(repository) == {}


def test_gc8_clearing_one_run_leaves_the_run_it_was_resumed_from(repository: Repository) -> None:
    """GC8: retention deletes the checkpoint a run was resumed from; and the other way round."""
    array = weights()
    start = safetensors({"w": array})
    origin = repository.commit(draft({"step_1": start}), namespace="a").name
    base = f"{origin}:step_1"
    later = [safetensors({"w": drift(array, i, 1e-4)}) for i in (1, 2)]
    resumed = [
        repository.commit(draft({"step_2": data}), namespace="b", base=base).name for data in later
    ]
    assert any(h.base for h in headers(repository).values())
    repository.forget(resumed[0])  # keep_last=1
    age(repository)
    prune(repository, grace=0)
    assert list(repository.snapshots("a")) == [origin]
    assert list(repository.snapshots("b")) == [resumed[1]]
    assert repository.read(origin, "step_1") == start
    assert repository.read(resumed[1], "step_2") == later[1]
    repository.forget(origin)
    age(repository)
    prune(without_pause(repository), grace=0)
    assert repository.read(resumed[1], "step_2") == later[1]
    assert problems(repository) == []


def without_pause(repository: Repository) -> Repository:
    """The same repository with no pause between two sweeps."""
    return Repository(repository.backend, repository.id, Patience(overdue=0))


# -- content, command line


def test_cc5_a_tree_too_large_to_be_read_back_is_refused_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CC5: written without complaint, never to be opened again."""
    repository = new_repository("memory", tmp_path)
    monkeypatch.setattr(save, "MAX_CONTENT", 10_000)
    with pytest.raises(InvalidInputError, match="at most 10000"):
        repository.commit(draft({f"{'long' * 20}{i}": b"1" for i in range(200)}))
    assert list(repository.snapshots()) == []
    assert [h.content_length for h in headers(repository).values()] == [1]


def test_cc5_a_file_whose_header_no_reader_takes_is_kept_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_cutter, "_HEADER", 1000)
    data = safetensors({"w": weights()}, {"note": "x" * 2000})
    repository = new_repository("memory", tmp_path)
    assert repository.read(repository.commit(draft({"m": data})).name, "m") == data


@kinds
def test_ux1_what_a_commit_costs_does_not_grow_with_the_history(kind: str, tmp_path: Path) -> None:
    """UX1: everything read again after one change."""
    made = new_repository(kind, tmp_path)
    faulty = FaultyBackend(made.backend)
    repository = with_backend(made, faulty)
    costs = []
    for i in range(40):
        faulty.calls.clear()
        repository.commit(draft({"m": noise(70_000, i), "n": noise(10, i)}))
        costs.append(Counter(call.method for call in faulty.calls))
    assert costs[2] == costs[39]
    faulty.calls.clear()
    newest = repository.resolve("main@latest")
    assert [c.method for c in faulty.calls] == ["list"]
    faulty.calls.clear()
    names = list(repository.snapshots())
    assert names[0] == newest
    assert len(names) == 40
    assert {c.method for c in faulty.calls} == {"folders", "list"}


def test_ux1_a_slow_store_is_waited_for_in_parallel(tmp_path: Path) -> None:
    repository = new_repository("memory", tmp_path)
    name = repository.commit(draft({f"{i}": noise(100, i) for i in range(60)})).name
    tree = object_name(repository.snapshot(name).tree)
    arrived, second = list[str](), threading.Event()

    def before(call: Call) -> None:
        """The first answer of the store waits for a second request."""
        if call.name.startswith("objects/") and call.name != tree:
            arrived.append(call.name)
            if len(arrived) > 1:
                second.set()
            assert second.wait(60)

    slow = FaultyBackend(repository.backend, hook=before)
    slow.parallel = 16
    with_backend(repository, slow).checkout(name, tmp_path / "out")
    assert len(folder(tmp_path / "out")) == 60
    assert second.is_set()


# -- security


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def hostile_files(marker: Path) -> dict[str, bytes]:
    evil = pickle.dumps(Evil(marker))
    weights_zip, npz = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(weights_zip, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", evil)
        archive.writestr("archive/data/0", noise(100_000))
        archive.writestr("archive/version", "3\n")
    np.savez(npz, a=np.array([Evil(marker)] * 1, dtype=object), b=weights())
    return {
        "weights.pt": weights_zip.getvalue(),
        "optimizer.pth": evil,
        "rng.ckpt": evil + bytes(100_000),
        "_architecture.pkl": evil,
        "trace.npz": npz.getvalue(),
    }


@kinds
def test_se1_a_pickle_is_never_run(kind: str, tmp_path: Path) -> None:
    """SE1: whatever is committed, listed, checked, read and checked out."""
    marker = tmp_path / "executed"
    files = hostile_files(marker)
    repository = new_repository(kind, tmp_path)
    name = repository.commit(draft(files)).name
    assert problems(repository, layout=True) == []
    assert contents(repository, name) == files
    repository.checkout(name, tmp_path / "out", sha256=True)
    assert repository.commit([tmp_path / "out"]).added == 0
    assert not marker.exists()
    pickle.loads(files["optimizer.pth"])
    assert marker.is_dir()  # it would have been


def test_se1_se3_nothing_in_the_package_can_run_what_it_reads() -> None:
    """SE1, SE3: no unpickling, no YAML, no evaluation, in any module that users run."""
    barred = {"cloudpickle", "code", "dill", "joblib", "marshal", "pickle", "shelve", "yaml"}
    for path in PACKAGE.rglob("*.py"):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("compile", "eval", "exec", "__import__"), path
            assert not barred & {n.split(".")[0] for n in names}, path


@pytest.mark.parametrize(
    "text",
    [
        b"!!python/object/apply:os.mkdir ['MARKER']\n",
        b"kind: !!python/tuple [config]\n",
        b"&a [*a, *a, *a, *a, *a, *a, *a, *a]\n",
        b"[" * 20_000_000,
        b'{"a":' * 4_000_000,
        b'{"kind":"config","format":1,"hash":"blake3-256","id":' + b"9" * 100_000 + b"}\n",
    ],
    ids=["apply", "tuple", "aliases", "brackets", "braces", "number"],
)
def test_se3_a_hostile_document_is_refused_and_runs_nothing(text: bytes, tmp_path: Path) -> None:
    """SE3: and a hostile settings file in a run is bytes like any other."""
    marker = tmp_path / "executed"
    text = text.replace(b"MARKER", str(marker).encode())
    repository = new_repository("local", tmp_path)
    name = repository.commit(draft({"config.yaml": text})).name
    assert repository.read(name, "config.yaml") == text
    (tmp_path / "store" / "config.json").write_bytes(text)
    with pytest.raises(FormatError, match=r"config\.json"):
        Repository.open(repository.url)
    (tmp_path / "store" / name.path).write_bytes(text)
    with pytest.raises(CastoreError, match=name.id):
        repository.snapshot(name)
    assert not marker.exists()
