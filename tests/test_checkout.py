"""Checkouts: verified bytes, inside the target, all or nothing."""

from __future__ import annotations

import os
import shutil
import stat as st
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from castore.checkout import checkout
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    CastoreError,
    CorruptObjectError,
    InvalidInputError,
    ObjectNotFoundError,
)
from castore.objects import object_name
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.source import MemoryFile
from castore.tree import File, Folder, Link, Slice, Tree, build_tree
from tests.helpers import (
    blobs,
    draft,
    flip_object,
    folder,
    lay,
    new_repository,
    noise,
    series,
)

FILES: dict[str, Any] = {
    "a/one": b"1" * 1000,
    "a/two": MemoryFile(b"2", executable=True),
    "b/link": Link("../a"),
    "c": Folder(),
    "m.safetensors": series(1)[0],
}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return new_repository("memory", tmp_path)


@pytest.fixture
def name(repository: Repository) -> SnapshotName:
    return repository.commit(draft(FILES)).name


def siblings(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_into_nothing_an_empty_folder_and_beside_other_files(
    repository: Repository, name: SnapshotName, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    other = lay(tmp_path / "other", {"a/three": b"3", "x": b"4", "c/five": b"5"})
    for target in (tmp_path / "new" / "deep", tmp_path / "empty"):
        repository.checkout(name, target)
        assert folder(target) == FILES
    repository.checkout(name, other)
    expected = {p: e for p, e in FILES.items() if p != "c"}
    assert folder(other) == expected | {"a/three": b"3", "x": b"4", "c/five": b"5"}
    assert siblings(tmp_path) == ["empty", "new", "other"]
    assert siblings(tmp_path / "new") == ["deep"]


def test_nothing_is_overwritten_without_force(
    repository: Repository, name: SnapshotName, tmp_path: Path
) -> None:
    target = lay(tmp_path / "out", {"a/one": b"mine", "other": b"x"})
    with pytest.raises(AlreadyExistsError, match="'a/one'.*--force"):
        repository.checkout(name, target)
    assert folder(target) == {"a/one": b"mine", "other": b"x"}
    repository.checkout(name, target, force=True)
    assert folder(target) == FILES | {"other": b"x"}
    repository.checkout(name, target, force=True)
    assert folder(target) == FILES | {"other": b"x"}
    with pytest.raises(AlreadyExistsError):
        repository.checkout(name, target)
    assert siblings(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_a_move_that_fails_is_taken_back_or_told(
    force: bool,
    repository: Repository,
    name: SnapshotName,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {"other": b"x"}
    target = lay(tmp_path / "out", before)
    given = set[str]()

    def failing(real: Any) -> Any:
        def give_name(a: Any, b: Any, **more: Any) -> None:
            given.add(b)
            if len(given) == 3:
                raise PermissionError(13, "Permission denied", str(b))
            real(a, b, **more)

        return give_name

    monkeypatch.setattr(os, "replace", failing(os.replace))
    monkeypatch.setattr(os, "link", failing(os.link))
    left = "2 of .* entries are" if force else "nothing was"
    with pytest.raises(BackendError, match=f"{left} left there: Permission denied"):
        repository.checkout(name, target, force=force)
    monkeypatch.undo()
    if force:
        assert before.items() < folder(target).items()
    else:
        assert folder(target) == before
    repository.checkout(name, target, force=force)
    assert folder(target) == FILES | before


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("beside", [{}, {"other": b"x"}])
@pytest.mark.parametrize("obstacle", [b"mine", Link("mine")])
@pytest.mark.parametrize("wanted", [b"theirs", Link("theirs"), {"b": b"1"}])
def test_what_appears_between_the_look_and_the_move_is_not_replaced(
    links: bool,
    beside: dict[str, Any],
    obstacle: Any,
    wanted: Any,
    repository: Repository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {"a/b": b"first", "m": b"second", "z/y/x": b"last"}
    files |= {f"n/{p}": e for p, e in wanted.items()} if isinstance(wanted, dict) else {"n": wanted}
    name = repository.commit(draft(files)).name
    target = lay(tmp_path / "out", beside)

    def late(call: str, at: int) -> None:
        real = getattr(os, call)

        def wrapped(*args: Any, **more: Any) -> None:
            if args[at] == "n" and not os.path.lexists(target / "n"):
                lay(target, {"n": obstacle})
            if call == "link" and not links:
                raise PermissionError(1, "no links here", args[at])
            real(*args, **more)

        monkeypatch.setattr(os, call, wrapped)

    late("link", 1)
    late("replace", 1)
    if beside:
        late("mkdir", 0)
    with pytest.raises((AlreadyExistsError, InvalidInputError), match="meanwhile|is no folder"):
        repository.checkout(name, target)
    monkeypatch.undo()
    assert folder(target) == beside | {"n": obstacle}


@pytest.mark.parametrize("target", ["file", "dangling", "link to file"])
def test_a_target_that_is_no_folder_is_refused(
    target: str, repository: Repository, name: SnapshotName, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "link to file").symlink_to("file")
    for force in (False, True):
        with pytest.raises(AlreadyExistsError, match="not a folder"):
            repository.checkout(name, tmp_path / target, force=force)
    assert siblings(tmp_path) == ["dangling", "file", "link to file"]
    assert (tmp_path / "file").read_bytes() == b"x"


def test_fs6_a_wrong_file_of_equal_size_and_time_is_replaced(
    repository: Repository, name: SnapshotName, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    for _ in range(2):
        repository.checkout(name, target, force=True)
        info = (target / "a/one").stat()
        (target / "a/one").write_bytes(b"x" * 1000)
        os.utime(target / "a/one", ns=(info.st_atime_ns, info.st_mtime_ns))
    repository.checkout(name, target, force=True)
    assert folder(target) == FILES


@pytest.mark.parametrize("at", ["a", "b", "m.safetensors", "a/one", "c"])
@pytest.mark.parametrize("force", [False, True])
def test_se2_a_link_that_waits_in_the_target_is_never_followed(
    at: str, force: bool, repository: Repository, name: SnapshotName, tmp_path: Path
) -> None:
    outside = lay(tmp_path / "outside", {"one": b"precious", "sub/x": b"y"})
    target = lay(tmp_path / "out", {"keep": b"k"})
    (target / at).parent.mkdir(exist_ok=True)
    (target / at).symlink_to(outside / "one" if at in ("m.safetensors", "a/one") else outside)
    before = folder(target)
    try:
        repository.checkout(name, target, force=force)
    except (InvalidInputError, AlreadyExistsError):
        assert folder(target) == before
    else:
        assert force
        assert folder(target) == FILES | {"keep": b"k"}
    assert folder(outside) == {"one": b"precious", "sub/x": b"y"}
    assert siblings(tmp_path) == ["out", "outside"]


@pytest.mark.parametrize("at", ["a", "b/link", "a/one", "c"])
def test_a_file_for_a_folder_or_a_folder_for_a_file_is_refused_untouched(
    at: str, repository: Repository, name: SnapshotName, tmp_path: Path
) -> None:
    holds: dict[str, Any] = {"a": b"file", "b/link": Folder(), "a/one/x": b"1", "c": b"file"}
    at = "a/one/x" if at == "a/one" else at
    target = lay(tmp_path / "out", {at: holds[at], "keep": b"k"})
    before = folder(target)
    for force in (False, True):
        with pytest.raises(CastoreError):
            repository.checkout(name, target, force=force)
        assert folder(target) == before
    assert siblings(tmp_path) == ["out"]


@pytest.mark.parametrize("damage", ["flip", "gone"])
@pytest.mark.parametrize("target", ["new", "empty", "used"])
def test_cc7_a_failing_checkout_leaves_nothing_half_written(
    damage: str, target: str, repository: Repository, name: SnapshotName, tmp_path: Path
) -> None:
    digest = blobs(repository, name, "m.safetensors")[-1]
    if damage == "flip":
        flip_object(repository, digest)
    else:
        repository.backend.delete(object_name(digest))
    (tmp_path / "empty").mkdir()
    lay(tmp_path / "used", {"a/one": b"old", "x": b"y"})
    for force in (True, False) if target != "used" else (True,):
        with pytest.raises((CorruptObjectError, ObjectNotFoundError), match=digest):
            repository.checkout(name, tmp_path / target, force=force)
        assert siblings(tmp_path) == ["empty", "used"]
        assert folder(tmp_path / "used") == {"a/one": b"old", "x": b"y"}
        assert siblings(tmp_path / "empty") == []


def forge(repository: Repository, change: Any) -> Tree:
    """A committed tree with one file changed: well-formed, and untrue."""
    tree = repository.tree("latest")
    entries = dict(tree.entries)
    entry = entries["a/one"]
    assert isinstance(entry, File)
    entries["a/one"] = change(entry)
    return build_tree(entries)


def test_a_tree_that_lies_about_its_files_is_found_out(
    repository: Repository, name: SnapshotName, tmp_path: Path
) -> None:
    def run(tree: Tree, sha256: bool) -> None:
        checkout(
            repository.store,
            tree,
            str(tmp_path / "out"),
            force=False,
            sha256=sha256,
            progress=lambda _: None,
        )

    longer = forge(
        repository, lambda f: File(1010, f.sha256, False, (Slice(f.slices[0].blob, 990, 1010),))
    )
    with pytest.raises(CorruptObjectError, match="the tree is damaged"):
        run(longer, False)
    tail = forge(
        repository, lambda f: File(10, f.sha256, False, (Slice(f.slices[0].blob, 990, 10),))
    )
    run(tail, False)
    assert (tmp_path / "out/a/one").read_bytes() == b"1" * 10
    shutil.rmtree(tmp_path / "out")
    other = forge(repository, lambda f: replace(f, sha256="0" * 64))
    with pytest.raises(CorruptObjectError, match="'a/one': SHA-256") as caught:
        run(other, True)
    assert caught.value.expected == "0" * 64
    assert not siblings(tmp_path)
    run(repository.tree(name), True)


def test_a_part_of_a_snapshot(repository: Repository, name: SnapshotName, tmp_path: Path) -> None:
    repository.checkout(f"{name}:a", tmp_path / "folder")
    assert folder(tmp_path / "folder") == {"one": FILES["a/one"], "two": FILES["a/two"]}
    repository.checkout(f"{name}:a/two", tmp_path / "file")
    assert folder(tmp_path / "file") == {"two": FILES["a/two"]}
    with pytest.raises(LookupError):
        repository.checkout(f"{name}:nothing", tmp_path / "none")
    assert siblings(tmp_path) == ["file", "folder"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(
    mask: int, repository: Repository, name: SnapshotName, tmp_path: Path
) -> None:
    before = os.umask(mask)
    try:
        repository.checkout(name, tmp_path / "out")
    finally:
        os.umask(before)

    def mode(path: str) -> int:
        return st.S_IMODE((tmp_path / "out" / path).stat().st_mode)

    assert mode("a/one") == 0o666 & ~mask
    assert mode("a/two") == 0o777 & ~mask
    assert mode(".") == mode("a") == mode("c") == 0o777 & ~mask


def test_a_chain_comes_out_in_whatever_order_it_lies(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    files = {f"s{i}/m": f for i, f in enumerate(series(10))}
    for path, data in files.items():
        repository.commit(draft({path: data}))
    name = repository.commit(draft(dict(reversed(files.items())))).name
    repository.checkout(name, tmp_path / "out", sha256=True)
    assert folder(tmp_path / "out") == files


def limited(code: str, *args: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where no file may grow beyond 50 kB, as on a full disk."""
    head = (
        "import resource, signal, sys\n"
        "from castore.errors import BackendError\n"
        "from castore.repository import Repository\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "repository = Repository.open(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try:\n"
        f"    {code}\n"
        "except BackendError as e:\n"
        "    print(e)\n"
        "    sys.exit(13)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head, *map(str, args)], capture_output=True, text=True, check=False
    )


def test_mc1_no_room_for_a_checkout_or_a_commit_leaves_nothing_half_written(tmp_path: Path) -> None:
    repository = new_repository("local", tmp_path)
    lay(tmp_path / "run", {"big": noise(100_000), "small": b"1"})
    name = repository.commit([tmp_path / "run"]).name
    out = limited(
        "repository.checkout('latest', sys.argv[2])", Path(repository.url), tmp_path / "out"
    )
    assert out.returncode == 13, out.stderr
    assert "nothing was left there" in out.stdout
    lay(tmp_path / "more", {"big": noise(100_000, seed=1), "small": b"2"})
    out = limited("repository.commit([sys.argv[2]])", Path(repository.url), tmp_path / "more")
    assert out.returncode == 13, out.stderr
    assert siblings(tmp_path) == ["more", "run", "store"]
    assert list(repository.snapshots()) == [name]
    assert siblings(tmp_path / "store" / "tmp") == []
    repository.commit([tmp_path / "more"])
    repository.checkout("latest", tmp_path / "out")
    assert folder(tmp_path / "out") == folder(tmp_path / "more")


def test_a_target_without_permission_is_a_backend_error(
    repository: Repository, name: SnapshotName
) -> None:
    with pytest.raises(BackendError):
        repository.checkout(name, "/proc/castore-cannot-write-here")


def test_cc7_an_error_names_the_file_that_is_kept_from_being_written(tmp_path: Path) -> None:
    """What is missing or damaged, which files need it, and what to do next."""
    repository = Repository.init(tmp_path / "store")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 400)
    repository.commit([folder])
    blob = repository.tree("latest").blobs()[0]
    path = tmp_path / "store" / "objects" / blob[:2] / blob
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(CorruptObjectError, match=r"'weights.bin'.*--repair-from"):
        repository.checkout("latest", tmp_path / "out")
    path.unlink()
    with pytest.raises(ObjectNotFoundError, match=r"'weights.bin'.*--repair-from"):
        repository.checkout("latest", tmp_path / "out")
    assert not (tmp_path / "out").exists()
