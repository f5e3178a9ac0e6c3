"""Real files of a root: written whole, and never over somebody's edit; local and on S3."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from castore import BackendError, CorruptObjectError, InvalidInputError, ObjectNotFoundError
from castore.digest import Buffer
from castore_experiments import layout
from castore_experiments.files import Files, open_files
from castore_experiments.local_files import LocalFiles
from castore_experiments.view import View, wanted_weights
from tests.drivers.experiments.places import KINDS, place
from tests.helpers import ODD_ROOTS

HASH = "01234567" * 3
CONFIG = layout.config_path("01234567")
WEIGHTS = layout.weights_path(HASH, 100)
ONE, TWO, EDIT = b"one" * 1000, b"two" * 1000, b"axe" * 1000


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return open_files(place(request.param, request, tmp_path))


def view_of(files: Files, *committed: bytes) -> View:
    return View(files, lambda path, digest: digest in {sha(c) for c in committed})


def raw(files: Files, path: str) -> bytes:
    return open_files(files.url).get(layout.in_root(path))


def edit(files: Files, path: str, data: bytes) -> None:
    """Write as another program does: in place."""
    if isinstance(files, LocalFiles):
        with open(f"{files.url}/{layout.in_root(path)}", "r+b") as file:
            file.write(data)
            file.truncate()
    else:
        name = layout.in_root(path)
        files.replace(name, data, files.stat(name).version)


def test_written_replaced_and_removed(files: Files) -> None:
    view = view_of(files, ONE, TWO)
    assert view.look(CONFIG) is None
    assert view.remove(CONFIG) == "missing"
    assert view.write(CONFIG, ONE) == "written"
    assert view.write(CONFIG, ONE) == "same"
    assert raw(files, CONFIG) == ONE
    assert view.write(CONFIG, TWO, sha(TWO)) == "written"
    assert (raw(files, CONFIG), view.look(CONFIG)) == (TWO, sha(TWO))
    assert view.remove(CONFIG) == "removed"
    with pytest.raises(ObjectNotFoundError):
        raw(files, CONFIG)


def test_another_view_agrees(files: Files) -> None:
    view_of(files, ONE).write(CONFIG, ONE)
    other = view_of(files, ONE, TWO)
    assert other.write(CONFIG, ONE) == "same"
    assert other.write(CONFIG, TWO) == "written"


@pytest.mark.parametrize("fresh", [False, True])
def test_an_edited_file_is_kept(files: Files, fresh: bool) -> None:
    """A root file is replaced or removed only when its SHA-256 equals a committed file's."""
    view = view_of(files, ONE, TWO)
    view.write(CONFIG, ONE)
    edit(files, CONFIG, EDIT)
    looking = view_of(files, ONE, TWO) if fresh else view
    assert looking.write(CONFIG, TWO) == "kept"
    assert looking.write(CONFIG, ONE) == "kept"
    assert looking.remove(CONFIG) == "kept"
    assert raw(files, CONFIG) == EDIT
    assert looking.look(CONFIG) == sha(EDIT)


def test_a_foreign_file_with_the_right_content_is_fine(files: Files) -> None:
    files.create(layout.in_root(CONFIG), ONE)
    assert view_of(files).write(CONFIG, ONE) == "same"
    assert view_of(files).remove(CONFIG) == "kept"


def test_parts(files: Files) -> None:
    view = view_of(files, ONE)
    parts: list[Buffer] = [ONE[:7], memoryview(ONE)[7:100], bytearray(ONE[100:])]
    assert view.write(WEIGHTS, lambda: iter(parts), sha(ONE)) == "written"
    assert raw(files, WEIGHTS) == ONE
    assert view.write(WEIGHTS, lambda: iter(parts), sha(ONE)) == "same"
    with pytest.raises(InvalidInputError, match="SHA-256"):
        view.write(WEIGHTS, lambda: iter(parts))


def test_parts_that_are_not_what_was_promised_get_no_name(files: Files) -> None:
    view = view_of(files, ONE)
    view.write(WEIGHTS, ONE)
    with pytest.raises(CorruptObjectError) as error:
        view.write(WEIGHTS, lambda: iter([TWO[:50]]), sha(TWO))
    assert (error.value.expected, error.value.actual) == (sha(TWO), sha(TWO[:50]))
    assert raw(files, WEIGHTS) == ONE
    assert [s.name for s in files.list("checkpoints")] == [layout.in_root(WEIGHTS)]


def test_parts_that_fail_half_way_leave_what_was(files: Files) -> None:
    view = view_of(files, ONE)
    view.write(WEIGHTS, ONE)

    def failing() -> Iterator[bytes]:
        yield TWO[:50]
        raise RuntimeError("the repository went away")

    with pytest.raises(RuntimeError):
        view.write(WEIGHTS, failing, sha(TWO))
    assert raw(files, WEIGHTS) == ONE
    if isinstance(files, LocalFiles):
        assert len(list(Path(files.url).rglob("*.*"))) == 1


def test_larger_than_a_blob(files: Files) -> None:
    """A weight file may be larger than what one blob holds."""
    large = bytes(70 << 20)
    view = view_of(files, large)
    assert view.write(WEIGHTS, large) == "written"
    assert files.stat(layout.in_root(WEIGHTS)).size == len(large)
    assert view.write(WEIGHTS, large) == "same"


@pytest.mark.parametrize("name", ODD_ROOTS)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_names_s37(
    kind: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    files = open_files(place(kind, request, tmp_path, name))
    view = view_of(files, ONE)
    view.write(WEIGHTS, ONE)
    assert (raw(files, WEIGHTS), view.weights()) == (ONE, [WEIGHTS])


def test_which_weights_stand_there(files: Files) -> None:
    view = view_of(files)
    assert view.weights() == []
    paths = [layout.weights_path(HASH, s) for s in (5, 1_000_000)]
    for path in paths:
        view.write(path, ONE)
    view.write(CONFIG, ONE)
    files.create("checkpoints/models/01234567/projection/x.pt", ONE)
    files.create("checkpoints/models/01234567/notes.txt", ONE)
    assert view.weights() == sorted(paths)


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "manifest.yaml", "models/01234567/../x.pt", "", "HP"]
)
def test_only_documents_se2(files: Files, path: str) -> None:
    """SE2: nothing is read or written outside."""
    view = view_of(files, ONE)
    calls: list[Callable[[], object]] = [
        lambda: view.write(path, ONE),
        lambda: view.remove(path),
        lambda: view.look(path),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match="no document"):
            call()


def test_what_is_to_be_real() -> None:
    every = ["a", "b", "c"]
    assert wanted_weights("documents", "b", every) == set()
    assert wanted_weights("latest", "b", every) == {"b"}
    assert wanted_weights("latest", None, []) == set()
    assert wanted_weights("all", "b", every) == {"a", "b", "c"}


# -- local only


def test_same_size_and_time_is_not_same_content_fs6(tmp_path: Path) -> None:
    """FS6: content decides; the destination holds another file of the same size and mtime."""
    files = LocalFiles(str(tmp_path))
    view, path = view_of(files, ONE, TWO), tmp_path / layout.in_root(CONFIG)
    view.write(CONFIG, ONE)
    before = path.stat()
    time.sleep(0.02)  # the kernel's clock must have moved on
    edit(files, CONFIG, EDIT)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert view.write(CONFIG, ONE) == "kept"
    assert path.read_bytes() == EDIT


def test_an_edit_at_once_is_seen_fs6(tmp_path: Path) -> None:
    """FS6: edits within the clock's granularity are not missed."""
    files = LocalFiles(str(tmp_path))
    view = view_of(files, ONE, TWO)
    for _ in range(50):
        assert view.write(CONFIG, ONE) == "written"
        edit(files, CONFIG, TWO)
        assert view.look(CONFIG) == sha(TWO)


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002])
def test_modes_are_those_of_the_folder(tmp_path: Path, umask: int) -> None:
    """A shared root's files are its group's, whoever writes."""
    tmp_path.chmod(0o2775)
    old = os.umask(umask)
    try:
        view_of(LocalFiles(str(tmp_path)), ONE).write(CONFIG, ONE)
    finally:
        os.umask(old)
    path = tmp_path / layout.in_root(CONFIG)
    assert path.stat().st_mode & 0o777 == 0o664
    assert path.parent.stat().st_mode & 0o7777 == 0o2775


def test_a_full_disk_leaves_what_was_mc1(tmp_path: Path) -> None:
    """MC1: RLIMIT_FSIZE during weights: the old state fully usable, the error surfaces."""
    files = LocalFiles(str(tmp_path))
    view_of(files, ONE).write(WEIGHTS, ONE)
    script = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
from castore import BackendError
from castore_experiments.local_files import LocalFiles
from castore_experiments.view import View
try:
    View(LocalFiles({str(tmp_path)!r}), lambda *_: True).write({WEIGHTS!r}, bytes(20_000))
except BackendError as e:
    print(e)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "File too large" in out.stdout and str(tmp_path) in out.stdout
    assert raw(files, WEIGHTS) == ONE
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [WEIGHTS.rpartition("/")[2]]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 10_000


def test_killed_half_way_leaves_what_was_mc1(tmp_path: Path) -> None:
    """MC1: kill -9 in the midst: leftovers are recognisable, and go after a day."""
    files = LocalFiles(str(tmp_path))
    view_of(files, ONE).write(WEIGHTS, ONE)
    script = f"""
import os
from castore_experiments.local_files import LocalFiles
from castore_experiments.view import View
def parts():
    yield bytes(1000)
    os.kill(os.getpid(), 9)
View(LocalFiles({str(tmp_path)!r}), lambda *_: True).write({WEIGHTS!r}, parts, "0" * 64)
"""
    died = subprocess.run([sys.executable, "-c", script], check=False)
    assert died.returncode == -9
    assert raw(files, WEIGHTS) == ONE
    assert view_of(files).weights() == [WEIGHTS]
    left = list(tmp_path.rglob(".castore-*"))
    assert len(left) == 1
    assert files.sweep(time.time()) == []
    assert files.sweep(time.time() + 90_000) == [left[0].relative_to(tmp_path).as_posix()]
    assert raw(files, WEIGHTS) == ONE


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    (tmp_path / layout.in_root(CONFIG)).mkdir(parents=True)
    with pytest.raises(BackendError, match="not a regular file"):
        view_of(files, ONE).write(CONFIG, ONE)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BackendError, match="not a regular file"):
        files.get("pipe")


def test_a_linked_folder_is_followed(tmp_path: Path) -> None:
    """People keep the models of a root on a larger disk."""
    (tmp_path / "large").mkdir()
    (tmp_path / "root/checkpoints").mkdir(parents=True)
    (tmp_path / "root/checkpoints/models").symlink_to(tmp_path / "large")
    view = view_of(LocalFiles(str(tmp_path / "root")), ONE)
    assert view.write(WEIGHTS, ONE) == "written"
    assert view.weights() == [WEIGHTS]
    assert len(list((tmp_path / "large").rglob("*.pt"))) == 1


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a//b", "a/./b", "a\0b", "a/"])
def test_names_stay_within_the_root_se2(tmp_path: Path, name: str) -> None:
    files = LocalFiles(str(tmp_path / "root"))
    for call in (files.get, files.delete, lambda n: files.create(n, b"x")):
        with pytest.raises(InvalidInputError):
            call(name)
    assert list(tmp_path.iterdir()) == []
