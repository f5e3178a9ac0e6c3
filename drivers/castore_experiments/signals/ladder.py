"""The rungs that logged rows climb: memory, the local file, the repository.

`Ladder` holds rows that are not in a snapshot yet and moves them up; what fails stays where it
is and is tried again. Safe for threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from castore import BackendError, CastoreError, InvalidInputError, SnapshotName
from castore_experiments.signals import wal
from castore_experiments.signals.batch import BatchName
from castore_experiments.signals.index import Source
from castore_experiments.signals.publish import compact, publish
from castore_experiments.signals.rows import Block, Point, Rows
from castore_experiments.signals.run import Run
from castore_experiments.signals.schema import TABLES

if TYPE_CHECKING:
    import pyarrow as pa

_LONGEST = 64  # calls of `Ladder.compact` that are let pass after failures


class Ladder:
    """The rows of one writer on their way into ``source``.

    Parameters
    ----------
    source : Source
    folder : Path
        Where local files are; the writer's own folder is made in it.
    writer : str
    """

    def __init__(self, source: Source, folder: Path, writer: str):
        self.source, self.writer = source, writer
        self.runs: dict[str, Run] = {}
        self._rows = Rows(1, "")
        self._first = 1
        self._lock, self._drain_lock = threading.Lock(), threading.Lock()
        self._commit_lock, self._compact_lock = threading.Lock(), threading.Lock()
        self._pending: dict[str, list[pa.Table]] = {}
        self._taken: dict[str, list[pa.Table]] = {}
        self._unwritten: list[tuple[str, bytes]] = []
        self._written: set[str] = set()
        self._failed, self._let_pass, self._sealed = 0, 0, False
        self._owner = wal.Owner(source.repository.id, source.namespace)
        self._wal = wal.Wal(folder, writer, self._owner)

    @property
    def run(self) -> str:
        """The run that rows go to."""
        return self._rows.run

    @property
    def waiting(self) -> int:
        """How many rows are in no snapshot yet."""
        return self._rows.next - self._first

    def begin(self, parent: str | None, fork_step: int | None, started: int) -> str:
        """Start a run; rows taken from now on belong to it."""
        with self._lock:
            run = Run(f"{self.writer}.{len(self.runs)}", parent, fork_step, started)
            self.runs[run.id] = run
            self._rows.run = run.id
        return run.id

    def take(
        self,
        point: Point | None,
        extra: tuple[object, ...] | None = None,
        blocks: Mapping[str, Block | None] | None = None,
    ) -> None:
        """Take the rows of one call, all or none; `InvalidInputError` once `seal` was called."""
        with self._lock:
            if self._sealed:
                raise InvalidInputError("this log of curves is closed: open another")
            for table, block in blocks.items() if blocks else ():
                if block is not None:
                    self._rows.add_block(table, block)
            if point is not None:
                self._rows.add_point(point, extra)

    def seal(self) -> None:
        """Take no more rows: what a last `flush` finds is all there will be."""
        with self._lock:
            self._sealed = True

    def unflushed(self) -> dict[str, pa.Table]:
        """The rows that are in no snapshot yet, or only since the call."""
        import pyarrow as pa

        self.drain()
        with self._drain_lock:
            held = {t: [*self._taken.get(t, ()), *self._pending.get(t, ())] for t in TABLES}
        return {t: pa.concat_tables(parts) for t, parts in held.items() if parts}

    def drain(self) -> None:
        """Rows from memory to tables, and those to the local file; `BackendError` if that fails."""
        with self._drain_lock:
            with self._lock:
                rows = self._rows
                self._rows = Rows(rows.next, rows.run)
            for table, found in rows.tables().items():
                self._pending.setdefault(table, []).append(found)
                self._unwritten.append((table, wal.encode_table(found)))
            new = {i: r for i, r in list(self.runs.items()) if i not in self._written}
            if self._unwritten and new:
                self._unwritten.insert(0, ("runs", wal.encode_runs(self._owner, new)))
                self._written |= new.keys()
            if self._unwritten:
                self._wal.append(self._unwritten)
                self._unwritten = []

    def flush(self) -> tuple[SnapshotName | None, BackendError | None]:
        """All rows to the repository; gives the snapshot, and what the local file failed with."""
        with self._commit_lock:
            failed = self._tried()
            with self._drain_lock:
                self._taken, self._pending = self._pending, {}
                unwritten, self._unwritten = self._unwritten, []
                last = self._rows.first - 1
                sealed = self._wal.rotate()
            if not self._taken:
                return None, failed
            try:
                name = self._publish(self._taken, last)
            except BaseException:
                self._put_back(unwritten)
                raise
            with self._drain_lock:
                self._first, self._taken = last + 1, {}
                self._written.clear()
            wal.remove(sealed)
            return name, failed

    def compact(self, *, all: bool) -> None:
        """Merge batches. No row depends on it: where it fails, more and more calls are let pass."""
        with self._compact_lock:
            if self._let_pass > 0:
                self._let_pass -= 1
                return
            try:
                compact(self.source, self.writer, all=all)
            except CastoreError:
                self._failed += 1
                self._let_pass = min(2**self._failed, _LONGEST)
                raise
            self._failed = 0

    def close(self, *, empty: bool) -> None:
        """Let go of the local files; with ``empty`` they go."""
        self._wal.close(empty=empty)

    def _tried(self) -> BackendError | None:
        """Drain; rows that the local file does not take go to the repository all the same."""
        try:
            self.drain()
        except BackendError as e:
            return e
        return None

    def _publish(self, taken: dict[str, list[pa.Table]], last: int) -> SnapshotName:
        import pyarrow as pa

        tables = {t: pa.concat_tables(taken[t]) for t in TABLES if t in taken}
        name = BatchName(self.writer, self._first, last)
        with self._lock:
            runs = list(self.runs.values())
        return publish(self.source.repository, self.source.namespace, name, tables, runs)

    def _put_back(self, unwritten: list[tuple[str, bytes]]) -> None:
        with self._drain_lock:
            for table, later in self._pending.items():
                self._taken.setdefault(table, []).extend(later)
            self._pending, self._taken = self._taken, {}
            self._unwritten = [*unwritten, *self._unwritten]
