"""ObjectStore: content by digest. Hashes again on every read; hides frames and delta chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from castore import frame
from castore.backend import Backend, Stat, UnansweredError
from castore.cache import Cache
from castore.digest import Buffer, digest_of
from castore.errors import CorruptObjectError, ObjectNotFoundError
from castore.frame import HEADER_SIZE, Header, Parts
from castore.tree import Link, Tree

FOLDER = "objects"
_TRIES = 10  # of a write without an answer
_TREES = 100_000  # entries, slices and 100 characters of trees that are kept, some 100 bytes each


def object_name(digest: str) -> str:
    """Where an object lies: the full digest is the last element, so it can be found by eye."""
    return f"{FOLDER}/{digest[:2]}/{digest}"


def digest_of_name(name: str) -> str:
    return name.rpartition("/")[2]


class ObjectStore:
    """Objects of one repository.

    Headers are cached by name and version: a cached one is used only where a listing or the
    answer to our own write said that this very version is there. ``trees`` are decoded ones by
    digest, which spare the decoding and not the look at the object.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self._known: dict[str, tuple[str, Header]] = {}
        self.trees: Cache[str, Tree] = Cache(_TREES, _weight)

    # -- reading

    def frame(self, digest: str) -> bytes:
        """The stored frame, unchecked. `ObjectNotFoundError` when it is missing."""
        try:
            # Somebody else may have put a file of any size there.
            return self.backend.get(object_name(digest), 0, frame.MAX_FRAME + 1)
        except ObjectNotFoundError:
            raise ObjectNotFoundError(
                f"object {digest} is missing from {self.backend.url}: run 'castore check' to see"
                " what needs it"
            ) from None

    def header(self, digest: str) -> Header | None:
        """The header as it is now (one small read), or None when the object is missing."""
        try:
            head = self.backend.get(object_name(digest), 0, HEADER_SIZE)
        except ObjectNotFoundError:
            return None
        return frame.parse_header(head, digest)

    def read(self, digest: str, out: memoryview | None = None) -> Buffer:
        """The content, its digest checked; goes through at most `frame.MAX_DEPTH` bases.

        It is decoded into ``out`` where that has room and the frame is not stored raw: ``obj`` of
        the result is then that of ``out``. What is there after an error is undefined.
        """
        chain: list[tuple[str, bytes]] = []
        at = digest
        while True:
            data = self.frame(at)
            header = frame.parse_header(data, at)
            chain.append((at, data))
            if header.codec != frame.DELTA:
                break
            at = header.base
            if len(chain) > frame.MAX_DEPTH or any(at == seen for seen, _ in chain):
                raise CorruptObjectError(f"object {digest}: its chain does not end", name=digest)
        content = _through(chain, out)
        if digest_of(content) == digest:
            return content
        return _step_by_step(chain)

    def chain(self, digest: str, headers: dict[str, Header | None]) -> list[str] | None:
        """``digest`` and its bases down to the root, or None where that chain is broken.

        Broken: a base is missing, of another length, or no less deep than what stands on it. Two
        writers that race to store one blob each take their own frame's depth for the stored one.

        ``headers`` is consulted first and filled with what had to be read.
        """
        seen: list[str] = []
        at = digest
        while True:
            if at not in headers:
                try:
                    headers[at] = self.header(at)
                except CorruptObjectError:
                    headers[at] = None
            header = headers[at]
            if header is None or not _may_follow(header, headers[seen[-1]] if seen else None):
                return None
            seen.append(at)
            if header.codec != frame.DELTA:
                return seen
            at = header.base

    def broken(
        self,
        digests: Sequence[str],
        pulse: Callable[[], None],
        headers: dict[str, Header | None] | None = None,
    ) -> list[str]:
        """Those of ``digests`` that are missing now, damaged in their header, or lack a base.

        ``pulse`` is called at least once in a thousand objects. ``headers`` is filled with what
        was looked at: ``digests`` and all their bases.
        """
        headers = {} if headers is None else headers
        headers.clear()
        wave = list(digests)
        while wave:
            for i in range(0, len(wave), 20_000):
                headers.update(self.current_headers(wave[i : i + 20_000], pulse))
                pulse()
            found = (headers[d] for d in wave)
            wave = [h.base for h in found if h and h.base and h.base not in headers]
        return [d for d in digests if self.chain(d, headers) is None]

    def current_headers(
        self, digests: Iterable[str], pulse: Callable[[], None] = lambda: None
    ) -> dict[str, Header | None]:
        """Headers as they are now, for many: by one listing and the cache where that is cheaper.

        Damaged headers count as missing here: whoever wants to tell them apart asks `header`.
        """
        wanted = list(dict.fromkeys(digests))
        result: dict[str, Header | None] = {}
        if self.backend.kind != "local" and len(wanted) > 32:
            result = self._headers_by_listing(set(wanted), pulse)
        rest = [d for d in wanted if d not in result]

        def one(digest: str) -> Header | None:
            try:
                pulse()
                return self.header(digest)
            except CorruptObjectError:
                return None

        if len(rest) <= 1 or self.backend.kind == "local":
            result.update((d, one(d)) for d in rest)
        else:
            with ThreadPoolExecutor(self.backend.parallel) as pool:
                result.update(zip(rest, pool.map(one, rest), strict=True))
        return result

    def _headers_by_listing(
        self, wanted: set[str], pulse: Callable[[], None]
    ) -> dict[str, Header | None]:
        """What a listing settles, given up where it would take more requests than asking each."""
        result: dict[str, Header | None] = {}
        seen: set[str] = set()
        for n, stat in enumerate(self.backend.list(FOLDER)):
            if n > 250 * len(wanted):
                return {}
            if n % 1000 == 999:
                pulse()
            digest = digest_of_name(stat.name)
            if digest in wanted:
                seen.add(digest)
                known = self._known.get(digest)
                if known and known[0] == stat.version:
                    result[digest] = known[1]
        result.update((d, None) for d in wanted - seen)
        return result

    # -- writing

    def create_many(self, frames: list[tuple[str, bytes]]) -> list[bool]:
        """Put frames under their digests; True for each that was not there yet."""
        versions = self.backend.create_many([(object_name(d), f) for d, f in frames])
        for (digest, data), version in zip(frames, versions, strict=True):
            if version is not None:
                self._known[digest] = (version, frame.parse_header(data, digest))
        return [v is not None for v in versions]

    def write_many(self, frames: Sequence[tuple[str, Parts]]) -> list[bool]:
        """`create_many` whose names are durable only after `sync`."""
        versions = self.backend.write_many([(object_name(d), parts) for d, parts in frames])
        for (digest, (head, _)), version in zip(frames, versions, strict=True):
            if version is not None:
                self._known[digest] = (version, frame.parse_header(head, digest))
        return [v is not None for v in versions]

    def sync(self, digests: Iterable[str]) -> None:
        """Make objects durable that were found present, or written by `write_many`."""
        self.backend.sync(map(object_name, digests))

    def put_self_contained(self, digest: str, content: Buffer, width: int = 1) -> None:
        """Put a frame without a base in place of one that is missing or whose chain is broken.

        The one way a writer replaces a frame (docs/format.md, invariant 2): same content, more
        readable. ``content`` is hashed first.
        """
        if digest_of(content) != digest:
            raise CorruptObjectError(
                f"object {digest}: the content at hand has another digest", name=digest
            )
        data = b"".join(frame.packed(content, width))
        name = object_name(digest)
        unanswered = 0
        while True:
            try:
                version = self.backend.stat(name).version
            except ObjectNotFoundError:
                if self.create_many([(digest, data)])[0]:
                    return
                continue
            try:
                version = self.backend.replace(name, data, version)
            except FileExistsError:
                continue
            except UnansweredError:  # the same content: sent again after another look
                unanswered += 1
                if unanswered == _TRIES:
                    raise
                continue
            self._known[digest] = version, frame.parse_header(data, digest)
            return

    def list(self) -> Iterable[Stat]:
        """Every stored object, in the order of digests."""
        return self.backend.list(FOLDER)


def _may_follow(base: Header, above: Header | None) -> bool:
    """Whether ``base`` can be what ``above`` is a difference to; depth falls, so chains end."""
    return above is None or (
        base.depth < above.depth and base.content_length == above.content_length
    )


def _weight(tree: Tree) -> int:
    links = (e.target for e in tree.entries.values() if isinstance(e, Link))
    text = sum(map(len, tree.entries)) + sum(map(len, links))
    return 8 + len(tree.entries) + sum(len(f.slices) for _, f in tree.files()) + text // 100


def _through(chain: Sequence[tuple[str, bytes]], out: memoryview | None) -> Buffer:
    """Content of the first of ``chain``, its digest not yet checked.

    A base's own digest needs no look, since what follows from a wrong one is wrong. Two pieces of
    memory take turns, so that the last step decodes into ``out``.
    """
    content: Buffer | None = None
    memory = [out, None]
    for left in range(len(chain) - 1, -1, -1):
        name, data = chain[left]
        content = frame.decode(data, content, name, memory[left % 2])
        if isinstance(content, memoryview) and not content.readonly:
            memory[left % 2] = content
    assert content is not None
    return content


def _step_by_step(chain: Sequence[tuple[str, bytes]]) -> Buffer:
    """The same, every digest checked: the error names the object that is wrong."""
    content: Buffer | None = None
    for name, data in reversed(chain):
        content = open_frame(data, name, content)
    assert content is not None
    return content


def open_frame(data: Buffer, digest: str, base: Buffer | None) -> Buffer:
    """The content of a frame, its digest checked."""
    content = frame.decode(data, base, digest)
    actual = digest_of(content)
    if actual != digest:
        raise CorruptObjectError(
            f"object {digest}: its content has the digest {actual}: the object is damaged; run"
            " 'castore check --read-data' to see what needs it",
            name=digest,
            expected=digest,
            actual=actual,
        )
    return content
