"""The curves of one root: the live log, and the database file that follows it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from castore import AlreadyExistsError, ObjectNotFoundError, Repository
from castore.backend import MISSING
from castore_experiments import layout
from castore_experiments.files import Files
from castore_experiments.records import Records

if TYPE_CHECKING:
    from castore_experiments.resume import Loaded
    from castore_experiments.signals import Curves, Database, Log, Source
    from castore_experiments.states import Archive

Report = Callable[[str], None]


class Journal:
    """Opens the log at the first row; every flush brings ``loggers.duckdb`` up to date.

    Parameters
    ----------
    files : Files
        The root.
    parent, step : optional
        The run that the first run of this process goes on from, and at which step.
    """

    def __init__(self, files: Files, report: Report, clock: Callable[[], float]):
        self.files, self._report, self._clock = files, report, clock
        self._log: Log | None = None
        self._source: Source | None = None
        self._recovered: str | None = None
        self.parent: str | None = None
        self.step: int | None = None

    @property
    def run(self) -> str | None:
        """The run that rows go to, None before the first one."""
        return self._log.run if self._log else None

    def fork(self, parent: str | None, step: int | None) -> None:
        """Rows from now on belong to a run that leaves ``parent`` at ``step``."""
        self.parent, self.step = parent, step
        if self._log is not None:
            self._log.begin(parent, step)

    def log(self, repository: Repository, namespace: str, *args: Any, **more: Any) -> None:
        """Take rows; see `signals.Log.log`."""
        if self._log is None:
            self._log = self.open(repository, namespace)
        self._log.log(*args, **more)

    def open(self, repository: Repository, namespace: str) -> Log:
        """A log for this process; first what a killed one left is taken in."""
        from castore_experiments.signals import Log

        self._recover(repository, namespace)
        folder = self.folder(repository, namespace)
        return Log(
            repository,
            namespace,
            folder,
            clock=self._clock,
            parent=self._parent(repository, namespace),
            fork_step=self.step,
        )

    def _recover(self, repository: Repository, namespace: str) -> None:
        """Take in what killed processes left; once: those killed later are left to the next."""
        from castore_experiments.signals import recover

        folder = self.folder(repository, namespace)
        folder.mkdir(parents=True, exist_ok=True)
        if self._recovered == namespace:
            return
        for done in recover(repository, namespace, folder):
            self._report(
                f"{done.rows} rows of curves of a process that ended early are recovered"
                f" ({done.lost_bytes} bytes at the end were not whole)"
            )
        self._recovered = namespace

    def _parent(self, repository: Repository, namespace: str) -> str | None:
        """The run that is gone on from; of weights that another program saved, the newest one."""
        if self.parent is not None or self.step is None:
            return self.parent
        newest = self.curves(repository, namespace).newest_run()
        return newest.id if newest is not None else None

    def folder(self, repository: Repository, namespace: str) -> Path:
        """Where the last second of rows stands: in a local root, else in the user's state."""
        if self.files.kind == "local":
            return Path(self.files.url) / layout.OWN / "wal"
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        # Two repositories may have namespaces of one name.
        return Path(state) / "castore" / repository.id / namespace

    def publish(self, repository: Repository, namespace: str) -> None:
        """Every row so far into the repository, and ``loggers.duckdb`` brought after it."""
        self._recover(repository, namespace)
        if self._log is not None:
            self._log.flush()
        self.database(repository, namespace).update(self.curves(repository, namespace))

    def rebuild(self, repository: Repository, namespace: str) -> None:
        """Make ``loggers.duckdb`` again, if there are rows; what stood there is gone."""
        if self.files.kind != "local":
            (self.folder(repository, namespace) / "loggers.duckdb").unlink(missing_ok=True)
        if self.curves(repository, namespace).metrics():
            self.publish(repository, namespace)

    def curves(
        self, repository: Repository, namespace: str, siblings: Sequence[Any] = ()
    ) -> Curves:
        """What can be read: this root's rows, live ones too, then those of ``siblings``."""
        from castore_experiments.signals import Curves, Source

        # Kept, since it remembers what it has read of the snapshots.
        if self._source is None or self._source.namespace != namespace:
            self._source = Source(repository, namespace)
        return Curves([self._source, *siblings], live=self._log)

    def database(self, repository: Repository, namespace: str) -> Database:
        """The root's database file; for a remote root a working copy that is put there whole."""
        from castore_experiments.signals import Database

        folder = self.folder(repository, namespace)
        state = folder / "database.json"
        state.parent.mkdir(parents=True, exist_ok=True)
        if self.files.kind == "local":
            path = Path(self.files.url) / layout.CURVES
            path.parent.mkdir(parents=True, exist_ok=True)
            return Database(path, state)
        copy = folder / "loggers.duckdb"
        if not copy.exists():  # rows that another program added to it are not to be lost
            with suppress(ObjectNotFoundError):
                copy.write_bytes(self.files.get(layout.CURVES))
        return Database(copy, state, lambda data: put(self.files, layout.CURVES, data))

    def drop(self) -> None:
        """Nobody will write here again: the log ends on its own, see `signals.Log.drop`."""
        if self._log is not None:
            self._log.drop()

    def close(self) -> None:
        """Flush and end; the journal opens again at the next row."""
        log, self._log = self._log, None
        if log is not None:
            log.close()


def run_of(archive: Archive | None, loaded: Loaded) -> str | None:
    """The run that wrote what was loaded, so that its curve goes on."""
    if loaded.weights is None or loaded.weights.snapshot is None:
        return loaded.state.run
    assert isinstance(archive, Records)
    run = archive.facts(loaded.weights.snapshot).get("run")
    return run if isinstance(run, str) else None


def put(files: Files, name: str, data: bytes) -> None:
    """Store ``data`` under ``name`` whatever stands there; for what is derived and whole."""
    while True:
        try:
            version = files.stat(name).version
        except ObjectNotFoundError:
            version = MISSING
        try:
            files.replace(name, data, version)
            return
        except AlreadyExistsError:
            continue  # another writer was between: ours comes after


def import_curves(files: Files, repository: Repository, namespace: str, report: Report) -> int:
    """Bring the rows of a root's curve files into the repository; gives how many were new.

    What of them could not be read is reported.

    Raises
    ------
    FormatError, CorruptObjectError
        They cannot be read; nothing was changed.
    """
    from castore_experiments.signals import import_signals

    with local_copy(files) as folder:
        if folder is None:
            return 0
        done = import_signals(repository, namespace, folder)
    for warning in done.warnings:
        report(warning)
    return done.rows


@contextmanager
def local_copy(files: Files) -> Iterator[Path | None]:
    """The ``loggers`` folder of a root as a local folder; None if it is empty."""
    names = [s.name for s in files.list(layout.in_root("loggers"))]
    if not names:
        yield None
    elif files.kind == "local":
        yield Path(files.url) / layout.in_root("loggers")
    else:
        with TemporaryDirectory(prefix="castore-") as folder:
            for name in names:
                (Path(folder) / name.rpartition("/")[2]).write_bytes(files.get(name))
            yield Path(folder)
