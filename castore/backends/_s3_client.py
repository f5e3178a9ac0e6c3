"""One process's S3 client, on fsspec's loop thread: made late, never shared over a fork.

aiohttp, botocore and s3fs each repeat requests on their own. All three are told not to: a
conditional write that is sent twice refuses its own success.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from castore.backend import ExpiredError
from castore.digest import digest_of
from castore.errors import BackendError

T = TypeVar("T")
_LONGEST = 604_800  # seconds; what S3 allows a signed request to live

_CONFIG: dict[str, Any] = {
    "max_pool_connections": 32,
    "signature_version": "s3v4",
    "connect_timeout": 5,
    "read_timeout": 25,
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "connector_args": {"keepalive_timeout": 5},
}

_clients: weakref.WeakSet[S3Client] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[str, S3Client] = weakref.WeakValueDictionary()
_inherited: list[Any] = []
"""What a forked child got from its parent: kept, since closing it would disturb the parent."""


class S3Client:
    """An s3fs file system and the loop it runs on."""

    def __init__(self, options: dict[str, Any]):
        from fsspec.asyn import get_loop

        self.loop = get_loop()
        self.fs = _file_system(options)
        self._ahead = 0.0
        weakref.finalize(self, _close, os.getpid(), self.loop, self.fs)
        _clients.add(self)

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work`` on the loop thread: also from within another running loop."""
        from fsspec.asyn import sync

        async def go() -> T:
            return await work()

        result: T = sync(self.loop, go)
        return result

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One request, sent once."""
        answer: dict[str, Any] = await self.fs._call_s3(method, **arguments)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date:
            self._ahead = parsedate_to_datetime(date).timestamp() - time.time()
        return answer

    async def signed_delete(self, bucket: str, key: str, expires: float) -> tuple[int, str]:
        """Status and text of a delete that the server refuses after ``expires`` by its own clock.

        The signature carries this machine's time and a number of seconds; the server compares
        their sum with its own clock. So the two clocks need not agree, but one here that is ahead
        leaves less time. `ExpiredError` when nothing is left, and nothing was sent.
        """
        from botocore.awsrequest import AWSPreparedRequest, HeadersDict

        url = await self._signed_url(bucket, key, expires)
        client = await self.fs.get_s3(bucket)
        request = AWSPreparedRequest("DELETE", url, HeadersDict(), b"", False)
        answer = await client._endpoint.http_session.send(request)
        return answer.status_code, (await answer.content).decode(errors="replace")[:500]

    async def _signed_url(self, bucket: str, key: str, expires: float) -> str:
        await self.fs.set_session()
        client = await self.fs.get_s3(bucket)
        arguments = self.fs._get_s3_method_kwargs(client.delete_object, Bucket=bucket, Key=key)
        for _ in range(3):
            seconds = int(expires - time.time())
            if seconds < 1 or time.time() + self._ahead > expires:
                break
            url: str = await client.generate_presigned_url(
                "delete_object", Params=arguments, ExpiresIn=min(seconds, _LONGEST)
            )
            # Signing may have waited for fresh credentials: what counts is what it wrote down.
            if _end_of(url) <= expires:
                return url
        raise ExpiredError(
            f"s3://{bucket}/{key}: not deleted, its time is over (by this machine's clock, which is"
            f" {abs(self._ahead):.0f} s {'behind' if self._ahead > 0 else 'ahead of'} the store's)"
        )


def client_for(options: dict[str, Any]) -> S3Client:
    """This process's client for ``options``: making one takes longer than most requests.

    One client serves all backends that are alive with equal options in an equal environment.
    """
    environment = sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_"))
    # A digest, since both may hold secrets.
    key = digest_of(f"{os.getpid()} {sorted(options.items())!r} {environment!r}".encode())
    client = _shared.get(key)
    if client is None:
        client = _shared[key] = S3Client(options)
    return client


class Gate:
    """Lets a number of coroutines and a number of bytes through at once."""

    def __init__(self, count: int, size: int):
        self._count, self._size = asyncio.Semaphore(count), size
        self._used, self._changed = 0, asyncio.Condition()

    @contextlib.asynccontextmanager
    async def passing(self, n: int) -> AsyncIterator[None]:
        """Wait until ``n`` bytes more may be under way; one alone may be larger."""
        async with self._count:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._used == 0 or self._used + n <= self._size
                )
                self._used += n
            try:
                yield
            finally:
                async with self._changed:
                    self._used -= n
                    self._changed.notify_all()


def _end_of(url: str) -> float:
    """When a signed URL ends, by the server's clock."""
    query = {k: v[0] for k, v in parse_qs(urlsplit(url).query).items()}
    if "X-Amz-Date" in query:
        start = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        return start.timestamp() + int(query["X-Amz-Expires"])
    if "Expires" in query:
        return float(query["Expires"])
    raise BackendError("deletes with an end need signed requests: anonymous access cannot prune")


def _file_system(options: dict[str, Any]) -> Any:
    try:
        from s3fs import S3FileSystem
    except ImportError as e:
        raise BackendError("S3 needs s3fs: pip install 'castore[s3]'") from e
    own = {"asynchronous", "loop", "use_listings_cache", "skip_instance_cache", "config_kwargs"}
    given = {k: v for k, v in options.items() if k not in own}
    config = {
        **_CONFIG,
        "http_session_cls": _session_class(),
        **options.get("config_kwargs", {}),
        "retries": {"total_max_attempts": 1},
    }
    # Asynchronous: s3fs' own clean-up would run in forked children, on a loop they do not have.
    fs = S3FileSystem(
        asynchronous=True,
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs=config,
        **given,
    )
    fs.retries = 1
    return fs


def _session_class() -> type:
    """aiobotocore's HTTP session, less aiohttp's habit to send a PUT again on a lost connection."""
    from aiobotocore.httpsession import AIOHTTPSession

    async def get_session(self: Any, proxy_url: str | None) -> Any:
        session = await AIOHTTPSession._get_session(self, proxy_url)
        session._retry_connection = False
        return session

    return type("SendOnce", (AIOHTTPSession,), {"_get_session": get_session})


def _close(pid: int, loop: Any, fs: Any) -> None:
    creator = getattr(fs, "_s3creator", None)
    if pid != os.getpid() or creator is None or not loop.is_running():
        return
    with contextlib.suppress(Exception):
        closed = asyncio.run_coroutine_threadsafe(creator.__aexit__(None, None, None), loop)
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            closed.result(1)
        else:
            if here is not loop:
                closed.result(1)


def _forget_in_child() -> None:
    for client in list(_clients):
        _inherited.append(client.fs)
        with contextlib.suppress(Exception):
            for session in client.fs._s3._endpoint.http_session._sessions.values():
                _inherited.append(session._connector)
                session._connector._closed = True  # or aiohttp complains when the child ends


os.register_at_fork(after_in_child=_forget_in_child)
