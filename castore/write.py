"""Put frames in batches while they are made: a durable put costs milliseconds of waiting."""

from __future__ import annotations

import queue
import threading

from castore.frame import Parts
from castore.objects import ObjectStore

_BATCH_BYTES, _BATCH_FRAMES = 4 << 20, 256
_QUEUED = 32 << 20  # bytes of frames that wait or are being written
_WRITERS = 4
_PATIENCE = 0.02  # seconds to wait for more: a writer that waits for ever can starve the budget


class Budget:
    """Blocks while too many bytes are under way; a single request always gets through."""

    def __init__(self, limit: int):
        self._limit, self._used, self._condition = limit, 0, threading.Condition()

    def take(self, n: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._used == 0 or self._used + n <= self._limit)
            self._used += n

    def give(self, n: int) -> None:
        with self._condition:
            self._used -= n
            self._condition.notify_all()


class FrameWriter:
    """Writer threads behind a bounded queue: while some wait for the store, others write.

    A delta may so be put before its base. A writer that dies in between leaves at worst a delta
    that nobody needs; whoever meets it looks at its chain, and puts a frame without a base.
    What was put is durable only once `ObjectStore.sync` was told.

    As a context it ends its threads on leaving and raises their failure, if nothing else did.
    ``added`` counts the bytes newly stored, ``objects`` the frames that were not there yet.
    """

    def __init__(self, store: ObjectStore):
        self._store = store
        # Not a SimpleQueue: its `get` may sleep for ever past a timeout (CPython 3.11).
        self._queue: queue.Queue[tuple[str, Parts, int] | None] = queue.Queue()
        self._budget = Budget(_QUEUED)
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(_WRITERS)]
        self.failure: BaseException | None = None
        self.added = self.objects = 0

    def put(self, digest: str, parts: Parts) -> None:
        """Queue a frame; waits while too much is queued."""
        size = sum(map(len, parts))
        self._budget.take(size)
        self._queue.put((digest, parts, size))

    def __enter__(self) -> FrameWriter:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        if kind is None and self.failure:
            raise self.failure

    def _run(self) -> None:
        while self._one_batch():
            pass

    def _one_batch(self) -> bool:
        """Wait for a batch and put it; False after the last. Returning lets go of its frames."""
        batch: list[tuple[str, Parts]] = []
        size = 0
        more = True
        while size < _BATCH_BYTES and len(batch) < _BATCH_FRAMES:
            try:
                item = self._queue.get(timeout=_PATIENCE if batch else None)
            except queue.Empty:
                break
            if item is None:
                more = False
                break
            batch.append(item[:2])
            size += item[2]
        self._put(batch, size)
        return more

    def _put(self, batch: list[tuple[str, Parts]], size: int) -> None:
        try:
            if batch and self.failure is None:
                created = self._store.write_many(batch)
                with self._lock:
                    for (_, parts), new in zip(batch, created, strict=True):
                        self.added += sum(map(len, parts)) * new
                        self.objects += new
        except BaseException as e:
            self.failure = self.failure or e
        finally:
            self._budget.give(size)
