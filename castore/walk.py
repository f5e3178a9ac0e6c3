"""Read many objects, each fetched, decoded and verified once, with bounded memory.

Objects come in groups, in an order in which a delta tends to follow its base. Whatever is
decoded on the way, as a base or for itself, is handed on at once and kept a while. A chain's next
delta stands on the newest content or, where the chain has its full length, on its root: these two
are kept for each group at work, and no more groups work at once than there is room for theirs.
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

_CACHE = 64 << 20  # bytes of content kept as bases
_UNDER_WAY = 96 << 20  # bytes of frames, contents and bases in the hands of all threads


class _UnderWay:
    """An object that a thread fetches and decodes, for others to wait for.

    ``content`` is None where that thread wanted it less deep than it is, and left it.
    """

    def __init__(self) -> None:
        self.depth: Future[int] = Future()
        self.content: Future[Buffer | None] = Future()


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
        self._budget, self._kept_budget = Budget(_UNDER_WAY), Budget(_CACHE)
        self._of_thread = threading.local()
        self._cache: OrderedDict[str, Buffer] = OrderedDict()
        self._cached = 0
        self._under_way: dict[str, _UnderWay] = {}
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
        """Hand on what is wanted of the group, in order."""
        chained = len(group) > 1  # until an object that is no delta follows another
        kept, self._of_thread.newest = 0, ""
        try:
            for i, digest in enumerate(group):
                if self._failed:
                    return
                with self._lock:
                    needed = digest in self._wanted
                if not needed:
                    continue
                size = self._size(digest)
                # Never while holding room for what is in hand: others may need that to go on.
                kept = self._exchange(kept, 2 * size if chained else 0)
                self._budget.take(3 * size)
                self._of_thread.chained, self._of_thread.deltas = chained, 0
                try:
                    self._content(digest, above=1 << 30)
                except CastoreError as e:
                    self._report(digest, e)
                except BaseException as e:
                    self._failed = self._failed or e
                finally:
                    self._budget.give(3 * size)
                chained = len(group) > 1 and (i == 0 or self._of_thread.deltas > 0)
        finally:
            self._kept_budget.give(kept)
            self._demote(self._of_thread.newest)  # no delta of this group follows it

    def _exchange(self, kept: int, wanted: int) -> int:
        """Other room for kept contents; what one has is given back before one waits for more."""
        if kept != wanted:
            self._kept_budget.give(kept)
            self._kept_budget.take(wanted)
        return wanted

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
        while True:
            mine = _UnderWay()
            with self._lock:
                kept = self._cache.get(digest)
                if kept is not None:
                    self._cache.move_to_end(digest)
                    return kept
                other = self._under_way.setdefault(digest, mine)
            if other is mine:
                return self._produce(digest, above, mine)
            _check_depth(digest, other.depth.result(), above)
            content = other.content.result()
            if content is not None:
                return content

    def _produce(self, digest: str, above: int, mine: _UnderWay) -> Buffer:
        try:
            data = self._store.frame(digest)
            header = check_frame(data, digest)
            mine.depth.set_result(header.depth)
            if header.depth >= above:
                mine.content.set_result(None)  # no fault of its own: others may want it as it is
                _check_depth(digest, header.depth, above)
            base = self._content(header.base, header.depth) if header.codec == DELTA else None
            content = open_frame(data, digest, base)
            self._keep(digest, content, header)
            mine.content.set_result(content)
        except BaseException as e:
            for future in (mine.depth, mine.content):
                if not future.done():
                    future.set_exception(e)
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

    def _keep(self, digest: str, content: Buffer, header: Header) -> None:
        mine = self._of_thread
        mine.newest, mine.deltas = digest, mine.deltas + (header.codec == DELTA)
        if header.depth > 1:  # its base is no root, and has its delta now
            self._demote(header.base)
        with self._lock:
            if not mine.chained and self._cached + len(content) > _CACHE // 2:
                return
            self._cache[digest] = content
            self._cached += len(content)
            if not mine.chained:  # the first to go
                self._cache.move_to_end(digest, last=False)
            while self._cached > _CACHE:
                _, old = self._cache.popitem(last=False)
                self._cached -= len(old)

    def _demote(self, digest: str) -> None:
        with self._lock:
            if digest in self._cache:
                self._cache.move_to_end(digest, last=False)


def _check_depth(digest: str, depth: int, above: int) -> None:
    if depth >= above:
        raise CorruptObjectError(
            f"object {digest}: its chain depth {depth} is not less than its delta's {above}: a"
            " loop or a forged chain",
            name=digest,
        )
