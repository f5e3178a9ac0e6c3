"""What a root remembers of itself, local and on S3."""

from __future__ import annotations

import os
import platform
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from castore import (
    AlreadyExistsError,
    BackendError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    Repository,
    RepositoryNotFoundError,
)
from castore_experiments.files import Files, open_files
from castore_experiments.layout import PENDING, ROOT
from castore_experiments.root import (
    Pending,
    RootRecord,
    claim_root,
    clear_pending,
    new_namespace,
    new_record,
    open_repository,
    origin,
    read_pending,
    read_root,
    replace_root,
    write_pending,
)
from tests.drivers.experiments.places import KINDS, place
from tests.helpers import ODD_ROOTS

PENDING_EDITS = Pending("0" * 24, "1" * 24, ("data", "hp"), {"hp": "a" * 64}, "2026-11-30T03:11:40")


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, request, tmp_path)


def opened(url: str, repository: str | None = None, namespace: str = "root-1") -> RootRecord:
    """A fresh root, as a manager makes it: the repository first."""
    files = open_files(url)
    if files.kind == "local":
        os.makedirs(files.url, exist_ok=True)
    made = Repository.init(repository or f"{url}/.castore")
    return claim_root(files, new_record(files, made, namespace, "castore-1"))


# -- the record


def test_a_root_is_opened_without_any_configuration(url: str) -> None:
    record = opened(url)
    files = open_files(url)
    assert read_root(files) == record
    assert record.repository == "./.castore"
    assert open_repository(files, record).url == f"{url}/.castore"
    assert open_repository(files, record).id == record.id
    assert origin(files, record) == "itself"


def test_a_shared_repository(url: str) -> None:
    record = opened(url, f"{url}-team")
    assert record.repository == f"{url}-team"
    assert open_repository(open_files(url), record).id == record.id


def test_a_fresh_place_has_none(url: str) -> None:
    assert read_root(open_files(url)) is None
    assert read_pending(open_files(url)) is None
    clear_pending(open_files(url))


def test_of_several_at_once_one_wins(url: str) -> None:
    record = opened(url)
    open_files(url).delete(ROOT)
    results: list[RootRecord] = []
    claims = [replace(record, namespace=f"root-{n}") for n in range(6)]
    threads = [
        threading.Thread(target=lambda c=c: results.append(claim_root(open_files(url), c)))
        for c in claims
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert {*results} == {read_root(open_files(url))}


def test_replacing(url: str) -> None:
    record, files = opened(url), open_files(url)
    new = replace(record, namespace="other", forked_from=record.namespace)
    assert replace_root(files, record, new) == new
    assert read_root(files) == new
    assert replace_root(files, record, replace(record, namespace="late")) == new
    assert read_root(files) == new


@pytest.mark.parametrize("name", ODD_ROOTS)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_names_s37(
    kind: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = place(kind, request, tmp_path, name)
    record = opened(url, namespace=new_namespace(url, "0123abcd"))
    assert open_repository(open_files(url), record).id == record.id
    assert origin(open_files(url), record) == "itself"


def test_damage_is_told(url: str) -> None:
    """SE2: each field is checked before anything is opened by it."""
    record, files = opened(url), open_files(url)
    good = record.encode()
    for bad in (
        b"",
        good[:-5],
        good.replace(b'"format":1', b'"format":2'),
        good.replace(b'"inode":', b'"inode":"x",'),
        good.replace(b'"./.castore"', b'"./../../etc"'),
        good.replace(b'"./.castore"', b'"x\\u0000"'),
        good.replace(b'"./.castore"', b'""'),
        good.replace(b'"root-1"', b'"../x"'),
        good.replace(b'"root-1"', b"1"),
    ):
        assert bad != good
        files.replace(ROOT, bad, files.stat(ROOT).version)
        with pytest.raises(FormatError) as error:
            read_root(files)
        assert f"{files.url}/{ROOT}" in str(error.value)


# -- its repository


def test_a_repository_that_is_gone_or_another_is_an_error(url: str) -> None:
    """An unreachable or different repository is an error."""
    record, files = opened(url, f"{url}-team"), open_files(url)
    with pytest.raises(IntegrityError, match=record.id):
        open_repository(files, replace(record, id="f" * 32))
    with pytest.raises(RepositoryNotFoundError, match=r"root\.json"):
        open_repository(files, replace(record, repository=f"{url}-gone"))


def test_a_repository_that_does_not_answer(tmp_path: Path, s3_env: dict[str, str]) -> None:
    record = opened(str(tmp_path / "root"))
    with pytest.raises(BackendError):
        open_repository(
            open_files(tmp_path / "root"),
            replace(record, repository="s3://no-such-bucket/x"),
        )


# -- moved or copied


def test_moved_keeps_its_own(tmp_path: Path) -> None:
    record = opened(str(tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    files = open_files(tmp_path / "b")
    assert read_root(files) == record
    assert origin(files, record) == "moved"
    assert open_repository(files, record).url == str(tmp_path / "b/.castore")


def test_copied_with_cp_r_is_told(tmp_path: Path) -> None:
    record = opened(str(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert origin(open_files(tmp_path / "b"), record) == "copied"
    assert origin(open_files(tmp_path / "a"), record) == "itself"
    files = open_files(tmp_path / "b")
    fork = new_record(
        files, open_repository(files, record), "root-2", "castore-1", record.namespace
    )
    assert replace_root(files, record, fork).forked_from == "root-1"
    assert origin(files, fork) == "itself"


def test_moved_to_another_disk(tmp_path: Path) -> None:
    """Other inode, other URL, and the former place is gone."""
    record = opened(str(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert origin(open_files(tmp_path / "b"), record) == "moved"


def test_a_fresh_root_at_the_former_place(tmp_path: Path) -> None:
    record = opened(str(tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    opened(str(tmp_path / "a"), namespace="root-2")
    assert origin(open_files(tmp_path / "b"), record) == "moved"


def test_the_same_folder_under_another_name(tmp_path: Path) -> None:
    record = opened(str(tmp_path / "a"))
    (tmp_path / "link").symlink_to("a")
    assert origin(open_files(tmp_path / "link"), record) == "itself"


def test_a_restored_backup_is_itself(tmp_path: Path) -> None:
    """The same URL, another inode."""
    record = opened(str(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "backup")
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(tmp_path / "backup", tmp_path / "a")
    assert origin(open_files(tmp_path / "a"), record) == "itself"


def test_from_another_machine_it_may_be_a_copy(tmp_path: Path) -> None:
    record = replace(opened(str(tmp_path / "a")), machine="elsewhere", url="/elsewhere/a", inode=1)
    assert origin(open_files(tmp_path / "a"), record) == "copied"
    assert record.machine != platform.node()


def copy_all(source: Files, target: Files) -> None:
    for stat in list(source.list(".castore")):
        target.create(stat.name, source.get(stat.name))


def test_copied_and_moved_on_s3(s3_url: str, s3_env: dict[str, str]) -> None:
    record = opened(f"{s3_url}/a", f"{s3_url}/team")
    a, b = open_files(f"{s3_url}/a"), open_files(f"{s3_url}/b")
    copy_all(a, b)
    assert origin(b, record) == "copied"
    for stat in list(a.list(".castore")):
        a.delete(stat.name)
    assert origin(b, record) == "moved"


def test_where_no_answer_comes_it_counts_as_copied(tmp_path: Path, s3_env: dict[str, str]) -> None:
    record = replace(opened(str(tmp_path / "a")), url="s3://no-such-bucket/x", inode=0)
    assert origin(open_files(tmp_path / "a"), record) == "copied"


# -- namespaces


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/runs/exp", "exp-0123abcd"),
        ("s3://bucket/team/my exp/", "my-exp-0123abcd"),
        ("/runs/lr[1e-3]", "lr-1e-3-0123abcd"),
        ("/runs/ünï", "uni-0123abcd"),
        ("/runs/実験", "root-0123abcd"),
        ("/runs/.hidden", "hidden-0123abcd"),
        ("/", "root-0123abcd"),
        ("/" + "x" * 300, "x" * 91 + "-0123abcd"),
    ],
)
def test_namespaces_are_readable(url: str, expected: str) -> None:
    assert new_namespace(url, "0123abcd") == expected
    with pytest.raises(InvalidInputError):
        new_namespace(url, "/")


# -- edits that wait


def test_pending_edits_survive(url: str) -> None:
    files = open_files(url)
    write_pending(files, PENDING_EDITS)
    assert read_pending(open_files(url)) == PENDING_EDITS
    later = replace(PENDING_EDITS, base=None, changed=("model",))
    write_pending(open_files(url), later)
    assert read_pending(files) == later
    clear_pending(files)
    assert read_pending(files) is None
    clear_pending(files)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"hash":"1', b'"hash":"../'),
        (b'["data","hp"]', b'["data","xx"]'),
        (b'["data","hp"]', b'"hp"'),
        (b'"format":1', b'"format":2'),
        (b'"base":"0', b'"base":"'),
        (b'{"hp":', b'{"zz":'),
    ],
)
def test_damaged_pending_edits_are_told(url: str, old: bytes, new: bytes) -> None:
    files, good = open_files(url), PENDING_EDITS.encode()
    assert old in good
    files.create(PENDING, good.replace(old, new))
    with pytest.raises(FormatError, match=r"pending\.json.*If it is damaged: take it away"):
        read_pending(files)


def test_a_root_is_no_place_for_a_repository_once_it_is_claimed(url: str) -> None:
    """Why the repository is made first."""
    write_pending(open_files(url), PENDING_EDITS)
    with pytest.raises(AlreadyExistsError):
        Repository.init(f"{url}/.castore")
