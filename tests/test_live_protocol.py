"""Writers and prunes as real processes, stopped by SIGSTOP at each of their calls to the store.

What `tests/test_schedules.py` shows on a model, on a real folder and a real S3 server.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from castore.cut import SMALL
from castore.errors import BackendError
from castore.prune import prune
from castore.publish import Patience
from castore.repository import Repository
from castore.source import Draft, MemoryFile
from castore.testing.s3server import S3Server
from castore.tree import File
from tests.faults import Wrapped
from tests.helpers import age, contents, drift, noise, problems, raw, weights

kinds = pytest.mark.parametrize("kind", ["local", "s3"])
MARGIN, OVERDUE = 0.5, 1.0
ASKED = {
    *("create", "create_many", "write_many", "sync", "replace", "delete", "delete_many"),
    *("get", "get_versioned", "stat", "list"),
}


@pytest.fixture
def url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if kind == "local":
        return str(tmp_path / "store")
    request.getfixturevalue("s3_env")
    return str(request.getfixturevalue("s3_url"))


class Stopping(Wrapped):
    """The process stops itself before the ``at``-th call (from 0) on names under ``only``."""

    def __init__(self, inner: Any, at: int, only: str = ""):
        super().__init__(inner)
        self.at, self.only, self.calls = at, only, 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        return self._asked(value) if name in ASKED else value

    def _asked(self, value: Callable[..., Any]) -> Callable[..., Any]:
        def call(what: Any, *args: Any, **more: Any) -> Any:
            what = what if isinstance(what, str) else list(what)
            names = [what] if isinstance(what, str) else list(map(_name, what))
            if any(n.startswith(self.only) for n in names):
                self.calls += 1
                if self.calls == self.at + 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
            return value(what, *args, **more)

        return call


def _name(item: Any) -> str:
    return item if isinstance(item, str) else str(item[0])


def opened(url: str, at: int = -1, only: str = "\0") -> Repository:
    """The repository with little patience, for a process that stops itself at a call."""
    found = Repository.open(url)
    patience = Patience(time.sleep, MARGIN, OVERDUE, 0.05)
    return Repository(Stopping(found.backend, at, only), found.id, patience)


class Child:
    """A forked process that does ``work``; ``ended`` tells whether it did, without an error."""

    def __init__(self, work: Callable[[], object]):
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        self.status: int | None = None

    def wait(self, seconds: float, stopped: bool = False) -> bool:
        """Whether it ended, or with ``stopped`` stopped itself, within the time."""
        until = time.monotonic() + seconds
        while self.status is None and time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                return stopped
            if pid:
                self.status = status
            time.sleep(0.005)
        return self.status is not None and not stopped

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @property
    def ended(self) -> bool:
        return self.wait(120) and self.status == 0

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@contextmanager
def child(work: Callable[[], object]) -> Iterator[Child]:
    process = Child(work)
    try:
        yield process
    finally:
        process.kill()


def files(content: dict[str, bytes]) -> Draft:
    return Draft({name: MemoryFile(data) for name, data in content.items()})


def garbage(repository: Repository, content: dict[str, bytes]) -> None:
    """Store ``content`` so that nothing needs it: the next prune without grace takes it."""
    repository.forget(repository.commit(files(content)).name)


def swept(url: str) -> Callable[[], object]:
    """A prune without grace that does not wait for the pause after an earlier one."""

    def work() -> object:
        repository = opened(url)
        return prune(repository, grace=0.0, sweep=20.0)

    return work


def steps(url: str, content: dict[str, bytes]) -> int:
    """How many calls a commit of ``content`` makes."""
    counting = opened(url, only="")
    counting.commit(files(content), namespace="count")
    calls: int = counting.backend.calls  # type: ignore[attr-defined]
    return calls


def commit_stopping(url: str, at: int, content: dict[str, bytes]) -> object:
    return opened(url, at, "").commit(files(content))


@kinds
def test_a_writer_stopped_before_a_step_loses_nothing(kind: str, url: str) -> None:
    """It reuses what a prune takes meanwhile, and adds to it. S3: it is fenced, starts over.

    On S3 a step takes ten seconds: some of them, or all with ``CASTORE_EVERY_STEP`` set.
    """
    Repository.init(url)
    old = drift(weights(SMALL), 0).tobytes()
    count = steps(url, {"old": old})
    every = kind == "local" or "CASTORE_EVERY_STEP" in os.environ
    chosen = range(count) if every else range(count // 2, count, max(1, count // 6))
    told = 0
    for at in chosen:
        content = {"old": old, "new": noise(1000, at)}
        garbage(opened(url), {"old": old, "other": noise(500, at)})
        age(opened(url))
        with child(partial(commit_stopping, url, at, content)) as writer:
            if not writer.wait(60, stopped=True):
                continue
            with child(swept(url)) as pruner:
                pruner.wait(0.2 if kind == "local" else 8)
                writer.go_on()
                assert writer.ended and pruner.ended
        told += 1
        assert contents(opened(url), "main@latest") == content, f"stopped before call {at}"
    assert told >= 3
    assert problems(opened(url)) == []


@kinds
def test_a_prune_stopped_past_its_end_deletes_nothing_more(kind: str, url: str) -> None:
    """S3: its deletes have expired, and who commits closed its sweep. Local: they wait for it."""
    Repository.init(url)
    content = {"a": noise(1000, 1), "b": noise(2000, 2)}
    garbage(opened(url), content)
    age(opened(url))

    def stop_at_delete() -> object:
        repository = opened(url)
        inner = repository.backend
        delete = inner.delete_many

        def stops(names: Any, expires: float | None = None) -> Any:
            if any(n.startswith("objects/") for n in names):
                os.kill(os.getpid(), signal.SIGSTOP)
            return delete(names, expires)

        setattr(inner, "delete_many", stops)  # noqa: B010
        return prune(repository, grace=0.0, sweep=6.0)

    with child(stop_at_delete) as pruner:
        assert pruner.wait(60, stopped=True)
        with child(lambda: opened(url).commit(files(content))) as writer:
            assert writer.wait(0.3 if kind == "local" else 60) == (kind == "s3")
            pruner.go_on()
            assert pruner.ended and writer.ended
    assert contents(opened(url), "latest") == content
    assert problems(opened(url)) == []


@kinds
def test_two_writers_race_to_store_each_as_a_delta_of_the_other(kind: str, url: str) -> None:
    """Neither may end up as the other's base and delta at once."""
    Repository.init(url)
    rounds = 12 if kind == "local" else 4
    pairs = []
    for n in range(rounds):
        one = weights(SMALL, n)
        pairs.append((one.tobytes(), drift(one, n).tobytes()))
    known = [
        [opened(url).commit(files({"w": c}), namespace="files").tree.entries["w"] for c in pair]
        for pair in pairs
    ]
    for name in list(opened(url).snapshots()):
        opened(url).forget(name)
    age(opened(url))
    with child(swept(url)) as pruner:
        assert pruner.ended

    def race(mine: int) -> None:
        repository = opened(url)
        for pair, entries in zip(pairs, known, strict=True):
            base = entries[1 - mine]
            assert isinstance(base, File)
            draft = Draft({"w": MemoryFile(pair[mine])}, base={"w": base})
            repository.commit(draft, namespace=f"writer{mine}")

    with child(lambda: race(0)) as one_, child(lambda: race(1)) as other:
        assert one_.ended and other.ended
    found = opened(url)
    assert len(list(found.snapshots())) == 2 * rounds
    assert problems(found) == []


@pytest.mark.parametrize("kind", ["local"])
def test_commits_that_overlap_leave_a_prune_its_turn(kind: str, url: str, tmp_path: Path) -> None:
    Repository.init(url)
    garbage(opened(url), {"a": noise(1000)})
    stop = tmp_path / "stop"

    def commits(seed: int) -> None:
        n = 0
        while not stop.exists():
            opened(url).commit(files({"x": noise(200, 1000 * seed + n)}))
            n += 1

    with (
        child(lambda: commits(1)) as a,
        child(lambda: commits(2)) as b,
        child(lambda: commits(3)) as c,
    ):
        for _ in range(3):
            with child(swept(url)) as pruner:
                assert pruner.ended
        assert not any(w.wait(0.01) for w in (a, b, c))
        stop.touch()
        assert a.ended and b.ended and c.ended
    assert problems(opened(url)) == []


class Deaf(ThreadingHTTPServer):
    """A store before which somebody takes every ``If-*`` away: signed again, as proxies do."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, server: S3Server):
        super().__init__(("127.0.0.1", 0), _DeafHandler)
        self.store = server

    @property
    def options(self) -> dict[str, Any]:
        endpoint = f"http://127.0.0.1:{self.server_port}"
        return {**self.store.fsspec_options(), "endpoint_url": endpoint}


class _DeafHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Deaf

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kept = {n: v for n, v in self.headers.items() if n.lower() in ("range", "content-type")}
        path = unquote(self.path.partition("?")[0]) + self.path[len(self.path.partition("?")[0]) :]
        status, headers, answer = self.server.store.request(self.command, path, body, kept)
        self.send_response_only(status)
        length = headers.pop("content-length", "0")
        for name, value in headers.items():
            if name not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_any  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def deaf(s3server: S3Server) -> Iterator[Deaf]:
    server = Deaf(s3server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_store_that_ignores_conditions_takes_one_writer_and_no_prune(
    deaf: Deaf, s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It commits, says aloud that it cannot keep writers apart, and prunes only offline."""
    repository = Repository.init(s3_url, storage_options=deaf.options)
    assert not repository.many_writers
    content = {"a": noise(1000)}
    name = repository.commit(files(content)).name
    assert "cannot keep two writers apart" in caplog.text
    repository.forget(repository.commit(files({"b": noise(500, 1)})).name)
    age(repository)
    before = raw(repository)
    with pytest.raises(BackendError, match="--offline"):
        prune(repository, grace=0.0)
    assert raw(repository) == before
    assert prune(repository, grace=0.0, offline=True).objects == 2
    assert contents(repository, name) == content
    direct = Repository.open(s3_url, storage_options=deaf.store.fsspec_options())
    assert direct.many_writers
    assert problems(direct) == []
