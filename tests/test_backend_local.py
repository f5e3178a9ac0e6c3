"""What only a local folder has: locks, groups, full disks, links, versions."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from castore.backend import MISSING
from castore.backends._folder_write import NewFile
from castore.backends.local import LocalBackend
from castore.errors import AlreadyExistsError, BackendError

GROUP = 54321
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs to become other users")


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    made = LocalBackend(str(tmp_path / "store"))
    made.prepare(shared=False)
    return made


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own are private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def in_child(work: Callable[[], object], uid: int = 0, gid: int = 0, umask: int = 0o022) -> int:
    """Run ``work`` in a forked child as that user; 0 when it returned."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if uid:
                os.setgroups([])
                os.setgid(gid)
                os.setuid(uid)
            os.umask(umask)
            work()
            code = 0
        except BaseException as e:
            print(f"child: {type(e).__name__}: {e}", flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fails_with(text: str, work: Callable[[], object]) -> Callable[[], None]:
    def check() -> None:
        with pytest.raises(BackendError, match=text):
            work()

    return check


# -- groups and permissions


@root_only
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_users_of_one_group_share_a_repository(open_folder: Path, umask: int) -> None:
    root = open_folder / "store"
    root.mkdir(mode=0o770)
    os.chown(root, 50001, GROUP)
    store = LocalBackend(str(root))

    def first() -> None:
        store.prepare(shared=True)
        store.create("objects/ab/1", b"1")
        store.replace("prune.json", b"1", MISSING)
        with store.lock(exclusive=False, timeout=1):
            pass

    def second() -> None:
        assert store.get("objects/ab/1") == b"1"
        store.create("objects/ab/2", b"2")
        store.create("objects/cd/1", b"1")
        assert store.create_many([("objects/ab/1", b"1")]) == [None]
        store.replace("prune.json", b"2", store.stat("prune.json").version)
        with store.lock(exclusive=True, timeout=1):
            store.delete("objects/ab/1")

    def third() -> None:
        store.create("objects/cd/3", b"3")
        assert store.get("prune.json") == b"2"

    assert in_child(first, 50001, GROUP, umask) == 0
    assert in_child(second, 50002, GROUP, umask) == 0
    assert in_child(third, 50001, GROUP, umask) == 0
    assert {p.stat().st_gid for p in root.rglob("*")} == {GROUP}
    stranger = fails_with("permission", lambda: store.get("objects/cd/1"))
    assert in_child(stranger, 50003, 50003) == 0


@root_only
def test_without_permission_it_says_so(open_folder: Path) -> None:
    store = LocalBackend(str(open_folder / "store"))
    store.prepare(shared=False)
    store.create("objects/ab/1", b"1")

    def reader() -> None:
        assert store.get("objects/ab/1") == b"1"
        assert len(list(store.list(""))) == 1
        fails_with("no permission", lambda: store.create("objects/ab/2", b"2"))()
        fails_with("no permission", lambda: store.create("objects/cd/2", b"2"))()
        fails_with("no permission", lambda: store.delete("objects/ab/1"))()
        fails_with("cannot be opened", lambda: store.lock(exclusive=False, timeout=1).__enter__())()

    assert in_child(reader, 50001, GROUP) == 0
    (open_folder / "store" / "objects").chmod(0o700)
    assert in_child(fails_with("permission", lambda: list(store.list(""))), 50001, GROUP) == 0


# -- full disks and other trouble


@root_only
def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here; the limit below is tested anyway")
    try:
        store = LocalBackend(str(small))
        store.prepare(shared=False)
        store.create("objects/ab/1", b"1")
        with pytest.raises(BackendError, match="disk is full"):
            store.create_many([("objects/ab/2", b"2"), ("objects/ab/3", bytes(2 << 20))])
        with pytest.raises(BackendError, match="disk is full"):
            store.replace("prune.json", bytes(2 << 20), MISSING)
        assert [s.name for s in store.list("")] == ["objects/ab/1"]
        assert list(store.list("tmp")) == []
        store.create("objects/ab/4", bytes(500_000))
    finally:
        subprocess.run(["umount", str(small)], check=True)


@root_only
def test_a_read_only_file_system_is_read_from_and_says_so(tmp_path: Path) -> None:
    store, run = tmp_path / "store", tmp_path / "run"
    run.mkdir()
    (run / "m").write_bytes(b"1")
    castore = f'"{sys.executable}" -m castore.cli'
    script = f"""
        {castore} init -r store && {castore} commit -r store run || exit 90
        mount --bind store store && mount -o remount,ro,bind store || exit 91
        {castore} cat -r store latest:m && {castore} check -r store --read-data || exit 92
        {castore} prune -r store --dry-run --grace 0 || exit 93
        {castore} forget -r store latest; echo $? >> codes
        {castore} commit -r store run; echo $? >> codes
        umount store && {castore} check -r store --read-data
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode in (1, 91) and "permitted" in done.stderr:
        pytest.skip("may not mount here")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "codes").read_text().split() == ["13", "13"]
    assert done.stderr.lower().count("read-only file system") == 2
    assert "permission" not in done.stderr
    assert len(list((store / "snapshots").rglob("*.json"))) == 1
    assert not (store / "forgotten").exists()


def test_a_size_limit_leaves_nothing(backend: LocalBackend) -> None:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        fails_with("could not write", lambda: backend.create("a", bytes(5000)))()
        backend.create("b", bytes(500))

    assert in_child(limited) == 0
    assert [s.name for s in backend.list("")] == ["b"]


def test_more_files_than_may_be_open(backend: LocalBackend) -> None:
    items = [(f"objects/{i % 16:02}/{i}", b"x") for i in range(600)]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        assert None not in backend.create_many(items)

    assert in_child(limited) == 0
    assert len(list(backend.list("objects"))) == 600


def test_a_vanished_root_is_not_empty(backend: LocalBackend, tmp_path: Path) -> None:
    backend.create("a", b"")
    (tmp_path / "store").rename(tmp_path / "moved")
    calls: list[Callable[[], object]] = [
        lambda: backend.get("a"),
        lambda: backend.stat("a"),
        lambda: list(backend.list("objects")),
        lambda: backend.folders(""),
        lambda: backend.create("b", b""),
        lambda: backend.replace("b", b"", MISSING),
        lambda: backend.delete("a"),
        lambda: backend.lock(exclusive=False, timeout=1).__enter__(),
    ]
    for call in calls:
        with pytest.raises(BackendError, match="store"):
            call()
    assert not (tmp_path / "store").exists()


def test_links_are_not_followed(backend: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "store" / "planted").symlink_to(tmp_path / "secret")
    (tmp_path / "store" / "lock").symlink_to(tmp_path / "secret")
    for call in (backend.get, backend.stat):
        with pytest.raises(BackendError, match="symbolic link"):
            call("planted")
    assert list(backend.list("")) == []
    with pytest.raises(AlreadyExistsError):
        backend.create("planted", b"x")
    with pytest.raises(BackendError), backend.lock(exclusive=True, timeout=1):
        pass
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_file_systems_without_unnamed_files(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NewFile, "_open", NewFile.named)
    version = backend.create("a", b"1")
    backend.replace("a", b"2", version)
    with pytest.raises(AlreadyExistsError):
        backend.create("a", b"3")
    assert backend.get("a") == b"2"
    assert list(backend.list("tmp")) == []


def test_a_version_never_comes_back(backend: LocalBackend) -> None:
    versions = [backend.create("a", b"0")]
    for i in range(150):
        if i % 3:
            versions.append(backend.replace("a", b"%d" % (i % 2), versions[-1]))
        else:
            backend.delete("a")
            versions.append(backend.create("a", b"0"))
    assert len(set(versions)) == len(versions)


def test_a_folder_that_another_writer_replaced_is_made_again(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename may replace a folder that is empty still; what resolved it before finds nothing."""
    real, left = Path.rename, [3]

    def rename(self: Path, target: Path) -> Path:
        if left[0] and target.name == "ab":
            left[0] -= 1
            raise FileNotFoundError(2, "No such file or directory", str(self), None, str(target))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    backend.create("objects/ab/1", b"1")
    assert (backend.get("objects/ab/1"), left) == (b"1", [0])
    assert list(backend.list("tmp")) == []


# -- the lock


def test_the_lock_names_its_holders(backend: LocalBackend) -> None:
    for held, wanted in ((True, False), (False, True), (True, True)):
        with (
            backend.lock(exclusive=held, timeout=1),
            pytest.raises(BackendError, match=f"held by process {os.getpid()}"),
            backend.lock(exclusive=wanted, timeout=0.1),
        ):
            pass


def test_overlapping_commits_do_not_starve_prune(backend: LocalBackend) -> None:
    done = threading.Event()

    def commits() -> None:
        while not done.is_set():
            with backend.lock(exclusive=False, timeout=60):
                time.sleep(0.03)

    threads = [threading.Thread(target=commits) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            with backend.lock(exclusive=True, timeout=60):
                pass
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("end", [signal.SIGKILL, None])
def test_a_forked_child_does_not_keep_the_lock(backend: LocalBackend, end: int | None) -> None:
    read, write = os.pipe()
    holder = os.fork()
    if holder == 0:
        lock = backend.lock(exclusive=True, timeout=60)
        lock.__enter__()
        grandchild = os.fork()
        if grandchild == 0:
            time.sleep(600)
            os._exit(0)
        os.write(write, str(grandchild).encode() + b"\n")
        if end is None:
            lock.__exit__(None, None, None)
        time.sleep(600)
        os._exit(0)
    grandchild = int(os.read(read, 100))
    try:
        if end:
            os.kill(holder, end)
        with backend.lock(exclusive=True, timeout=60):
            os.kill(grandchild, 0)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(read)
        os.close(write)
