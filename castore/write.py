"""Put frames in batches while they are made: a durable put costs milliseconds of waiting."""

from __future__ import annotations

import queue
import threading

from castore.objects import ObjectStore

_BATCH_BYTES, _BATCH_FRAMES = 16 << 20, 256
_WRITERS = 2
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
    """Writer threads behind a bounded queue: one writes a batch while the other waits for the disk.

    A delta may so be put before its base. A writer that dies in between leaves at worst a delta
    that nobody needs; whoever meets it looks at its chain, and puts a frame without a base.

    As a context it ends its threads on leaving and raises their failure, if nothing else did.
    ``added`` counts the bytes newly stored, ``found`` holds the digests that were there already.
    """

    def __init__(self, store: ObjectStore):
        self._store = store
        self._queue: queue.Queue[tuple[str, bytes] | None] = queue.Queue()
        self._budget = Budget(2 * _BATCH_BYTES)
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(_WRITERS)]
        self.failure: BaseException | None = None
        self.added = self.objects = 0
        self.found: set[str] = set()

    def put(self, digest: str, data: bytes) -> None:
        """Queue a frame; waits while too much is queued."""
        self._budget.take(len(data))
        self._queue.put((digest, data))

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
        more = True
        while more:
            batch: list[tuple[str, bytes]] = []
            size = 0
            while size < _BATCH_BYTES and len(batch) < _BATCH_FRAMES:
                try:
                    item = self._queue.get(timeout=_PATIENCE if batch else None)
                except queue.Empty:
                    break
                if item is None:
                    more = False
                    break
                batch.append(item)
                size += len(item[1])
            self._put(batch, size)

    def _put(self, batch: list[tuple[str, bytes]], size: int) -> None:
        try:
            if batch and self.failure is None:
                created = self._store.create_many(batch)
                with self._lock:
                    for (digest, data), new in zip(batch, created, strict=True):
                        self.added += len(data) * new
                        self.objects += new
                        if not new:
                            self.found.add(digest)
        except BaseException as e:
            self.failure = self.failure or e
        finally:
            self._budget.give(size)
