"""What a hostile or unlucky environment did to castore once, and must not do again."""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from castore import Repository, document
from castore.backends import open_backend
from castore.check import check
from castore.commit import Committer, Options
from castore.digest import digest_of
from castore.errors import BackendError, CastoreError, FormatError, InvalidInputError
from castore.frame import Parts
from castore.objects import ObjectStore, object_name
from castore.pending import Blob, PendingFile
from castore.snapshot import Snapshot, name_of
from castore.source import DiskFile, Draft, MemoryFile, scan
from castore.tree import DEEPEST, File, Folder, Slice
from castore.walk import Walker
from tests.helpers import encode_raw

BLOB = b"x" * 1000
DIGEST = digest_of(BLOB)
FILE = {
    "type": "file",
    "size": len(BLOB),
    "sha256": hashlib.sha256(BLOB).hexdigest(),
    "executable": False,
    "blobs": [DIGEST],
    "slices": [[0, 0, len(BLOB)]],
}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository.init(tmp_path / "store")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "sub").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("mine")
    (tmp_path / "run" / "sub" / "weights").write_bytes(BLOB)
    return tmp_path / "run"


def plant(repository: Repository, entries: dict[str, object]) -> str:
    """A snapshot of a tree that no castore would write; gives its id."""
    tree = document.encode("tree", {"entries": entries})
    for content in (BLOB, tree):
        repository.backend.create(object_name(digest_of(content)), encode_raw(content))
    now = 1_700_000_000_000_000
    data = Snapshot(digest_of(tree), now, "main").encode()
    name = name_of(data, "main", "snapshot", now)
    repository.backend.create(name.path, data)
    return name.id


# -- commit


def test_a_write_that_fails_in_the_middle_of_a_large_file_ends_the_commit(
    repository: Repository, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk left blobs that nobody would ever store, and the commit waited for them."""
    with (run / "large").open("wb") as f:
        f.truncate(200 << 20)
        for i in range(0, 200, 16):
            f.seek(i << 20)
            f.write(os.urandom(16))
    failed = threading.Event()

    def full(self: ObjectStore, frames: list[tuple[str, Parts]]) -> list[bool]:
        failed.set()
        raise BackendError("the disk is full")

    monkeypatch.setattr(ObjectStore, "write_many", full)
    outcome: list[BaseException] = []

    def commit() -> None:
        try:
            repository.commit([run])
        except CastoreError as e:
            outcome.append(e)

    thread = threading.Thread(target=commit, daemon=True)
    thread.start()
    thread.join(120)
    assert failed.is_set() and not thread.is_alive()
    assert "the disk is full" in str(outcome[0])


def test_a_pipe_that_takes_the_place_of_a_scanned_file_is_not_waited_for(run: Path) -> None:
    path = run / "config.json"
    entry = scan([run])["config.json"]
    path.unlink()
    os.mkfifo(path)
    assert isinstance(entry, DiskFile)
    with pytest.raises(InvalidInputError, match="changed while it was read"):
        entry.open()


def test_thousands_of_files_of_one_size_are_not_compared_with_each_other(
    repository: Repository,
) -> None:
    """The time for a commit of many small files grew with the square of their number."""
    known = File(3, "0" * 64, False, (Slice("1" * 64, 0, 3),))
    earlier = {str(i): known for i in range(5000)}
    committer = Committer(
        repository.store, Options(), earlier, lambda _: None, progress=lambda _: None
    )
    file = PendingFile("0", MemoryFile(b"abc"))
    file.slices = [(Blob(file, [(0, 3)], 3, 1, 0, 0), 0, 3)]
    committer._hold(file)
    assert file.holding and len(file.candidates) <= 40


def test_the_repository_cannot_be_committed_to_itself(repository: Repository) -> None:
    for path in (repository.url, f"{repository.url}/objects"):
        with pytest.raises(InvalidInputError, match="in the repository itself"):
            repository.commit([path])


def test_folders_nested_too_deep_are_refused(repository: Repository, tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    (deep / "/".join("d" * (DEEPEST + 2))).mkdir(parents=True)
    with pytest.raises(InvalidInputError, match="folders within folders"):
        repository.commit([deep])
    for entry in (MemoryFile(b"x"), Folder()):
        with pytest.raises(InvalidInputError, match="folders within folders"):
            repository.commit(Draft({"d/" * (DEEPEST + 1) + "x": entry}))
    name = repository.commit(Draft({"d/" * DEEPEST + "x": MemoryFile(b"x")})).name
    repository.checkout(name, tmp_path / "out")


# -- checkout


def test_folders_nested_as_deep_as_allowed_come_back(
    repository: Repository, tmp_path: Path
) -> None:
    deep = tmp_path / "deep"
    deepest = deep / "/".join("d" * DEEPEST)
    deepest.mkdir(parents=True)
    (deepest / "file").write_bytes(BLOB)
    name = repository.commit([deep]).name
    repository.checkout(name, tmp_path / "out")
    assert (tmp_path / "out" / deepest.relative_to(deep) / "file").read_bytes() == BLOB


@pytest.mark.parametrize("entry", [FILE, {"type": "folder"}])
def test_a_tree_that_nests_too_deep_is_refused_before_anything_is_made(
    repository: Repository, tmp_path: Path, entry: object
) -> None:
    name = plant(repository, {"/".join("d" * 1500): entry})
    (tmp_path / "below").mkdir()
    with pytest.raises(FormatError, match="folders within folders"):
        repository.checkout(name, tmp_path / "below" / "out")
    assert [p.kind for p in check(repository)] == ["malformed"]
    assert not list((tmp_path / "below").iterdir())


@pytest.mark.parametrize("within", ["", "objects/new", "tmp"])
def test_nothing_is_checked_out_into_the_repository(
    repository: Repository, run: Path, tmp_path: Path, within: str
) -> None:
    name = repository.commit([run]).name
    (tmp_path / "link").symlink_to(repository.url)
    for root in (Path(repository.url), tmp_path / "link"):
        with pytest.raises(InvalidInputError, match="in the repository itself"):
            repository.checkout(name, root / within, force=True)
    assert Repository.open(repository.url).id == repository.id


def test_checkout_into_the_working_folder_keeps_it(
    repository: Repository, run: Path, tmp_path: Path
) -> None:
    name = repository.commit([run]).name
    here = tmp_path / "here"
    here.mkdir()
    code = (
        "import os, sys; from castore import Repository;"
        "Repository.open(sys.argv[1]).checkout(sys.argv[2], '.'); print(sorted(os.listdir()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, repository.url, str(name)],
        cwd=here,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['config.json', 'sub']\n", done.stderr


def test_checkout_through_a_link_to_an_empty_folder(
    repository: Repository, run: Path, tmp_path: Path
) -> None:
    name = repository.commit([run]).name
    (tmp_path / "real").mkdir(mode=0o750)
    (tmp_path / "link").symlink_to("real")
    repository.checkout(name, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o750
    assert sorted(p.name for p in (tmp_path / "real").iterdir()) == ["config.json", "sub"]


def test_an_interrupted_walk_stops_its_threads(repository: Repository) -> None:
    """Ctrl-C used to wait until everything was read."""
    digests = []
    for i in range(300):
        content = str(i).encode() * 10
        digests.append(digest_of(content))
        repository.backend.create(object_name(digests[-1]), encode_raw(content))
    seen: list[str] = []

    def sink(digest: str, *_: object) -> None:
        seen.append(digest)
        if len(seen) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            until = time.monotonic() + 60
            while walker._failed is None and time.monotonic() < until:
                time.sleep(0.01)

    walker = Walker(repository.store, digests, sink)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            walker.run([digests], 1, lambda _: 10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) == 5


# -- check, snapshots


@pytest.mark.parametrize("slice_", [[0, 0, 1 << 61], [0, 1 << 40, 1000], [0, 1, 1000]])
def test_check_tells_of_a_tree_that_wants_more_than_a_blob_has(
    repository: Repository, slice_: list[int]
) -> None:
    name = plant(repository, {"a": {**FILE, "size": slice_[2], "slices": [slice_]}})
    problem = next(iter(check(repository)))
    assert problem.kind == "malformed" and DIGEST in problem.detail
    assert any(name in snapshot for snapshot, _ in problem.needed_by)


def test_counts_too_large_for_anything_are_malformed() -> None:
    good = Snapshot("0" * 64, 1, "main").encode()
    bad = good.replace(b'"size":0', b'"size":1' + b"0" * 400)
    assert bad != good
    with pytest.raises(FormatError):
        Snapshot.decode(bad)


def test_the_newest_snapshots_are_found_without_listing_all(
    repository: Repository, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [repository.commit([run], labels={"n": str(i)}).name for i in range(5)]
    asked: list[int | None] = []
    listing = repository.backend.list

    def counted(prefix: str, after: str | None = None, limit: int | None = None) -> object:
        asked.append(limit)
        return listing(prefix, after, limit)

    monkeypatch.setattr(repository.backend, "list", counted)
    assert list(repository.snapshots("main", limit=2)) == names[:-3:-1]
    assert asked == [100]
    assert list(repository.snapshots("main", limit=200)) == names[::-1]
    assert list(repository.snapshots("main")) == names[::-1]


def test_equal_commits_of_one_moment_can_be_named(
    repository: Repository, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store's clock may tick once a second: equal documents then share an id."""
    monkeypatch.setattr(repository.backend, "now", lambda: 1_700_000_000.0)
    first, second = (repository.commit([run]).name for _ in range(2))
    assert first != second and first.id == second.id
    assert repository.resolve(str(first)) == second
    repository.checkout(str(first), tmp_path / "out")
    for _ in range(2):
        repository.forget(str(first))
    assert not list(repository.snapshots())
    repository.unforget(str(first))
    assert len(list(repository.snapshots())) == 1


def test_a_password_in_a_url_is_not_pickled_or_told() -> None:
    for protocol in ("ftp", "simplecache::s3"):
        backend = open_backend(f"{protocol}://me:hunter2secret@127.0.0.1:1/x")
        with pytest.raises(BackendError) as caught:
            backend.get("config.json")
        assert "hunter2secret" not in f"{caught.value}{backend!r}{backend.url}"
        assert b"hunter2secret" not in pickle.dumps(backend)


def test_a_file_that_gives_more_than_its_size_is_refused(tmp_path: Path) -> None:
    """Files under /proc say 0 bytes and give some: storing nothing in silence would be a loss."""
    repository = Repository.init(tmp_path / "store")
    with pytest.raises(InvalidInputError, match="changed while it was read"):
        repository.commit(["/proc/self/status"])
    assert not list(repository.snapshots())
