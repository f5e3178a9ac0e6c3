"""Credentials, names, clocks and other programs that do not help: told clearly, nothing touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from castore import document
from castore.backend import Stat
from castore.copy import copy
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    CastoreError,
    FormatError,
    InvalidInputError,
)
from castore.prune import prune
from castore.repository import Repository
from castore.snapshot import name_of
from castore.source import scan
from castore.testing.proxy import FaultProxy, Refusal, calm
from castore.testing.s3server import S3Server
from castore.tree import MAX_PATH
from castore.usage import usage
from castore_experiments import CheckpointManager
from tests.drivers.experiments.small import filled, net, opened
from tests.faults import Wrapped
from tests.helpers import (
    age,
    clocked,
    contents,
    draft,
    folder,
    lay,
    new_repository,
    noise,
    problems,
    raw,
    series,
    with_backend,
)

# -- credentials


def test_who_may_only_read_can_do_all_that_reads_and_is_told_at_a_write(
    s3server: S3Server, s3_url: str, s3_options: dict[str, Any], tmp_path: Path
) -> None:
    """An identity of the server with the rights Read and List; nothing changes."""
    owner = Repository.init(s3_url, storage_options=s3_options)
    files = {"m": series(2)[1], "n": noise(500)}
    name = owner.commit(draft(files)).name
    forgotten = owner.commit(draft({"x": b"1"})).name
    owner.forget(forgotten)
    age(owner)
    before = raw(owner)
    seen = Repository.open(s3_url, storage_options=s3server.reader_options())
    assert list(seen.snapshots()) == [name] == [seen.resolve("latest")]
    assert list(seen.forgotten()) == [forgotten]
    assert contents(seen, name) == files
    seen.checkout(name, tmp_path / "out")
    assert folder(tmp_path / "out") == files
    assert problems(seen) == []
    assert usage(seen) == usage(owner)
    assert prune(seen, grace=0, dry_run=True).dry_run
    local = new_repository("local", tmp_path)
    assert copy(seen, local).snapshots == 1
    local.commit(draft({"y": b"2"}))
    writes: list[Callable[[], object]] = [
        lambda: seen.commit(draft({"z": b"3"})),
        lambda: seen.forget(name),
        lambda: seen.unforget(forgotten),
        lambda: prune(seen, grace=0),
        lambda: copy(local, seen),
        lambda: Repository.init(f"{s3_url}2", storage_options=s3server.reader_options()),
    ]
    for write in writes:
        with pytest.raises(BackendError, match="could not write: no permission: ask the bucket's"):
            write()
    assert raw(owner) == before


def test_a_root_that_may_only_be_read_is_resumed_and_refuses_a_save(
    s3server: S3Server, s3_url: str, s3_options: dict[str, Any]
) -> None:
    root = f"{s3_url}/root"
    with _started(root, s3_options) as manager:
        hash = manager.current_exp_hash
    with opened(root, storage_options=s3server.reader_options()) as manager:
        assert filled(manager.load_checkpoint(hash or "", force=True)) == 1.0
        with pytest.raises(BackendError, match="no permission"):
            manager.save_model_checkpoint(step=2)


def _started(root: str, options: dict[str, Any]) -> CheckpointManager:
    manager = opened(root, storage_options=options)
    manager.watch(model=net(fill=1.0), hyperparameters={"lr": 1.0})
    manager.save_model_checkpoint(step=1)
    return manager


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (Refusal(400, "ExpiredToken"), "session token has expired: log in again"),
        (Refusal(400, "InvalidToken"), "session token is not valid: log in again"),
        (Refusal(403, "RequestTimeTooSkewed"), "clock is off by over 15 minutes"),
        (Refusal(400, "AuthorizationHeaderMalformed"), "another region: check AWS_REGION"),
        (Refusal(404, "NoSuchBucket"), "bucket does not exist: check the URL"),
        (Refusal(403, "AllAccessDisabled"), "AllAccessDisabled"),
    ],
    ids=lambda v: v.code if isinstance(v, Refusal) else "",
)
def test_what_aws_refuses_a_request_with_is_told_at_every_call(
    refusal: Refusal, says: str, s3server: S3Server, s3_url: str, s3_options: dict[str, Any]
) -> None:
    """As AWS words it, from a proxy: this server knows one region and no tokens."""
    with FaultProxy(s3server.ports[0], calm) as proxy:
        options = {**s3_options, "endpoint_url": proxy.url}
        repository = Repository.init(s3_url, storage_options=options)
        name = repository.commit(draft({"a": b"1"})).name
        before = raw(repository)
        proxy.plan = lambda _: refusal
        calls: list[Callable[[], object]] = [
            lambda: Repository.open(s3_url, storage_options=options),
            lambda: Repository.init(f"{s3_url}2", storage_options=options),
            lambda: repository.read(name, "a"),
            lambda: list(repository.snapshots()),
            lambda: repository.commit(draft({"a": b"2"})),
            lambda: repository.forget(name),
            lambda: prune(repository, grace=0),
        ]
        for call in calls:
            with pytest.raises(BackendError, match=says) as caught:
                call()
            assert s3_url in str(caught.value)
            assert str(s3_options["secret"]) not in str(caught.value)
        proxy.plan = calm
        assert raw(repository) == before


def test_a_server_that_redirects_every_request_is_told(
    s3server: S3Server, s3_url: str, s3_options: dict[str, Any]
) -> None:
    """As one that wants https; botocore follows without an end. Told at once, not tried again."""
    asked: list[str] = []
    with FaultProxy(s3server.ports[0], lambda _: Refusal(301, "PermanentRedirect")) as proxy:
        options = {**s3_options, "endpoint_url": proxy.url}
        with pytest.raises(BackendError, match="redirects every request: check AWS_ENDPOINT_URL"):
            Repository.open(s3_url, storage_options=options)
        asked += [method for method, _, _ in proxy.log]
    assert asked.count("GET") == 1


# -- names

WINDOWS = ["CON", "aux.txt", "nul", "COM1", "a:b", "a?", "a*", 'a"', "a<b>", "a|b", "dot.", "sp "]


def test_names_that_windows_refuses_are_kept_to_the_letter(tmp_path: Path) -> None:
    """Not escaped: a checkout gives what was committed, or the file system refuses it whole."""
    repository = new_repository("local", tmp_path)
    lay(tmp_path / "run", {n: n.encode() for n in WINDOWS})
    name = repository.commit([tmp_path / "run"]).name
    repository.checkout(name, tmp_path / "out")
    assert folder(tmp_path / "out") == {n: n.encode() for n in WINDOWS}


def test_a_file_system_that_refuses_a_name_gets_nothing_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Windows, or FAT below Linux, refuses them."""
    repository = new_repository("memory", tmp_path)
    name = repository.commit(draft({"ok": b"1", "sub/a:b": b"2"})).name
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if str(path).endswith("a:b"):
            raise OSError(22, "Invalid argument", path)
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(BackendError, match="nothing was left there.*a:b"):
        repository.checkout(name, tmp_path / "out")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "pair", [("é", "e\u0301"), ("Model.pt", "model.PT"), ("ﬁ", "fi")], ids=["nfc", "case", "fold"]
)
def test_names_that_clash_elsewhere_are_refused_by_both_names_before_anything_is_stored(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    """On disk, where this file system takes them for two; nothing is renamed in silence."""
    repository = new_repository("local", tmp_path)
    lay(tmp_path / "run", dict.fromkeys(pair, b"1"))
    before = raw(repository)
    with pytest.raises(InvalidInputError, match="one name on file systems") as caught:
        repository.commit([tmp_path / "run"])
    assert all(repr(n) in str(caught.value) for n in pair)
    assert raw(repository) == before
    (tmp_path / "run" / pair[0]).unlink()
    name = repository.commit([tmp_path / "run"]).name
    assert list(repository.tree(name).entries) == [pair[1]]  # as it is spelled, not normalised


def test_a_target_that_takes_two_names_for_one_is_not_written_over(tmp_path: Path) -> None:
    """A checkout beside a file whose name differs in case: on such a disk they are one."""
    repository = new_repository("local", tmp_path)
    name = repository.commit(draft({"README": b"new"})).name
    lay(tmp_path / "out", {"README": b"old"})
    with pytest.raises(AlreadyExistsError, match="already holds"):
        repository.checkout(name, tmp_path / "out")
    assert folder(tmp_path / "out") == {"README": b"old"}


def test_names_and_paths_as_long_as_allowed_and_one_more(tmp_path: Path) -> None:
    """255 bytes a name come back; a whole path of 4096, which no call takes in one piece, too."""
    repository = new_repository("local", tmp_path)
    longest = "/".join(["d" * 200] * 20 + ["f" * 76])
    assert len(longest) == MAX_PATH
    files = {"n" * 255: b"1", "ü" * 127: b"2"}
    name = repository.commit(draft(files)).name
    repository.checkout(name, tmp_path / "out")
    assert folder(tmp_path / "out") == files
    name = repository.commit(draft({longest: b"3"})).name
    assert repository.read(name, longest) == b"3"
    with pytest.raises(CastoreError, match="name too long"):
        repository.checkout(name, tmp_path / "deep")
    assert not (tmp_path / "deep").exists()
    for path in (f"{longest}x", "n" * 256, "ü" * 128):
        with pytest.raises(InvalidInputError, match="cannot be stored"):
            repository.commit(draft({path: b"4"}))


def test_a_source_below_a_path_too_long_for_one_call_is_told(tmp_path: Path) -> None:
    """What a shell can make step by step and no program opens by its whole path."""
    (tmp_path / "run").mkdir()
    fd = os.open(tmp_path / "run", os.O_RDONLY)
    for _ in range(22):
        os.mkdir("d" * 200, dir_fd=fd)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    with pytest.raises(CastoreError, match="too long|at most"):
        scan([tmp_path / "run"])
    shutil.rmtree(tmp_path / "run")


# -- listings and clocks


class Lagging(Wrapped):
    """A store whose lists show a name only when ``behind`` further writes were made (NFS)."""

    def __init__(self, inner: Any, behind: int):
        super().__init__(inner)
        self.behind, self.written = behind, list[str]()

    def create(self, name: str, data: Any) -> Any:
        version = self.inner.create(name, data)
        self.written.append(name)
        return version

    def create_many(self, items: Any) -> Any:
        versions = self.inner.create_many(items)
        self.written += [n for n, _ in items]
        return versions

    def write_many(self, items: Any) -> Any:
        versions = self.inner.write_many(items)
        self.written += [n for n, _ in items]
        return versions

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        hidden = set(self.written[-self.behind :])
        return iter([s for s in self.inner.list(prefix, after, limit) if s.name not in hidden])


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_list_that_lags_behind_costs_order_never_content(kind: str, tmp_path: Path) -> None:
    """Commits whose own last snapshot is not listed yet: no name is used twice, none is lost."""
    repository = new_repository(kind, tmp_path)
    seen = with_backend(repository, Lagging(repository.backend, 5))
    made = {seen.commit(draft({"n": b"%d" % i})).name: i for i in range(6)}
    assert len(made) == 6
    assert set(repository.snapshots()) == set(made)
    for name, i in made.items():
        assert contents(seen, name) == contents(repository, name) == {"n": b"%d" % i}
    assert problems(repository) == []
    assert problems(seen) == []
    target = new_repository("memory", tmp_path, "target")
    copy(seen, target)
    copy(repository, target)
    assert len({n.id for n in target.snapshots()}) == 6


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_clock_that_jumps_backward_keeps_newest_newest(kind: str, tmp_path: Path) -> None:
    """By an hour, between two commits and within one; objects only get a longer grace."""
    repository, clock = clocked(new_repository(kind, tmp_path))
    names = [repository.commit(draft({"n": b"0"})).name]
    for i, jump in enumerate([-3600, -20 * 3600, 7200], 1):
        clock.ahead += jump
        names.append(repository.commit(draft({"n": b"%d" % i})).name)
        assert repository.resolve("latest") == names[-1]
    assert [n.time for n in names] == sorted({n.time for n in names})
    assert list(repository.snapshots()) == names[::-1]
    repository.forget(names[0])
    prune(repository, grace=0)
    assert problems(repository) == []
    assert [contents(repository, n) for n in names[1:]] == [
        {"n": b"%d" % i} for i in range(1, len(names))
    ]
    clock.ahead = 0.0
    prune(repository, grace=0)
    assert problems(repository) == []


# -- another version


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_a_repository_of_a_newer_version_is_refused_without_a_write(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """By every command, and by a program that had opened it before it was raised."""
    options = request.getfixturevalue("s3_options") if kind == "s3" else None
    url = request.getfixturevalue("s3_url") if kind == "s3" else str(tmp_path / "store")
    repository = Repository.init(url, storage_options=options)
    repository.commit(draft({"a": b"1"}))
    newer = document.encode("config", {"hash": "blake3-256", "id": repository.id})
    newer = newer.replace(b'"format":1', b'"format":2')
    repository.backend.delete("config.json")
    repository.backend.create("config.json", newer)
    before = raw(repository)
    for _ in range(2):
        with pytest.raises(FormatError, match="format 2 of 'config'.*upgrade castore"):
            Repository.open(url, storage_options=options)
    with pytest.raises(AlreadyExistsError, match="nothing was changed"):
        Repository.init(url, storage_options=options)
    assert raw(repository) == before


def test_documents_of_a_newer_version_among_those_of_this_one_stop_a_prune(tmp_path: Path) -> None:
    """What a newer snapshot needs is not known, so nothing goes; the others read as ever."""
    repository = new_repository("local", tmp_path)
    name = repository.commit(draft({"a": b"1"})).name
    doomed = repository.commit(draft({"a": b"2"})).name
    data = repository.backend.get(doomed.path).replace(b'"format":1', b'"format":2')
    newer = name_of(data, "main", "snapshot", doomed.time + 1)
    repository.backend.create(newer.path, data)
    repository.forget(doomed)
    before = raw(repository)
    with pytest.raises(FormatError, match="upgrade castore"):
        prune(repository, grace=0)
    assert {n: d for n, d in raw(repository).items() if n in before} == before
    assert contents(repository, name) == {"a": b"1"}
    assert contents(repository, repository.commit(draft({"a": b"3"})).name) == {"a": b"3"}
