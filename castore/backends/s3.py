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
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from castore.backend import MAX_REPLACE, ExpiredError, Stat, UnansweredError, check_name
from castore.backends import _s3_errors as errors
from castore.backends._rules import refuse_large, scrub, secrets_in, span, without_secrets
from castore.backends._s3_client import Gate, S3Client, client_for
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
_PATIENCE = 40.0  # seconds: a read is not sent again after that
_CONCURRENT = 32
_CONCURRENT_BYTES = 96 << 20
_LONG_HASH = 1 << 20


class S3Backend:
    """One prefix of a bucket; see `castore.backend.Backend` for the contract.

    ``storage_options`` are those of s3fs; what the environment says (``AWS_ENDPOINT_URL``,
    ``AWS_ACCESS_KEY_ID`` ...) is enough on its own, and is all a pickled backend takes along.
    """

    kind = "s3"
    parallel = 16

    def __init__(self, path: str, storage_options: dict[str, Any]):
        self._bucket, _, prefix = path.rstrip("/").partition("/")
        if not self._bucket or "@" in self._bucket:
            raise InvalidInputError(
                "expected s3://BUCKET/PREFIX; credentials go into AWS_* or storage_options"
            )
        self._prefix = prefix.strip("/")
        if "//" in self._prefix:  # some servers store it as one slash, and then list nothing
            raise InvalidInputError(f"s3://{path}: expected single slashes in the prefix")
        self._options = storage_options
        self.url = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self._secrets = secrets_in(storage_options)
        self._clients: dict[int, S3Client] = {}

    def __repr__(self) -> str:
        return f"S3Backend({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        path = f"{self._bucket}/{self._prefix}"
        return S3Backend, (path, without_secrets(self._options))

    # -- reading

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        first, last = span(start, stop)
        if last is not None and last <= first:
            self.stat(name)  # there is no way to ask for nothing
            return b""
        return self._run(lambda: self._reading(name, lambda: self._get(name, first, last)))[0]

    def get_versioned(self, name: str) -> tuple[bytes, str]:
        return self._run(lambda: self._reading(name, lambda: self._get(name, 0, None)))

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
        root = self._folder(prefix)
        more: dict[str, Any] = {}
        while True:
            page = self._page(Prefix=root, Delimiter="/", **more)
            names = [p["Prefix"][len(root) : -1] for p in page.get("CommonPrefixes", [])]
            if page["ResponseMetadata"]["HTTPHeaders"].get("server") != "AmazonS3":
                names = self._not_empty(root, names)
            found += names
            if not page.get("IsTruncated"):
                return sorted(found)
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _not_empty(self, root: str, names: Sequence[str]) -> builtins.list[str]:
        """SeaweedFS lists folders for a while after their last name went."""

        async def look(name: str) -> bool:
            page = await self._reading(
                name, lambda: self._call("list_objects_v2", Prefix=f"{root}{name}/", MaxKeys=1)
            )
            return "Contents" in page

        async def look_all() -> builtins.list[bool]:
            return await asyncio.gather(*(look(n) for n in names))

        return [n for n, full in zip(names, self._run(look_all), strict=True) if full]

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
        return self.write_many([(name, (data,)) for name, data in items])

    def write_many(
        self, items: Sequence[tuple[str, Sequence[Buffer]]]
    ) -> builtins.list[str | None]:
        for name, parts in items:
            self._key(name)
            refuse_large(name, *parts)
        return self._run(lambda: self._create_all(items))

    def sync(self, names: Iterable[str]) -> None:
        """Nothing to sync: what S3 acknowledges is durable."""

    def replace(self, name: str, data: Buffer, if_version: str) -> str:
        refuse_large(name, data, limit=MAX_REPLACE)
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
        for attempt in range(_ATTEMPTS - 1):
            try:
                return self._probe_once()
            except UnansweredError:  # what may come late concerns this attempt's name alone
                time.sleep(random.uniform(0.5, 1) * 0.15 * 3**attempt)
        return self._probe_once()

    def _probe_once(self) -> bool:
        name = f"tmp/probe-{secrets.token_hex(16)}"
        version = self.create(name, b"1")
        other = f'"{secrets.token_hex(16)}"'
        try:
            return (
                self._refuses(lambda: self.create(name, b"2"))
                and self._refuses(lambda: self.replace(name, b"3", other))
                and not self._refuses(lambda: self.replace(name, b"4", version))
            )
        finally:
            with contextlib.suppress(BackendError):
                self.delete(name)

    @staticmethod
    def _refuses(write: Callable[[], object]) -> bool:
        try:
            write()
        except AlreadyExistsError:
            return True
        return False

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
    def _client(self) -> S3Client:
        """This process's client: one that was made before a fork does not work after it."""
        pid = os.getpid()
        client = self._clients.get(pid)
        return client or self._clients.setdefault(pid, client_for(self._options))

    def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        return self._client.run(work)

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return await self._client.call(method, Bucket=self._bucket, **arguments)

    def _fault(self, error: Exception) -> errors.Fault:
        return errors.fault(error, self._secrets)

    async def _get(self, name: str, start: int, stop: int | None) -> tuple[bytes, str]:
        arguments = {}
        if start or stop is not None:
            arguments["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        try:
            answer = await self._call("get_object", Key=self._key(name), **arguments)
        except Exception as e:
            if arguments and self._fault(e).status == 416:  # all of it lies past the end
                return b"", ""
            raise
        async with answer["Body"] as body:
            data: bytes = await body.read()
        if len(data) != answer["ContentLength"]:
            raise errors.ShortRead(f"{len(data)} bytes of {answer['ContentLength']}")
        if arguments and "ContentRange" not in answer:  # a server that gave the whole
            data = data[start:stop]
        return data, answer["ETag"]

    async def _reading(self, name: str, read: Callable[[], Awaitable[T]]) -> T:
        """``read()``, again where that may help, with errors in castore's words."""
        began = time.monotonic()
        for attempt in range(_ATTEMPTS):
            try:
                return await read()
            except CastoreError:
                raise
            except Exception as e:
                fault = self._fault(e)
                if fault.missing:
                    if not fault.code.startswith("NoSuch"):
                        await self._need_bucket()
                    raise ObjectNotFoundError(f"{self.url}/{name} does not exist") from None
                late = time.monotonic() - began > _PATIENCE
                if not fault.passing or late or attempt == _ATTEMPTS - 1:
                    raise errors.told(self.url, "read", fault) from e
            await asyncio.sleep(random.uniform(0.5, 1) * 0.15 * 3**attempt)
        raise AssertionError("unreachable")

    async def _need_bucket(self) -> None:
        """An answer to HEAD has no body: ask whether it is the bucket that is missing."""
        try:
            await self._call("list_objects_v2", MaxKeys=1, Prefix=self._folder(""))
        except Exception as e:
            raise errors.told(self.url, "read", self._fault(e)) from e

    def _page(self, **arguments: Any) -> dict[str, Any]:
        return self._run(
            lambda: self._reading("", lambda: self._call("list_objects_v2", **arguments))
        )

    def _pages(self, prefix: str, after: str | None, limit: int | None) -> Iterator[Stat]:
        root, skip = self._folder(prefix), len(self._folder(""))
        more: dict[str, Any] = {"StartAfter": self._key(after)} if after else {}
        left = limit
        while left is None or left > 0:
            page = self._page(Prefix=root, MaxKeys=min(1000, left or 1000), **more)
            for item in page.get("Contents", []):
                name = item["Key"][skip:]
                hidden = name.endswith("/") or (not prefix and name.startswith("tmp/"))
                if not hidden and (after is None or name > after):
                    left = None if left is None else left - 1
                    yield Stat(name, item["Size"], item["LastModified"].timestamp(), item["ETag"])
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _put(self, name: str, data: Buffer, condition: dict[str, str]) -> str | None:
        """One PutObject; None when the condition was refused."""
        body = data if isinstance(data, bytes) else bytes(data)
        if len(body) < _LONG_HASH:
            digest = hashlib.sha256(body)
        else:  # the loop serves everybody
            digest = await asyncio.to_thread(hashlib.sha256, body)
        checksum = base64.b64encode(digest.digest()).decode()
        for attempt in range(_ATTEMPTS):
            try:
                answer = await self._call(
                    "put_object",
                    Key=self._key(name),
                    Body=body,
                    ChecksumSHA256=checksum,
                    **condition,
                )
            except Exception as e:
                fault = self._fault(e)
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
            fault = self._fault(e)
            if fault.unanswered:
                raise UnansweredError(
                    f"{self.url}/{name}: no clear answer to a write: {fault.text}"
                ) from e
            raise errors.told(self.url, "write", fault) from e

    async def _create(self, name: str, data: Buffer) -> str | None:
        refuse_large(name, data)
        put = lambda: self._put(name, data, {"IfNoneMatch": "*"})  # noqa: E731
        return await self._writing(name, put)

    async def _create_all(
        self, items: Sequence[tuple[str, Sequence[Buffer]]]
    ) -> builtins.list[str | None]:
        gate = Gate(_CONCURRENT, _CONCURRENT_BYTES)

        async def one(name: str, parts: Sequence[Buffer]) -> str | None:
            async with gate.passing(sum(map(len, parts))):
                data = parts[0] if len(parts) == 1 else b"".join(parts)
                for attempt in range(_ATTEMPTS):
                    try:
                        return await self._create(name, data)
                    except UnansweredError:
                        if attempt == _ATTEMPTS - 1:
                            raise
                    await asyncio.sleep(random.uniform(0.5, 1) * 0.15 * 3**attempt)
            raise AssertionError("unreachable")

        results = await asyncio.gather(*(one(n, p) for n, p in items), return_exceptions=True)
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
                fault = self._fault(e)
                if not fault.missing or fault.code == "NoSuchBucket":
                    raise

        for attempt in range(_ATTEMPTS):
            try:
                await self._writing(name, once)
                return
            except UnansweredError:
                if attempt == _ATTEMPTS - 1:
                    raise
            await asyncio.sleep(random.uniform(0.5, 1) * 0.15 * 3**attempt)

    async def _delete_until(self, name: str, expires: float) -> None:
        """A signed request that the server itself refuses after ``expires``, sent once."""
        where = f"{self.url}/{name}"
        try:
            status, text = await self._client.signed_delete(self._bucket, self._key(name), expires)
        except CastoreError:
            raise
        except Exception as e:
            fault = self._fault(e)
            # The original names the signed URL, which is as good as a key until it ends.
            if fault.unanswered:
                raise UnansweredError(f"{where}: no answer to a delete: {fault.text}") from None
            raise errors.told(self.url, "delete", fault) from None
        text = scrub(text, self._secrets)
        if status in (200, 204) or (status == 404 and "NoSuchBucket" not in text):
            return
        if status == 403 and "expired" in text.lower():
            raise ExpiredError(f"{where}: not deleted, the sweep's end has passed")
        code = next(iter(re.findall("<Code>([^<]*)</Code>", text)), str(status))
        fault = errors.Fault(status, code, text)
        if fault.unanswered:
            raise UnansweredError(f"{where}: no clear answer to a delete: {text}")
        raise errors.told(self.url, "delete", fault)
