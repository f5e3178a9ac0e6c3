"""Named bytes in an S3 bucket, through s3fs.

Every object travels by one PutObject: conditions on multipart uploads are dropped or racy. No
library retries a conditional write, since a retry turns its own success into a refusal; reads
are retried here. Listing caches are off; length is checked on every read. The client is made
per process, so forked and spawned workers may use a backend made by their parent.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import contextlib
import hashlib
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from castore.backend import MAX_OBJECT, ExpiredError, Stat, UnansweredError, check_name
from castore.backends import _s3_errors as errors
from castore.digest import Buffer
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    CastoreError,
    InvalidInputError,
    ObjectNotFoundError,
)

T = TypeVar("T")
_ATTEMPTS = 5
_CONCURRENT_BYTES = 96 << 20


class S3Backend:
    """One prefix of a bucket; see `castore.backend.Backend` for the contract.

    ``storage_options`` are those of s3fs; what the environment says (``AWS_ENDPOINT_URL``,
    ``AWS_ACCESS_KEY_ID`` ...) is enough on its own, and is all a pickled backend takes along.
    """

    kind = "s3"
    parallel = 16

    def __init__(self, path: str, storage_options: dict[str, Any]):
        self._bucket, _, prefix = path.strip("/").partition("/")
        if not self._bucket:
            raise InvalidInputError(f"s3://{path}: expected s3://BUCKET/PREFIX")
        self._prefix = prefix.strip("/")
        self._options = storage_options
        self.url = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self._clients: dict[int, Any] = {}

    def __repr__(self) -> str:
        return f"S3Backend({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        secret = {"key", "secret", "token", "username", "password", "session", "client_kwargs"}
        kept = {k: v for k, v in self._options.items() if k not in secret}
        return S3Backend, (f"{self._bucket}/{self._prefix}", kept)

    # -- reading

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        return self._run(lambda: self._reading(name, lambda: self._get(name, start, stop)))[0]

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        return self._run(lambda: self._reading(name, lambda: self._get(name, None, None)))

    def stat(self, name: str) -> Stat:
        async def head() -> Stat:
            r = await self._call("head_object", Key=self._key(name))
            return Stat(name, r["ContentLength"], r["LastModified"].timestamp(), r["ETag"])

        return self._run(lambda: self._reading(name, head))

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> Iterator[Stat]:
        pages = self._pages(prefix, after, limit)
        if limit is None and not prefix.startswith("objects"):
            # Some servers list folder by folder, which is not the order of the names.
            return iter(sorted(pages, key=lambda s: s.name))
        return pages

    def folders(self, prefix: str) -> builtins.list[str]:
        found: builtins.list[str] = []
        root, token = self._folder(prefix), {}
        while True:
            page = self._page(Prefix=root, Delimiter="/", **token)
            found += [p["Prefix"][len(root) : -1] for p in page.get("CommonPrefixes", [])]
            if not page.get("IsTruncated"):
                return sorted(found)
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def now(self) -> float:
        page = self._page(Prefix=self._folder(""), MaxKeys=1)
        date = page["ResponseMetadata"]["HTTPHeaders"]["date"]
        return parsedate_to_datetime(date).timestamp()

    # -- writing

    def create(self, name: str, data: Buffer) -> str:
        version = self._run(lambda: self._create(name, data))
        if version is None:
            raise AlreadyExistsError(f"{self.url}/{name} exists already")
        return version

    def create_many(self, items: Sequence[tuple[str, Buffer]]) -> builtins.list[str | None]:
        for name, data in items:
            self._key(name)
            _refuse_large(name, data)
        return self._run(lambda: self._create_all(items))

    def sync(self, names: Iterable[str]) -> None:
        """Nothing to sync: what S3 acknowledges is durable."""

    def replace(self, name: str, data: Buffer, if_version: str) -> str:
        _refuse_large(name, data)
        condition = {"IfMatch": if_version} if if_version else {"IfNoneMatch": "*"}
        version = self._run(lambda: self._writing(name, lambda: self._put(name, data, condition)))
        if version is None:
            raise AlreadyExistsError(f"{self.url}/{name} was changed by another writer")
        return version

    def delete(self, name: str, expires: float | None = None) -> None:
        outcome = self.delete_many([name], expires)[0]
        if outcome is not None:
            raise outcome

    def delete_many(
        self, names: Sequence[str], expires: float | None = None
    ) -> builtins.list[BaseException | None]:
        return self._run(lambda: self._delete_all(names, expires))

    def lock(self, *, exclusive: bool, timeout: float) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def probe(self) -> bool:
        name = f"tmp/probe-{secrets.token_hex(16)}"
        version = self.create(name, b"1")
        try:
            try:
                self.create(name, b"2")
                return False
            except AlreadyExistsError:
                pass
            try:
                self.replace(name, b"3", f'"{secrets.token_hex(16)}"')
                return False
            except AlreadyExistsError:
                pass
            self.replace(name, b"4", version)
            return True
        finally:
            self.delete(name)

    def prepare(self, *, shared: bool) -> None:
        """Buckets are made by their owners; a missing one is told by the first request."""

    # -- requests

    def _key(self, name: str) -> str:
        check_name(name)
        return f"{self._prefix}/{name}" if self._prefix else name

    def _folder(self, prefix: str) -> str:
        if prefix:
            return self._key(prefix) + "/"
        return f"{self._prefix}/" if self._prefix else ""

    @property
    def _fs(self) -> Any:
        """This process's client: one that was made before a fork does not work after it."""
        pid = os.getpid()
        if pid not in self._clients:
            self._clients = {pid: self._make_client()}
        return self._clients[pid]

    def _make_client(self) -> Any:
        try:
            from s3fs import S3FileSystem
        except ImportError as e:
            raise BackendError("S3 needs s3fs: pip install 'castore[s3]'") from e
        options = dict(self._options)
        config = {
            "max_pool_connections": 32,
            "retries": {"total_max_attempts": 1},
            "signature_version": "s3v4",
            "connect_timeout": 5,
            "read_timeout": 60,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **options.pop("config_kwargs", {}),
        }
        fs = S3FileSystem(
            config_kwargs=config, use_listings_cache=False, skip_instance_cache=True, **options
        )
        fs.retries = 1
        return fs

    def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run ``work`` on fsspec's loop thread: also from threads, and inside a running loop."""
        from fsspec.asyn import sync

        async def go() -> T:
            return await work()

        result: T = sync(self._fs.loop, go)
        return result

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._fs._call_s3(method, Bucket=self._bucket, **arguments)
        return answer

    async def _get(self, name: str, start: int | None, stop: int | None) -> tuple[bytes, str]:
        arguments = {}
        if start is not None or stop is not None:
            last = "" if stop is None else str(stop - 1)
            arguments["Range"] = f"bytes={start or 0}-{last}"
        answer = await self._call("get_object", Key=self._key(name), **arguments)
        async with answer["Body"] as body:
            data: bytes = await body.read()
        if len(data) != answer["ContentLength"]:
            raise errors.ShortRead(f"{len(data)} bytes of {answer['ContentLength']}")
        return data, answer["ETag"]

    async def _reading(self, name: str, read: Callable[[], Awaitable[T]]) -> T:
        """``read()``, again where that may help, with errors in castore's words."""
        for attempt in range(_ATTEMPTS):
            try:
                return await read()
            except CastoreError:
                raise
            except Exception as e:
                fault = errors.fault(e)
                if fault.missing:
                    if not fault.code.startswith("NoSuch"):
                        await self._need_bucket()
                    raise ObjectNotFoundError(f"{self.url}/{name} does not exist") from None
                if fault.status == 416:
                    return b"", ""  # type: ignore[return-value]
                if not fault.passing or attempt == _ATTEMPTS - 1:
                    raise errors.told(self.url, "read", fault) from e
            await asyncio.sleep(random.uniform(0.5, 1) * 0.15 * 3**attempt)
        raise AssertionError("unreachable")

    async def _need_bucket(self) -> None:
        """An answer to HEAD has no body: ask whether it is the bucket that is missing."""
        try:
            await self._call("list_objects_v2", MaxKeys=1, Prefix=self._folder(""))
        except Exception as e:
            raise errors.told(self.url, "read", errors.fault(e)) from e

    def _page(self, **arguments: Any) -> dict[str, Any]:
        return self._run(
            lambda: self._reading("", lambda: self._call("list_objects_v2", **arguments))
        )

    def _pages(self, prefix: str, after: str | None, limit: int | None) -> Iterator[Stat]:
        root, skip = self._folder(prefix), len(self._folder(""))
        more: dict[str, Any] = {"StartAfter": self._key(after)} if after else {}
        left = limit
        while True:
            page = self._page(Prefix=root, MaxKeys=min(1000, left or 1000), **more)
            for item in page.get("Contents", []):
                name = item["Key"][skip:]
                if prefix or not name.startswith("tmp/"):
                    yield Stat(name, item["Size"], item["LastModified"].timestamp(), item["ETag"])
            left = None if left is None else left - len(page.get("Contents", []))
            if not page.get("IsTruncated") or left == 0:
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _put(self, name: str, data: Buffer, condition: dict[str, str]) -> str | None:
        """One PutObject; None when the condition was refused."""
        checksum = base64.b64encode(hashlib.sha256(data).digest()).decode()
        for attempt in range(_ATTEMPTS):
            try:
                answer = await self._call(
                    "put_object",
                    Key=self._key(name),
                    Body=bytes(data),
                    ChecksumSHA256=checksum,
                    **condition,
                )
            except Exception as e:
                fault = errors.fault(e)
                if fault.status == 412 or (fault.missing and "IfMatch" in condition):
                    if fault.code == "NoSuchBucket":
                        raise
                    return None
                if fault.status != 409 or attempt == _ATTEMPTS - 1:
                    raise
                await asyncio.sleep(random.uniform(0, 0.05 * 2**attempt))
            else:
                version: str = answer["ETag"]
                return version
        raise AssertionError("unreachable")

    async def _writing(self, name: str, write: Callable[[], Awaitable[T]]) -> T:
        try:
            return await write()
        except CastoreError:
            raise
        except Exception as e:
            fault = errors.fault(e)
            if fault.unanswered:
                raise UnansweredError(
                    f"{self.url}/{name}: no clear answer to a write: {fault.text}"
                ) from e
            raise errors.told(self.url, "write", fault) from e

    async def _create(self, name: str, data: Buffer) -> str | None:
        _refuse_large(name, data)
        put = lambda: self._put(name, data, {"IfNoneMatch": "*"})  # noqa: E731
        return await self._writing(name, put)

    async def _create_all(self, items: Sequence[tuple[str, Buffer]]) -> builtins.list[str | None]:
        gate = _Gate(self.parallel, _CONCURRENT_BYTES)

        async def one(name: str, data: Buffer) -> str | None:
            async with gate.passing(len(data)):
                for attempt in range(_ATTEMPTS):
                    try:
                        return await self._create(name, data)
                    except UnansweredError:
                        if attempt == _ATTEMPTS - 1:
                            raise
                    await asyncio.sleep(random.uniform(0.5, 1) * 0.15 * 3**attempt)
            raise AssertionError("unreachable")

        results = await asyncio.gather(*(one(n, d) for n, d in items), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [r for r in results if not isinstance(r, BaseException)]

    async def _delete_all(
        self, names: Sequence[str], expires: float | None
    ) -> builtins.list[BaseException | None]:
        gate = asyncio.Semaphore(self.parallel)

        async def one(name: str) -> BaseException | None:
            async with gate:
                try:
                    if expires is None:
                        await self._delete(name)
                    else:
                        await self._delete_until(name, expires)
                except BackendError as e:
                    return e
            return None

        return list(await asyncio.gather(*(one(n) for n in names)))

    async def _delete(self, name: str) -> None:
        async def once() -> None:
            try:
                await self._call("delete_object", Key=self._key(name))
            except Exception as e:
                fault = errors.fault(e)
                if not fault.missing or fault.code == "NoSuchBucket":
                    raise

        for attempt in range(_ATTEMPTS):
            try:
                return await self._writing(name, once)
            except UnansweredError:
                if attempt == _ATTEMPTS - 1:
                    raise
            await asyncio.sleep(random.uniform(0.5, 1) * 0.15 * 3**attempt)

    async def _delete_until(self, name: str, expires: float) -> None:
        """A signed request that the server itself refuses after ``expires``, sent once.

        The signature carries this machine's time and a number of seconds; their sum is an instant
        that the server compares with its own clock.
        """
        seconds = int(expires - time.time())
        if seconds < 1:
            raise ExpiredError(f"{self.url}/{name}: not deleted, the sweep's end has passed")
        client = await self._fs.get_s3(self._bucket)
        url = await client.generate_presigned_url(
            "delete_object",
            Params={"Bucket": self._bucket, "Key": self._key(name)},
            ExpiresIn=min(seconds, 604_800),
        )
        status, text = await asyncio.to_thread(errors.send_delete, url)
        if status in (200, 204, 404):
            return
        if status == 403 and "expired" in text.lower():
            raise ExpiredError(f"{self.url}/{name}: not deleted, the sweep's end has passed")
        if status == 0 or status >= 500:
            raise UnansweredError(f"{self.url}/{name}: no answer to a delete: {text}")
        raise BackendError(f"{self.url}/{name}: the store refused a delete ({status}): {text}")


class _Gate:
    """Lets a number of coroutines and a number of bytes through at once."""

    def __init__(self, count: int, size: int):
        self._count, self._size = asyncio.Semaphore(count), size
        self._used, self._changed = 0, asyncio.Condition()

    @contextlib.asynccontextmanager
    async def passing(self, n: int) -> Any:
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


def _refuse_large(name: str, data: Buffer) -> None:
    if len(data) > MAX_OBJECT:
        raise InvalidInputError(f"{name}: {len(data)} bytes, at most {MAX_OBJECT}")
