"""Read many objects, each fetched, decoded and verified once, with bounded memory.

Objects come in groups, in an order in which a delta tends to follow its base. Whatever is
decoded on the way, as a base or for itself, is handed on at once and kept a while.
A base's chain depth is less than its delta's, so chains end and waiting threads cannot form a ring.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from castore.digest import Buffer
from castore.errors import CastoreError, CorruptObjectError
from castore.frame import DELTA, Header, check_frame
from castore.objects import ObjectStore, open_frame
from castore.write import Budget

_CACHE = 40 << 20  # bytes of content kept as bases
_UNDER_WAY = 96 << 20  # bytes of frames, contents and bases in the hands of all threads


class Walker:
    """Hands the verified content of each wanted object to ``sink``, exactly once.

    Parameters
    ----------
    store : ObjectStore
    wanted : digests to hand on
    sink : called with digest, content and frame, from any of the threads
    trouble : called instead with digest and error; without it the first error ends the walk, and
        ``culprit`` is the wanted digest that met it
    """

    def __init__(
        self,
        store: ObjectStore,
        wanted: Collection[str],
        sink: Callable[[str, Buffer, bytes], None],
        trouble: Callable[[str, CastoreError], None] | None = None,
    ):
        self._store, self._wanted, self._sink, self._trouble = store, set(wanted), sink, trouble
        self._lock = threading.Lock()
        self._budget = Budget(_UNDER_WAY)
        self._cache: OrderedDict[str, Buffer] = OrderedDict()
        self._cached = 0
        self._under_way: dict[str, tuple[int, Future[Buffer]]] = {}
        self._failed: BaseException | None = None
        self.culprit = ""

    def run(
        self, groups: Iterable[Sequence[str]], workers: int, size: Callable[[str], int]
    ) -> None:
        """Walk all groups; each is worked through in order by one thread.

        ``size`` tells how long an object's content is (by a tree or a header), to bound memory.
        """
        self._size = size
        with ThreadPoolExecutor(workers) as pool:
            try:
                for future in [pool.submit(self._group, g) for g in groups]:
                    future.result()
            except BaseException as e:  # Ctrl-C: the threads stop after what they have in hand
                self._failed = self._failed or e
                raise
        self._group(sorted(self._wanted))  # what no group held
        if self._failed:
            raise self._failed

    def _group(self, group: Sequence[str]) -> None:
        for digest in group:
            if self._failed:
                return
            with self._lock:
                needed = digest in self._wanted
            if needed:
                room = 3 * self._size(digest)
                self._budget.take(room)
                try:
                    self._content(digest, above=1 << 30)
                except CastoreError as e:
                    self._report(digest, e)
                except BaseException as e:
                    self._failed = self._failed or e
                finally:
                    self._budget.give(room)

    def _report(self, digest: str, error: CastoreError) -> None:
        with self._lock:
            first = digest in self._wanted
            self._wanted.discard(digest)
        if self._trouble is None:
            self._failed, self.culprit = self._failed or error, self.culprit or digest
        elif first:
            self._trouble(digest, error)

    def _content(self, digest: str, above: int) -> Buffer:
        """Content of an object whose depth must be less than ``above``."""
        with self._lock:
            kept = self._cache.get(digest)
            if kept is not None:
                self._cache.move_to_end(digest)
                return kept
            under_way = self._under_way.get(digest)
        if under_way is None:
            data = self._store.frame(digest)
            header = check_frame(data, digest)
            mine: Future[Buffer] = Future()
            with self._lock:
                under_way = self._under_way.setdefault(digest, (header.depth, mine))
            if under_way[1] is mine:
                return self._decode(digest, data, header, above, mine)
            del data
        depth, future = under_way
        _check_depth(digest, depth, above)
        return future.result()

    def _decode(
        self, digest: str, data: bytes, header: Header, above: int, mine: Future[Buffer]
    ) -> Buffer:
        try:
            _check_depth(digest, header.depth, above)
            base = self._content(header.base, header.depth) if header.codec == DELTA else None
            content = open_frame(data, digest, base)
            self._keep(digest, content)
            mine.set_result(content)
        except BaseException as e:
            mine.set_exception(e)
            raise
        finally:
            with self._lock:
                self._under_way.pop(digest, None)
        with self._lock:
            first = digest in self._wanted
            self._wanted.discard(digest)
        if first:
            self._sink(digest, content, data)
        return content

    def _keep(self, digest: str, content: Buffer) -> None:
        with self._lock:
            self._cache[digest] = content
            self._cached += len(content)
            while self._cached > _CACHE:
                _, old = self._cache.popitem(last=False)
                self._cached -= len(old)


def _check_depth(digest: str, depth: int, above: int) -> None:
    if depth >= above:
        raise CorruptObjectError(
            f"object {digest}: its chain depth {depth} is not less than its delta's {above}: a"
            " loop or a forged chain",
            name=digest,
        )
