"""An HTTP proxy that breaks what passes through it, by a plan: a bad network on loopback.

    with FaultProxy(server.ports[0], Weather(seed=1, rate=0.05)) as proxy:
        options = {**server.fsspec_options(), "endpoint_url": proxy.url}

The ``Host`` header goes on unchanged, so a request signed for the proxy's address is still signed
when the server looks: it verifies the host it is told, not the port it listens on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import unquote

HOST = "127.0.0.1"

Kind = Literal[
    "reset", "cut_request", "slow_down", "forbid", "lose", "hang", "reset_after", "cut_answer",
    "error_after", "late", "delay",
]  # fmt: skip
"""What goes wrong with one request.

The server never acts: ``reset`` (the connection breaks), ``cut_request`` (half of the body gets
there), ``slow_down`` (503), ``forbid`` (403). It acts: ``lose`` (the connection ends without an
answer), ``hang`` (it stays open without one), ``reset_after``, ``cut_answer`` (half of the body, or
of the head where there is none), ``error_after`` (500). It acts later, when the client has been
told long ago that the connection broke: ``late``. ``delay``: all goes well, after a while.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the client sent it; ``path`` with its query, ``body`` decoded."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    @property
    def key(self) -> str:
        """The object's key, or ``""`` for a request about the bucket."""
        return unquote(self.path.partition("?")[0]).lstrip("/").partition("/")[2]

    def header(self, name: str) -> str:
        """The value of a header, or ``""``."""
        return next((v for n, v in self.headers if n.lower() == name), "")


@dataclass(frozen=True, slots=True)
class Answer:
    """The server's answer, its body in one piece."""

    status: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    bodiless: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer in the server's stead, with the code that S3 has for it."""

    status: int
    code: str


Plan = Callable[[Request], Kind | Refusal | None]


_REFUSALS = {"slow_down": Refusal(503, "SlowDown"), "forbid": Refusal(403, "AccessDenied")}


def calm(_: Request) -> Kind | None:
    """Nothing goes wrong."""
    return None


@dataclass(slots=True)
class Weather:
    """A plan by chance: what befalls the n-th request for a key depends on nothing but ``seed``.

    So threads may race as they like and a run can be told again by its seed, as far as its keys
    are equal. ``where`` chooses the requests that count; of those for one key by one method at most
    ``most`` are hit, so that a high ``rate`` need not end every operation.
    """

    seed: int
    rate: float
    kinds: Sequence[Kind] = KINDS
    where: Callable[[Request], bool] = lambda _: True
    most: int = 1 << 30
    _seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    _hit: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __call__(self, request: Request) -> Kind | None:
        if not self.where(request):
            return None
        what = request.method, request.path.partition("&X-Amz-")[0]
        self._seen[what] += 1
        rng = random.Random(f"{self.seed} {what} {self._seen[what]}")
        if rng.random() >= self.rate or self._hit[what] == self.most:
            return None
        self._hit[what] += 1
        return rng.choice(self.kinds)


@dataclass(slots=True)
class Once:
    """A plan that hits the ``at``-th (from 1) request that ``where`` accepts, and no other."""

    kind: Kind
    where: Callable[[Request], bool]
    at: int = 1
    seen: int = 0

    def __call__(self, request: Request) -> Kind | None:
        if not self.where(request):
            return None
        self.seen += 1
        return self.kind if self.seen == self.at else None


class FaultProxy:
    """Listens on a free port of 127.0.0.1 and passes requests to ``port``; a context manager.

    Parameters
    ----------
    port : int
        Where the server listens; it need not be there all the time.
    plan : callable
        Asked about each request, in the proxy's own thread; may be replaced at any time.
    seconds : float
        How long ``delay`` and ``late`` take.

    Notes
    -----
    ``injected`` counts the faults by kind; ``log`` holds method, key and fault (or None) of each
    request. `settle` waits until no late request is on its way any more; while ``held`` is set a
    late request waits for it, however slow the rest is.
    """

    def __init__(self, port: int, plan: Plan = calm, seconds: float = 0.1):
        self._target, self.plan, self.seconds = port, plan, seconds
        self.held = False
        self.injected: Counter[str] = Counter()
        self.log: list[tuple[str, str, Kind | Refusal | None]] = []
        self.port = 0
        self._late: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._end, self._called = asyncio.Event(), asyncio.Event()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    def settle(self) -> None:
        """Return when every request that was to come late has come."""
        while self._late:
            asyncio.run_coroutine_threadsafe(self._settled(), self._loop).result()

    async def _settled(self) -> None:
        self._called.set()
        await asyncio.gather(*self._late)
        self._called.clear()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        server = await asyncio.start_server(self._accept, HOST, 0, limit=1 << 17)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        await asyncio.sleep(0)
        while tasks := self._tasks | self._late:  # one may have been accepted just now
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client, until it or a fault ends it."""
        try:
            with contextlib.suppress(OSError, EOFError):
                while await self._one(reader, writer):
                    pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request on, or what the plan makes of it; whether the connection goes on."""
        request = await _request(reader, writer)
        kind = self.plan(request)
        self.log.append((request.method, request.key, kind))
        if kind is not None:
            self.injected[kind.code if isinstance(kind, Refusal) else kind] += 1
        refusal = kind if isinstance(kind, Refusal) else _REFUSALS.get(kind or "")
        if refusal is not None:
            return await _send(writer, _refusal(refusal, request.method))
        if kind in ("reset", "late", "cut_request"):
            if kind == "late":
                self._send_later(request)
            if kind == "cut_request":
                await self._ask(request, half=True)
            _reset(writer)
            return False
        if kind == "delay":
            await asyncio.sleep(self.seconds)
        answer = await self._ask(request)
        return answer is not None and await _give(kind, request, answer, reader, writer)

    def _send_later(self, request: Request) -> None:
        held = self.held

        async def send() -> None:
            await (self._called.wait() if held else asyncio.sleep(self.seconds))
            await self._ask(request)

        task = self._loop.create_task(send())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _ask(self, request: Request, half: bool = False) -> Answer | None:
        """What the server answers; None when it is not there, or hears one half only."""
        try:
            reader, writer = await asyncio.open_connection(HOST, self._target, limit=1 << 17)
        except OSError:
            return None
        try:
            body = request.body[: len(request.body) // 2] if half else request.body
            head = _head(request)
            writer.write(head[: len(head) // 2] if half and not body else head + body)
            await writer.drain()
            return None if half else await _answer(reader, request.method)
        except (OSError, EOFError):
            return None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _give(
    kind: Kind | Refusal | None,
    request: Request,
    answer: Answer,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> bool:
    """Send an answer, or as much of it as ``kind`` lets through."""
    if kind == "lose":
        return False
    if kind == "hang":
        await reader.read(1)  # until the client gives up
        return False
    if kind == "reset_after":
        _reset(writer)
        return False
    if kind == "error_after":
        return await _send(writer, _refusal(Refusal(500, "InternalError"), request.method))
    if kind == "cut_answer":
        data = _spelled(answer)
        keep = len(data) - len(answer.body) + len(answer.body) // 2
        writer.write(data[: keep if len(answer.body) > 1 else len(data) // 2])
        await writer.drain()
        return False
    return await _send(writer, answer)


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> bool:
    writer.write(_spelled(answer))
    await writer.drain()
    return True


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection as a crashed peer does."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


def _refusal(what: Refusal, method: str) -> Answer:
    told = f"<Code>{what.code}</Code><Message>injected</Message>"
    body = f"<?xml version='1.0'?><Error>{told}</Error>".encode()
    kind = ("Content-Type", "application/xml")
    return Answer(f"{what.status} {what.code}", (kind,), body, bodiless=method == "HEAD")


def _head(request: Request) -> bytes:
    skip = {"connection", "expect", "transfer-encoding", "content-length"}
    lines = [f"{request.method} {request.path} HTTP/1.1"]
    lines += [f"{n}: {v}" for n, v in request.headers if n.lower() not in skip]
    if request.body or request.method in ("PUT", "POST"):
        lines.append(f"Content-Length: {len(request.body)}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")


def _spelled(answer: Answer) -> bytes:
    skip = {"connection", "transfer-encoding"} | (set() if answer.bodiless else {"content-length"})
    lines = [f"HTTP/1.1 {answer.status}"]
    lines += [f"{n}: {v}" for n, v in answer.headers if n.lower() not in skip]
    if not answer.bodiless:
        lines.append(f"Content-Length: {len(answer.body)}")
    body = b"" if answer.bodiless else answer.body
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def _lines(reader: asyncio.StreamReader) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The first line and the headers of a message."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *rest = head.split("\r\n")[:-2]
    pairs = (line.partition(":") for line in rest)
    return first, tuple((n.strip(), v.strip()) for n, _, v in pairs)


async def _body(
    reader: asyncio.StreamReader, headers: Sequence[tuple[str, str]], to_end: bool
) -> bytes:
    known = {n.lower(): v for n, v in headers}
    if known.get("transfer-encoding", "").lower() == "chunked":
        parts: list[bytes] = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        while (await reader.readline()).strip():
            pass
        return b"".join(parts)
    if "content-length" in known:
        return await reader.readexactly(int(known["content-length"]))
    return await reader.read() if to_end else b""


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
    first, headers = await _lines(reader)
    method, path, _ = first.split(" ")
    if any(n.lower() == "expect" for n, _ in headers):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
    return Request(method, path, headers, await _body(reader, headers, to_end=False))


async def _answer(reader: asyncio.StreamReader, method: str) -> Answer:
    first, headers = await _lines(reader)
    while first.split(" ")[1].startswith("1"):
        first, headers = await _lines(reader)
    status = first.partition(" ")[2]
    if method == "HEAD" or status[:3] in ("204", "304"):
        return Answer(status, headers, b"", bodiless=True)
    return Answer(status, headers, await _body(reader, headers, to_end=True))
