"""Every backend keeps the whole contract: memory, local folders, SeaweedFS, moto."""

from __future__ import annotations

import re
import secrets
import tracemalloc
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pytest

from castore.backend import Backend
from castore.backends import open_backend
from castore.errors import BackendError, InvalidInputError, ObjectNotFoundError
from castore.testing.backends import BackendTests
from castore.testing.s3server import S3Server

AWKWARD = "a [b]?*#%20 +ünï&='~"


class TestMemory(BackendTests):
    across_processes = False

    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.root = secrets.token_hex(8)
        self.fs = fsspec.filesystem("memory")

    def make(self) -> Backend:
        return open_backend(f"memory://{self.root}")

    def raw_get(self, name: str) -> bytes:
        return bytes(self.fs.store[f"/{self.root}/{name}"].getvalue())

    def raw_put(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"/{self.root}/{name}", data)

    def raw_list(self) -> list[str]:
        start = f"/{self.root}/"
        return sorted(n.removeprefix(start) for n in self.fs.store if n.startswith(start))


class TestLocal(BackendTests):
    folder = "store"

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.root = tmp_path / self.folder

    def make(self) -> Backend:
        return open_backend(self.root)

    def raw_get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def raw_put(self, name: str, data: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)

    def raw_list(self) -> list[str]:
        own = {"lock", "lock.queue", "lock.replace"}
        files = (str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file())
        return sorted(set(files) - own)


class TestLocalAwkward(TestLocal):
    folder = AWKWARD


class S3Tests(BackendTests):
    prefix = "store"
    server: S3Server

    def start(self, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.root = f"{secrets.token_hex(6)}/{self.prefix}"
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)

    def make(self) -> Backend:
        return open_backend(f"s3://test/{self.root}", self.server.fsspec_options())

    def request(self, method: str, name: str, body: bytes = b"") -> bytes:
        path = f"/test/{self.root}/{name}"
        status, _, answer = self.server.request(method, path, body)
        assert status in (200, 204), (status, answer)
        return answer

    def raw_get(self, name: str) -> bytes:
        return self.request("GET", name)

    def raw_put(self, name: str, data: bytes) -> None:
        self.request("PUT", name, data)

    def raw_list(self) -> list[str]:
        query = f"list-type=2&encoding-type=url&max-keys=1000&prefix={quote(self.root, safe='')}%2F"
        _, _, body = self.server.request("GET", f"/test?{query}")
        keys = re.findall(r"<Key>([^<]*)</Key>", body.decode())
        return sorted(k.rpartition(f"{quote(self.prefix)}/")[2].replace("%2F", "/") for k in keys)


class TestSeaweed(S3Tests):
    @pytest.fixture(autouse=True)
    def place(self, s3server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.start(s3server, monkeypatch)


class TestMoto(S3Tests):
    races = False

    @pytest.fixture(autouse=True)
    def place(self, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.start(moto_server, monkeypatch)


@pytest.mark.parametrize("prefix", ["", AWKWARD, "a/b/c/"])
def test_any_prefix_of_a_bucket(s3server: S3Server, prefix: str) -> None:
    bucket = f"b{secrets.token_hex(6)}"
    assert s3server.request("PUT", f"/{bucket}")[0] == 200
    backend = open_backend(f"s3://{bucket}/{prefix}", s3server.fsspec_options())
    name = f"n/{secrets.token_hex(6)}"
    version = backend.create(name, b"1")
    backend.replace(name, b"2", version)
    assert backend.get(name, 0, 5) == b"2"
    assert [s.name for s in backend.list("")] == [name]
    assert backend.folders("") == ["n"]
    backend.delete(name, backend.now() + 30)
    assert list(backend.list("n")) == []


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}"])
def test_local_urls(tmp_path: Path, form: str) -> None:
    backend = open_backend(form.format(tmp_path / AWKWARD))
    backend.prepare(shared=False)
    backend.create("a", b"1")
    assert backend.kind == "local"
    assert (tmp_path / AWKWARD / "a").read_bytes() == b"1"


def test_s3a_is_s3(s3_url: str, s3_options: dict[str, Any]) -> None:
    backend = open_backend(s3_url.replace("s3://", "s3a://"), s3_options)
    assert (backend.kind, backend.url) == ("s3", s3_url)


def test_a_colon_in_a_path_is_no_protocol(tmp_path: Path) -> None:
    assert open_backend(f"{tmp_path}/x://y").kind == "local"


@pytest.mark.parametrize("url", ["", "a\0b", "s3://", "s3:///x", "s3://b/a//c", "s3://k:s@b/c"])
def test_urls_that_name_nothing(url: str) -> None:
    with pytest.raises(InvalidInputError):
        open_backend(url)


def test_an_unknown_protocol() -> None:
    with pytest.raises(BackendError, match="nosuch"):
        open_backend("nosuch://x").get("a")


def test_other_protocols_have_a_single_writer(tmp_path: Path) -> None:
    backend = open_backend(f"dir::file://{tmp_path}", {"dir": {"path": str(tmp_path)}})
    backend.prepare(shared=False)
    version = backend.create("a/b", b"1")
    assert backend.get("a/b") == b"1"
    assert backend.stat("a/b").version == version
    assert backend.replace("a/b", b"22", version) != version
    assert [s.name for s in backend.list("")] == ["a/b"]
    assert backend.probe() is False


def test_a_part_of_a_file_costs_no_more_than_the_part(tmp_path: Path) -> None:
    """What lies in place of a document may be of any size; ranges end where the file does."""
    backend = open_backend(f"dir::file://{tmp_path}", {"dir": {"path": str(tmp_path)}})
    backend.create("short", b"0123456789")
    backend.create("empty", b"")
    with next(tmp_path.rglob("short")).with_name("long").open("wb") as file:
        file.write(b"0123456789")
        file.truncate(1 << 30)
    tracemalloc.start()
    try:
        for name in ("long", "short"):
            assert backend.get(name, 0, 4) == b"0123"
            assert backend.get(name, 3, 7) == b"3456"
            assert backend.get(name, 5, 5) == b""
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert backend.get("short", 8, 64) == b"89"
    assert backend.get("short", 64, 128) == backend.get("short", 64) == b""
    assert backend.get("short", 8) == b"89"
    assert backend.get("empty", 0, 64) == b""
    for bounds in ((0, 64), (0, 0), (3, None)):
        with pytest.raises(ObjectNotFoundError):
            backend.get("missing", *bounds)


def test_two_memory_backends_exclude_each_other() -> None:
    root = secrets.token_hex(8)
    one, two = open_backend(f"memory://{root}"), open_backend(f"memory://{root}/")
    with (
        one.lock(exclusive=True, timeout=1),
        pytest.raises(BackendError, match="held"),
        two.lock(exclusive=False, timeout=0.1),
    ):
        pass
    with one.lock(exclusive=False, timeout=1), two.lock(exclusive=False, timeout=1):
        pass
