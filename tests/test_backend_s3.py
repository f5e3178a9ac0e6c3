"""What only S3 has: outages told apart, lost answers, ends of deletes, secrets, loops, forks."""

from __future__ import annotations

import asyncio
import gc
import http.client
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from castore.backend import Backend, ExpiredError, UnansweredError
from castore.backends import open_backend
from castore.backends._s3_client import _shared, client_for
from castore.errors import AlreadyExistsError, BackendError, ObjectNotFoundError
from castore.testing.s3server import S3Server


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server, less or later than they came, and counts them.

    Answers to methods of ``lose`` are lost, to one method of one name at most ``most``. Deletes
    wait for the time ``until``.
    """

    daemon_threads = True
    request_queue_size = 128
    strip = False
    lose: tuple[str, ...] = ()
    most = 1 << 30
    until = 0.0

    def __init__(self, server: S3Server):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = server.ports[0]
        self.seen: list[str] = []
        self._asked: Counter[tuple[str, str]] = Counter()
        self._counting = threading.Lock()
        self.options = {
            **server.fsspec_options(),
            "endpoint_url": f"http://127.0.0.1:{self.server_port}",
        }

    def loses(self, method: str, path: str) -> bool:
        """Whether the answer to this request is lost."""
        what = method, path.partition("?")[0]
        with self._counting:
            self._asked[what] += method in self.lose
            return method in self.lose and self._asked[what] <= self.most

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append(self.command)
        lost = self.server.loses(self.command, self.path)
        if self.command == "DELETE":
            time.sleep(max(0.0, self.server.until - time.time()))
        to = http.client.HTTPConnection("127.0.0.1", self.server.target)
        to.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if not (self.server.strip and name.lower().startswith("if-")):
                to.putheader(name, value)
        to.endheaders(body)
        answer = to.getresponse()
        content = answer.read()
        to.close()
        if lost:
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on  # noqa: N815


def _proxy(server: S3Server) -> Iterator[Proxy]:
    proxy = Proxy(server)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
    thread.start()
    yield proxy
    proxy.shutdown()
    thread.join()
    proxy.server_close()


@pytest.fixture
def proxy(s3server: S3Server) -> Iterator[Proxy]:
    yield from _proxy(s3server)


@pytest.fixture
def moto_proxy(moto_server: S3Server) -> Iterator[Proxy]:
    yield from _proxy(moto_server)


@pytest.fixture
def backend(s3_url: str, s3_options: dict[str, Any]) -> Backend:
    return open_backend(s3_url, s3_options)


def every_call(backend: Backend) -> list[Any]:
    return [
        lambda: backend.get("a"),
        lambda: backend.get("a", 0, 64),
        lambda: backend.stat("a"),
        lambda: list(backend.list("a", limit=1)),
        lambda: backend.folders("a"),
        lambda: backend.create("a", b"x"),
        lambda: backend.create_many([("a", b"x")]),
        lambda: backend.replace("a", b"x", '"0123"'),
        lambda: backend.delete("a"),
        lambda: backend.delete("a", time.time() + 60),
        lambda: backend.now(),
        lambda: backend.probe(),
    ]


def refused(backend: Backend, text: str, skip: tuple[int, ...] = ()) -> None:
    for i, call in enumerate(every_call(backend)):
        if i in skip:
            continue
        with pytest.raises(BackendError, match=text) as e:
            call()
        assert not isinstance(e.value, UnansweredError), i
        assert backend.url in str(e.value), i


def test_a_missing_bucket_is_not_an_empty_one(s3_options: dict[str, Any]) -> None:
    # SeaweedFS answers a compare-and-swap with 412 before it looks for the bucket.
    backend = open_backend("s3://no-such-bucket/x", s3_options)
    refused(backend, "bucket does not exist", skip=(7,))


def test_an_unknown_key(s3_url: str, s3_options: dict[str, Any]) -> None:
    options = {**s3_options, "key": "AKNOSUCH"}
    with pytest.raises(BackendError, match="AWS_ACCESS_KEY_ID"):
        open_backend(s3_url, options).get("a")
    refused(open_backend(s3_url, options), "AWS_ACCESS_KEY_ID|no permission")


def test_a_wrong_secret(s3_url: str, s3_options: dict[str, Any]) -> None:
    options = {**s3_options, "secret": "wrong-and-secret"}
    with pytest.raises(BackendError, match="AWS_SECRET_ACCESS_KEY") as e:
        open_backend(s3_url, options).get("a")
    assert "wrong-and-secret" not in f"{e.value}{e.value.__cause__}"
    refused(open_backend(s3_url, options), "AWS_SECRET_ACCESS_KEY|no permission")


def test_a_dead_port(s3_url: str, s3_options: dict[str, Any]) -> None:
    with socket.socket() as deaf:  # bound, so that nobody else comes to listen there
        deaf.bind(("127.0.0.1", 0))
        options = {**s3_options, "endpoint_url": f"http://127.0.0.1:{deaf.getsockname()[1]}"}
        backend = open_backend(s3_url, options)
        for call in (lambda: backend.get("a"), lambda: list(backend.list("")), backend.now):
            with pytest.raises(BackendError, match="cannot be reached"):
                call()
        with pytest.raises(BackendError, match="cannot be reached") as e:
            backend.create("a", b"")
        assert not isinstance(e.value, UnansweredError)


def test_secrets_stay_out_of_everything(
    s3_url: str, s3_options: dict[str, Any], s3_env: dict[str, str]
) -> None:
    options = {
        **s3_options,
        "token": None,
        "client_kwargs": {**s3_options["client_kwargs"], "verify": False},
        "s3_additional_kwargs": {"SSECustomerKey": "hidden-customer-key"},
    }
    backend = open_backend(s3_url, options)
    pickled = pickle.dumps(backend)
    shown = f"{backend!r}{backend.url}{pickled!r}"
    for secret in (s3_options["key"], s3_options["secret"], "hidden-customer-key"):
        assert secret not in shown
    copy = pickle.loads(pickled)
    copy.create("a", b"1")
    assert copy.get("a") == b"1"
    assert b"us-east-1" in pickled  # only what is secret is left out


def test_the_environment_alone_is_enough(s3_url: str, s3_env: dict[str, str]) -> None:
    backend = open_backend(s3_url)
    backend.create("a", b"1")
    assert backend.get("a") == b"1"


def test_within_a_running_loop(backend: Backend) -> None:
    async def cell() -> bytes:
        backend.create("a", b"1")
        return backend.get("a")

    assert asyncio.run(cell()) == b"1"


def test_a_forked_child_ends_quietly(s3_url: str, s3_env: dict[str, str]) -> None:
    code = f"""
import os, sys, time
from castore.backends import open_backend
from castore.backends._s3_client import _shared, client_for
backend = open_backend({s3_url!r})
backend.create("a", b"1")
pid = os.fork()
if pid == 0:
    start = time.monotonic()
    assert backend.get("a") == b"1"
    backend.create("b", b"2")
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert backend.get("b") == b"2"
"""
    done = subprocess.run(
        [sys.executable, "-Wignore::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- conditions and answers


def test_a_store_that_ignores_conditions_is_found_out(moto_proxy: Proxy) -> None:
    backend = open_backend(f"s3://test/{secrets.token_hex(6)}", moto_proxy.options)
    assert backend.probe() is True
    moto_proxy.strip = True
    assert backend.probe() is False
    assert list(backend.list("tmp")) == []


def test_a_lost_answer_is_unanswered_and_sent_once(proxy: Proxy, s3_url: str) -> None:
    backend = open_backend(s3_url, proxy.options)
    version = backend.create("warm", b"up")  # so that the connection is an old one
    writes: list[Any] = [
        lambda: backend.create("a", b"1"),
        lambda: backend.replace("warm", b"2", version),
    ]
    for write in writes:
        proxy.lose, proxy.seen = ("PUT",), []
        with pytest.raises(UnansweredError):
            write()
        assert proxy.seen == ["PUT"]
        proxy.lose = ()
        backend.get("warm")
    assert (backend.get("a"), backend.get("warm")) == (b"1", b"2")


def test_create_many_gets_through_a_lossy_network(proxy: Proxy, s3_url: str) -> None:
    backend = open_backend(s3_url, proxy.options)
    proxy.lose, proxy.most = ("PUT",), 2
    items = [(f"objects/{i:02}/x", str(i).encode()) for i in range(10)]
    backend.create_many(items)
    assert proxy.seen.count("PUT") == 3 * len(items)
    assert {n: backend.get(n) for n, _ in items} == dict(items)


def test_reads_get_through_a_lossy_network(proxy: Proxy, s3_url: str) -> None:
    backend = open_backend(s3_url, proxy.options)
    backend.create("a", b"1")
    proxy.lose, proxy.most, proxy.seen = ("GET", "HEAD"), 2, []
    assert backend.get("a") == b"1"
    assert backend.stat("a").size == 1
    assert proxy.seen == ["GET"] * 3 + ["HEAD"] * 3
    proxy.most = 1 << 30
    with pytest.raises(BackendError, match="could not read"):
        list(backend.list(""))


# -- deletes with an end


def test_a_late_delete_is_refused_by_the_server(proxy: Proxy, s3_url: str) -> None:
    backend = open_backend(s3_url, proxy.options)
    backend.create("a", b"1")
    proxy.seen = []
    while "DELETE" not in proxy.seen:  # a client that is held up for three seconds sends nothing
        end = backend.now() + 3
        proxy.until = end + 2.5
        with pytest.raises(ExpiredError):
            backend.delete("a", end)
    assert proxy.seen.count("DELETE") == 1  # it was sent, and arrived too late
    assert backend.get("a") == b"1"


def test_a_delete_with_an_end_is_sent_once(proxy: Proxy, s3_url: str) -> None:
    backend = open_backend(s3_url, proxy.options)
    backend.create("a", b"1")
    proxy.lose, proxy.seen = ("DELETE",), []
    with pytest.raises(UnansweredError) as e:
        backend.delete("a", time.time() + 30)
    assert proxy.seen == ["DELETE"]
    assert "Signature" not in f"{e.value}{e.value.__cause__}"
    with pytest.raises(ObjectNotFoundError):
        backend.get("a")


@pytest.mark.parametrize("ahead", [-300, 300])
def test_a_wrong_clock_here_does_not_move_the_end(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    import datetime

    backend.create("a", b"1")
    real = time.time
    end = real() + 60
    monkeypatch.setattr(time, "time", lambda: real() + ahead)

    def shifted(remove_tzinfo: bool = True) -> datetime.datetime:
        now = datetime.datetime.fromtimestamp(real() + ahead, datetime.UTC)
        return now.replace(tzinfo=None) if remove_tzinfo else now

    monkeypatch.setattr("botocore.auth.get_current_datetime", shifted)
    if ahead > 0:  # nothing can be signed to end before it begins: refused, never late
        with pytest.raises(ExpiredError, match="ahead of the store"):
            backend.delete("a", end)
        backend.delete("a", end + ahead + 30)
    else:
        backend.delete("a", end)
        backend.create("a", b"1")
        with pytest.raises(ExpiredError):
            backend.delete("a", real() - 2)


def test_bounds_of_replace_on_a_missing_name(backend: Backend) -> None:
    with pytest.raises(AlreadyExistsError):
        backend.replace("a", b"1", '"0123456789abcdef0123456789abcdef"')


def test_backends_that_are_alive_at_once_share_a_client(
    s3_url: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a root makes several; equal options in another environment are another client."""
    monkeypatch.setenv("AWS_SDK_UA_APP_ID", os.urandom(4).hex())  # no other test's client
    first = open_backend(s3_url, s3_options)
    second = open_backend(f"{s3_url}/below", s3_options)
    first.create("a", b"1")
    assert [s.name for s in second.list("")] == []
    client = weakref.ref(client_for(s3_options))
    assert client() is not None and client() is client_for(s3_options)
    monkeypatch.setenv("AWS_REGION", "elsewhere-1")
    other = client_for(s3_options)
    assert other is not client()
    secrets = [str(v) for v in s3_options.values()]
    assert not any(s in key for key in _shared for s in secrets)
    monkeypatch.undo()
    del first, second
    for _ in range(600):
        gc.collect()
        if client() is None:
            break
        time.sleep(0.1)  # the loop's thread may be on its way out of the last call
    assert client() is None


def test_a_forked_child_has_a_client_of_its_own(s3_options: dict[str, Any]) -> None:
    here = client_for(s3_options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(0 if client_for(s3_options) is not here else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
