"""The live end of curves: takes rows at any rate, never holds up a training step, loses none.

Three rungs: in memory at once; in a local file each second (`wal`), which survives the process;
in the repository at each `Log.flush`, each minute and whenever much has gathered.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castore import BackendError, CastoreError, InvalidInputError, Repository, SnapshotName
from castore_experiments.signals import points
from castore_experiments.signals import values as v
from castore_experiments.signals.batch import BatchName, parse_key
from castore_experiments.signals.index import Source
from castore_experiments.signals.ladder import Ladder
from castore_experiments.signals.parquet import of_curve
from castore_experiments.signals.publish import MERGE
from castore_experiments.signals.run import Run, within_second

if TYPE_CHECKING:
    import pyarrow as pa

_NOTHING = (False, False, "", (), "", (), None, None, None, None, None, None)
GATHERED = 1 << 21
"""Rows in memory that call for a snapshot before the minute is over."""


class Log:
    """Takes the rows of one process; make one for each process, and `close` it.

    Parameters
    ----------
    repository : Repository
    namespace : str
        The experiment's; rows go to ``<namespace>.signals``.
    wal_folder : path
        A local folder; this writer gets a folder of its own in it.
    clock : callable
        Seconds since the epoch, for the ``timestamp`` of rows.
    parent, fork_step : str and int, optional
        The first run's, as for `begin`.
    interval, minute : float
        Seconds between writes to the local file, and between snapshots.
    writer : str, optional
        16 hexadecimal characters that no other writer has; random by default.

    Raises
    ------
    InvalidInputError
        A writer's name of another form.
    BackendError
        The local folder cannot be used, or the repository not be reached.

    Notes
    -----
    Safe for threads. A failure in the background raises at the next `log`, `flush` or `begin`
    and at `close`; the rows stay and are tried again. In a forked child every call is an
    `InvalidInputError` that says to open a new one, but for `close`, which does nothing there.
    At the interpreter's exit without `close` the rest goes to the local file; `recover` reads it.
    """

    leads = True

    def __init__(
        self,
        repository: Repository,
        namespace: str,
        wal_folder: str | os.PathLike[str],
        *,
        clock: Callable[[], float] = time.time,
        parent: str | None = None,
        fork_step: int | None = None,
        interval: float = 1.0,
        minute: float = 60.0,
        writer: str | None = None,
    ):

        self.writer = writer or secrets.token_hex(8)
        if parse_key(BatchName(self.writer, 1, 1).key) is None:
            raise InvalidInputError(f"writer {writer!r}: expected 16 hexadecimal characters")
        self._repository, self._clock = repository, clock
        self._interval, self._minute, self._pid = interval, minute, os.getpid()
        self._failure: CastoreError | None = None
        self._closed, self._dropped, self._flushes = False, False, 0
        self._names: set[str] = set()
        self._stop, self._full = threading.Event(), threading.Event()
        source = Source(repository, namespace)
        source.refresh()
        # Later than all there are, however coarse the store's clock: a resume is the newest run.
        self._started = max((r.started for r in source.runs()), default=0)
        started = self._now()
        self._ladder = Ladder(source, Path(wal_folder), self.writer)
        self._ladder.begin(parent, _step(fork_step), started)
        self._threads = [
            threading.Thread(target=t, name=f"castore curves {self.writer}", daemon=True)
            for t in (self._each_second, self._each_minute)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._at_exit)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing

    @property
    def run(self) -> str:
        """The id of the run that rows go to now: belongs into the facts of checkpoints."""
        return self._ladder.run

    def begin(self, parent: str | None, fork_step: int | None) -> str:
        """Start another run, as after a resume, a rewind or a branch; gives its id.

        ``parent`` is the run that wrote the state that was loaded, ``fork_step`` the step of that
        state: the parent's rows up to and including it belong to the new run's curve. None for
        ``fork_step`` takes all of the parent's rows; None for ``parent`` starts from nothing.

        Raises
        ------
        BackendError
            The store's clock cannot be read.
        """
        self._check()
        return self._ladder.begin(parent, _step(fork_step), self._now())

    def log(
        self,
        metric: str,
        value: Any,
        step: Any,
        hash: str | None = None,
        per_sample: Any = None,
        per_instance: Any = None,
        *,
        timestamp: int | None = None,
        audit_mode: bool = False,
        is_evaluation_marker: bool = False,
        split_name: str = "",
        evaluation_tags: Sequence[str] = (),
        point_note: str = "",
        outliers: Sequence[Any] = (),
        outlier_count: int | None = None,
        sample_count: int | None = None,
        trend_value: Any = None,
        trend_margin: Any = None,
        value_min: Any = None,
        value_max: Any = None,
    ) -> None:
        """Take one point of ``metric``, and the values of samples behind it.

        All is copied before the call returns; numpy and torch scalars count as numbers, NaN and
        infinities stay. Values of samples are kept as float32.

        Parameters
        ----------
        metric : str
            1 to 1000 bytes.
        value : number or None
            None for no point, only values of samples.
        step : int
            Of 64 bits.
        hash : str, optional
            The experiment hash; ``<hash>_<n>`` for evaluation passes.
        per_sample : mapping or (ids, values)
            ``{sample_id: value}``, or two columns (arrays, tensors, lists). Ids become text.
        per_instance : mapping or (ids, annotation ids, values)
            ``{(sample_id, annotation_id): value}``, or three columns.
        timestamp : int, optional
            Seconds since the epoch; now by default.
        outlier_count, sample_count, value_min, value_max : optional
            By default the number of ``outliers``, and number, least and greatest of the
            ``per_sample`` values.
        audit_mode, is_evaluation_marker, split_name, evaluation_tags, point_note, outliers,
        trend_value, trend_margin
            The documented columns of those names.

        Raises
        ------
        InvalidInputError
            What cannot be stored: nothing of the call was taken. Also after `close` or a fork.
        BackendError, CastoreError
            What failed in the background since the last call; nothing of this call was taken.
        """
        self._check()
        if not (type(metric) is str and metric in self._names):
            self._names.add(v.name(metric, "metric"))
        if not (hash is None or (type(hash) is str and hash in self._names)):
            self._names.add(v.name(hash, f"{metric}: hash"))
        step = v.integer(step, f"{metric}: step")
        samples = instances = extra = point = None
        if per_sample is not None:
            samples = points.samples(metric, hash, step, per_sample)
        if per_instance is not None:
            instances = points.instances(metric, hash, step, per_instance)
        if value is not None:
            seconds = self._clock() if timestamp is None else v.integer(timestamp, "timestamp")
            point = (metric, hash, step, v.number(value, metric), int(seconds))
            given = (
                *(audit_mode, is_evaluation_marker, split_name, evaluation_tags, point_note),
                *(outliers, outlier_count, sample_count, trend_value, trend_margin),
                *(value_min, value_max),
            )
            # The usual call has none of them; by identity, since arrays have no plain equality.
            if samples is not None or not all(map(is_, given, _NOTHING)):
                extra = points.extra(given, samples)
        self._ladder.take(point, extra, {"per_sample": samples, "per_instance": instances})
        if self._ladder.waiting > GATHERED:
            self._full.set()

    def flush(self) -> SnapshotName | None:
        """Bring every row logged so far into the repository; durable on return.

        Gives the snapshot, or None where there was nothing new.

        Raises
        ------
        BackendError, CastoreError
            It failed, now or in the background: no row is lost, the next flush tries again.
        """
        self._check()
        return self._flush()

    def close(self) -> None:
        """Flush, merge this writer's small batches, let go of the local file. Twice is harmless.

        Raises
        ------
        BackendError, CastoreError
            Rows could not be brought into the repository: they are in the local file, from where
            `recover` takes them; or a failure in the background that was not raised yet.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._ladder.seal()
        self._stop.set()
        self._full.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        atexit.unregister(self._at_exit)
        done = False
        try:
            self._flush()
            done = True
            self._ladder.compact(all=True)
        finally:
            self._ladder.close(empty=done)
        self._raise()

    def drop(self) -> None:
        """Nobody will call this log again: within a second or two it closes itself.

        What that fails with goes to the logger ``castore``; the rows are in the local file then,
        from where `recover` takes them. Takes no lock and never waits, so that the end of an object
        may call it, which comes in any thread and at any place.
        """
        self._dropped = True

    # -- reading, as a source of `Curves`

    def unflushed(self) -> dict[str, pa.Table]:
        """The rows that are in no snapshot yet, or only since the call; none once closed."""
        if self._closed:
            return {}
        self._check()
        return self._ladder.unflushed()

    def refresh(self) -> None:
        """Nothing to look for: the rows are here."""

    def runs(self) -> list[Run]:
        """This writer's runs."""
        return list(self._ladder.runs.values())

    def hashes(self) -> dict[str, set[str | None]]:
        """For each run with rows in no snapshot yet their hashes."""
        found: dict[str, set[str | None]] = {}
        for rows in self.unflushed().values():
            columns = ["run", "experiment_hash"]
            # Arrow groups no chunks whose words differ, as those of two drains do.
            pairs = rows.select(columns).unify_dictionaries().group_by(columns)
            for pair in pairs.aggregate([]).to_pylist():
                found.setdefault(pair["run"], set()).add(pair["experiment_hash"])
        return found

    def metrics(self, table: str) -> set[str]:
        """The metrics of rows in no snapshot yet."""
        rows = self.unflushed().get(table)
        return set() if rows is None else set(rows["metric_name"].unique().to_pylist())

    def rows(self, table: str, metric: str | None, hashes: Iterable[str] | None) -> list[pa.Table]:
        """Rows in no snapshot yet."""
        rows = self.unflushed().get(table)
        return [] if rows is None else [of_curve(rows, metric, hashes)]

    # -- within

    def _now(self) -> int:
        """Microseconds by the store's clock, which all writers share; rises with each call."""
        local = self._clock()  # first: however late the answer comes, this is no later than it
        now = int(within_second(self._repository.backend.now(), local) * 1_000_000)
        self._started = max(now, self._started + 1)
        return self._started

    def _flush(self) -> SnapshotName | None:
        name, failed = self._ladder.flush()
        if failed is not None:  # the rows are safe, but the local file needs looking after
            self._failure = failed
        self._flushes += name is not None
        if self._flushes >= MERGE:
            self._flushes = 0
            self._full.set()  # time to merge, in the background
        return name

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidInputError(
                f"this log of curves was opened by process {self._pid}, and this is a forked"
                f" child ({os.getpid()}): open one of its own here"
            )
        if self._closed:
            raise InvalidInputError("this log of curves is closed: open another")
        self._raise()

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _each_second(self) -> None:
        while not self._stop.wait(self._interval):
            self._guarded(self._ladder.drain)
            if self._dropped:
                self._close_alone()
                return

    def _close_alone(self) -> None:
        try:
            self.close()
        except Exception:
            logging.getLogger("castore").exception("curves of %s could not be saved", self.writer)

    def _each_minute(self) -> None:
        while not self._stop.is_set():
            due = not self._full.wait(self._minute)
            self._full.clear()
            if not self._stop.is_set():
                if due or self._ladder.waiting > GATHERED:
                    self._guarded(self._flush)
                self._guarded(lambda: self._ladder.compact(all=False))
                self._stop.wait(self._interval)  # where it fails, not without a pause

    def _guarded(self, act: Callable[[], object]) -> None:
        """Run it; what fails is kept for the next call."""
        try:
            act()
        except CastoreError as e:
            self._failure = e
        except Exception as e:
            failure = BackendError(f"curves could not be saved: {type(e).__name__}: {e}")
            failure.__cause__ = e
            self._failure = failure

    def _at_exit(self) -> None:
        """The rest to the local file: no pool of threads starts any more, so no commit."""
        if os.getpid() == self._pid and not self._closed:
            self._ladder.drain()


def _step(value: int | None) -> int | None:
    return None if value is None else v.integer(value, "fork_step")
