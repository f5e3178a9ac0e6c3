"""From sources to stored objects: read once, hash once, encode and put in parallel.

The calling thread reads the files in order, runs of pieces into private buffers. From such a
buffer a worker takes each blob's BLAKE3, looks whether it is stored, encodes it; another thread
takes the file's SHA-256; writers put batches of frames durably. Workers take runs in the order
they were read, so a blob may wait for an earlier one that is its base, never for a later one, nor
for one of the same content, which may be later.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count

from castore import bases, source
from castore.base_contents import BaseContents
from castore.cut import cut
from castore.digest import Buffer, digest_of
from castore.encode import Base, Compression, encode
from castore.errors import IntegrityError, NotFoundError
from castore.frame import MAX_DEPTH, Header, parse_header
from castore.objects import ObjectStore
from castore.pending import Blob, PendingFile, runs
from castore.source import Source
from castore.tree import File
from castore.write import Budget, FrameWriter

_IN_FLIGHT = 64 << 20  # bytes read and not yet encoded, or not yet hashed
_HELD = 96 << 20  # bytes kept back because their SHA-256 may turn out to be known
_FEW = 32  # known files to compare with: thousands may be of one size


@dataclass(frozen=True, slots=True)
class Options:
    """How to write: ``max_chain`` bounds the deltas a read goes through."""

    compression: Compression = "auto"
    max_chain: int = 8
    verify_hits: bool = False
    workers: int = 2


class Present:
    """Which digests the repository held when the commit began.

    One listing where that is cheaper than asking for each; local files are just asked for.
    """

    _GIVE_UP = 10_000

    def __init__(self, store: ObjectStore):
        self._store = store
        self._listed: set[str] | None = None
        if store.backend.kind != "local":
            listed: set[str] = set()
            for stat in store.list():
                listed.add(stat.name.rpartition("/")[2])
                if len(listed) > self._GIVE_UP:
                    return
            self._listed = listed

    def __call__(self, digest: str, headers: dict[str, Header | None]) -> bool:
        if self._listed is not None:
            return digest in self._listed
        return self._store.chain(digest, headers) is not None


def _pass_on(to: Future[None], ended: Future[None]) -> None:
    failure = ended.exception()
    if failure is None:
        to.set_result(None)
    else:
        to.set_exception(failure)


class Committer:
    """Stores the sources of one commit.

    Parameters
    ----------
    store : ObjectStore
    options : Options
    earlier : mapping of path to File
        The newest snapshot's files: searched for bases and for known SHA-256.
    hint : callable
        Gives the base file the caller named for a path, or None.
    progress : callable
        Told the number of source bytes read, as they are read.
    at_hand : sequence of source.BaseFile
        Earlier files whose bytes need not be read from the repository.
    """

    def __init__(
        self,
        store: ObjectStore,
        options: Options,
        earlier: Mapping[str, File],
        hint: Callable[[str], File | None],
        progress: Callable[[int], None],
        at_hand: Sequence[source.BaseFile] = (),
    ):
        self._store, self._options, self._hint, self._progress = store, options, hint, progress
        self._earlier = earlier
        self._headers: dict[str, Header | None] = {}
        self._present = Present(store)
        self._mine: dict[str, Blob] = {}
        self._contents = BaseContents(store, self._mine, at_hand)
        self._order = count()
        self._lock = threading.Lock()
        self._read_budget, self._hash_budget = Budget(_IN_FLIGHT), Budget(_IN_FLIGHT)
        self.writer = FrameWriter(store)
        self._held = 0
        self._known: dict[int, list[File]] = defaultdict(list)
        for file in earlier.values():
            self._known[file.size].append(file)
        self._series: dict[str, list[str]] = defaultdict(list)
        for path in earlier:
            self._series[bases.series_of(path)].append(path)
        self._done: dict[str, list[PendingFile]] = defaultdict(list)
        self._failure: BaseException | None = None

    # -- the caller's thread

    def store(self, sources: Mapping[str, Source]) -> dict[str, File]:
        """Store all ``sources``; on return every object they need is present.

        What was written or found is durable only once `ObjectStore.sync` was told.
        """
        files: list[PendingFile] = []
        with self.writer, ThreadPoolExecutor(1) as self._hashing:
            self._workers = ThreadPoolExecutor(self._options.workers)
            try:
                for path in sorted(
                    sources, key=lambda p: (bases.series_of(p), bases.natural_key(p))
                ):
                    files.append(self._read(path, sources[path]))
                    if self._failed:
                        break
                if not self._failed:  # else some blob was never handed out, and nobody would end it
                    self._settle(files)
            except BaseException as e:
                self._fail(e)
            finally:
                self._workers.shutdown()
        if self._failure:
            raise self._failure
        return {f.path: f.result.result() for f in files}

    @property
    def _failed(self) -> bool:
        return self._failure is not None or self.writer.failure is not None

    def _settle(self, files: list[PendingFile]) -> None:
        for f in files:
            for b in f.blobs:
                b.stored.result()
            f.result.result()

    def _read(self, path: str, source: Source) -> PendingFile:
        file = PendingFile(path, source)
        with source.open() as reader:
            pieces = cut(path, source.size, reader.read)
            file.plan(pieces, self._order)
            self._choose_bases(file)
            self._hold(file)
            for run in runs(pieces):
                if self._failed:
                    break
                start, stop = pieces[run.start].start, pieces[run.stop - 1].stop
                self._read_budget.take(stop - start)
                self._hash_budget.take(stop - start)
                content = reader.content(start, stop)
                self._progress(stop - start)
                self._hashing.submit(self._guarded, self._update, file, content)
                self._hand_out(file, run, memoryview(content))
            reader.check()
        if not self._failed:
            self._hashing.submit(self._guarded, self._finish, file)
        self._done[bases.series_of(path)].append(file)
        return file

    def _hand_out(self, file: PendingFile, run: range, content: memoryview) -> None:
        """Give a worker the blobs that are complete now that ``run`` of the slices was read."""
        complete: list[tuple[Blob, Buffer]] = []
        at = 0
        for i in run:
            blob, offset, length = file.slices[i]
            part = content[at : at + length]
            at += length
            if length == blob.length:
                complete.append((blob, part))
                continue
            blob.parts.append(bytes(part))  # a view would hold all that was read with it
            if offset + length == blob.length:
                complete.append((blob, b"".join(blob.parts)))
                blob.parts.clear()
        if complete:
            self._workers.submit(self._work, complete, len(content))

    def _choose_bases(self, file: PendingFile) -> None:
        if self._options.compression == "none":
            return
        series = bases.series_of(file.path)
        mine = self._done[series]
        earlier = self._hint(file.path) or self._earlier.get(file.path)
        if earlier is None and mine:
            file.line_up([(b, b.length) for b in mine[-1].blobs])
            return
        if earlier is None:
            near = bases.nearest_in_series(file.path, self._series[series])
            earlier = self._earlier[near] if near else None
        if earlier is not None:
            file.line_up(bases.blob_sequence(earlier))

    def _hold(self, file: PendingFile) -> None:
        """Put the file's SHA-256 off where a known file of its size may turn out to be equal."""
        with self._lock:
            known, same = self._known[file.source.size], self._earlier.get(file.path)
            few = known if len(known) <= _FEW else known[: _FEW // 2] + known[-_FEW // 2 :]
            if same is not None and same.size == file.source.size:
                few = [same, *few]
            file.candidates = [k for k in few if len(k.slices) == len(file.slices)]
            room = self._held + file.source.size <= _HELD
            file.holding = bool(file.candidates) and room and file.source.size > 0
            if file.holding:
                self._held += file.source.size

    # -- the hashing thread

    def _update(self, file: PendingFile, content: Buffer) -> None:
        try:
            if file.holding and file.candidates:
                file.held.append(content)
            else:
                file.flush()
                file.sha.update(content)
        finally:
            self._hash_budget.give(len(content))

    def _finish(self, file: PendingFile) -> None:
        result = file.file()
        with self._lock:
            if file.holding:
                self._held -= file.source.size
            self._known[result.size].append(result)
        file.result.set_result(result)

    # -- workers

    def _work(self, blobs: list[tuple[Blob, Buffer]], size: int) -> None:
        """Store what is new among the blobs of a run of ``size`` bytes.

        In their order: a blob may wait for one of lower order, so for none behind it.
        """
        new: list[tuple[Blob, str, Buffer]] = []
        for blob, content in sorted(blobs, key=lambda b: b[0].order):
            self._guarded(self._identify, blob, content, new)
        # As bases and as raw frames they are kept, and views would keep the run they lie in.
        thin = 2 * sum(len(content) for _, _, content in new) < size
        for blob, digest, content in new:
            self._guarded(self._put, blob, digest, content, thin)

    def _identify(self, blob: Blob, content: Buffer, new: list[tuple[Blob, str, Buffer]]) -> None:
        mine = False
        try:
            digest = digest_of(content)
            with self._lock:
                twin = self._mine.setdefault(digest, blob)
            blob.digest.set_result(digest)
            first = blob.first_slice
            blob.file.candidates = [
                k for k in blob.file.candidates if k.slices[first].blob == digest
            ]
            if twin is not blob:
                # Not waited for: it may itself wait for what this worker has still to do.
                twin.stored.add_done_callback(partial(_pass_on, blob.stored))
            elif self._reuse(digest, content):
                blob.stored.set_result(None)
            else:
                new.append((blob, digest, content))
                mine = True
        finally:
            if not mine:
                self._read_budget.give(len(content))

    def _put(self, blob: Blob, digest: str, content: Buffer, copied: bool) -> None:
        try:
            self._encode(blob, digest, bytes(content) if copied else content)
            blob.stored.set_result(None)
        finally:
            self._read_budget.give(len(content))

    def _reuse(self, digest: str, content: Buffer) -> bool:
        if not self._present(digest, self._headers):
            return False
        if self._options.verify_hits:
            try:
                self._store.read(digest)
            except (IntegrityError, NotFoundError):
                self._store.put_self_contained(digest, content)
                self._headers.pop(digest, None)
        return True

    def _encode(self, blob: Blob, digest: str, content: Buffer) -> None:
        base = self._base_of(blob)
        parts = encode(content, blob.width, base, self._options.compression)
        self._headers[digest] = parse_header(parts[0], digest)
        if self._options.compression != "none":
            self._contents.keep(digest, content)
        self.writer.put(digest, parts)

    def _base_of(self, blob: Blob) -> Base | None:
        """The blob's base, or the root of that one's chain where the chain is long enough."""
        at = blob.base
        if at is None or self._options.compression == "none":
            return None
        if isinstance(at, Blob):
            at = at.digest.result()
            owner = self._mine[at]
            if owner.order >= blob.order:  # it may be waiting for this very blob
                return None
            owner.stored.result()
        chain = self._store.chain(at, self._headers)
        if chain is None:
            return None
        before = self._headers[chain[0]]
        proven = bool(
            before and before.base and before.payload_length < 0.75 * before.content_length
        )
        deep = before is not None and before.depth >= MAX_DEPTH
        if len(chain) > self._options.max_chain or deep:
            chain = chain[-1:]
        header = self._headers[chain[0]]
        if self._options.max_chain == 0 or header is None or header.content_length != blob.length:
            return None
        content = self._contents.get(chain[0])
        if content is None:
            return None
        return Base(chain[0], header.depth, header.width, content, proven)

    # -- trouble

    def _guarded(self, function: Callable[..., None], *args: object) -> None:
        try:
            if self._failure and function not in (self._identify, self._put, self._update):
                raise self._failure
            function(*args)
        except BaseException as e:
            self._fail(e)
            if args and isinstance(args[0], Blob):
                for future in (args[0].digest, args[0].stored):
                    if not future.done():
                        future.set_exception(e)
            if args and isinstance(args[0], PendingFile) and not args[0].result.done():
                args[0].result.set_exception(e)

    def _fail(self, e: BaseException) -> None:
        if self._failure is None:
            self._failure = e

    # -- afterwards

    def heal(self, digests: Iterable[str]) -> list[str]:
        """Replace what is missing or has a broken chain by frames without a base, from the source.

        Gives the digests whose content is not at hand.
        """
        missing = []
        for digest in digests:
            blob = self._mine.get(digest)
            content = blob.reread() if blob else None
            if blob is None or content is None or digest_of(content) != digest:
                missing.append(digest)
                continue
            self._store.put_self_contained(digest, content, max(1, blob.width))
        return missing
