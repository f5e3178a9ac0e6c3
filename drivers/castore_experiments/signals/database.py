"""``loggers.duckdb``: what other programs see of the curves, derived from the repository.

It is never written in place and never held open: the next state is made in a file beside it and
takes its name at once, so readers in other processes keep the state they opened. All rows are in
it, those of earlier attempts too; ``seq`` rises in the order runs began and rows were logged.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from castore import BackendError, CastoreError, InvalidInputError
from castore_experiments.signals.batch import Batch, Facts
from castore_experiments.signals.curves import Curves
from castore_experiments.signals.duckfile import wal_of, writer_of
from castore_experiments.signals.fill import (
    State,
    attached,
    batches_of,
    in_place,
    insert,
    started,
    unseen,
)
from castore_experiments.signals.imports import import_signals
from castore_experiments.signals.index import Source
from castore_experiments.signals.lock import WriterLock
from castore_experiments.signals.schema import TABLES, create_table

_PATIENCE = 60.0  # seconds to wait for other updates


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did.

    ``added`` rows, now ``rows`` in all; ``rebuilt`` from nothing or extended; ``held_by`` the
    process that has the file open for writing, in which case nothing was done; ``set_aside`` where
    a file that could not be read was put.
    """

    added: int
    rows: int
    rebuilt: bool = False
    held_by: int | None = None
    set_aside: str | None = None


class Database:
    """A root's ``loggers.duckdb``.

    Parameters
    ----------
    path : path
        The file. For a root on S3 a local working copy.
    state : path
        A small local file beside it, which says what the database holds.
    write : callable, optional
        For a root on S3: takes the whole file's bytes and stores them durably.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        state: str | os.PathLike[str],
        write: Callable[[bytes], object] | None = None,
    ):
        self.path, self._state_path, self._write = Path(path), Path(state), write
        self._log = logging.getLogger("castore_experiments")

    def is_ours(self) -> bool:
        """Whether the file is exactly what was written last: there is nothing to import from it."""
        return self._load() is not None

    def update(self, curves: Curves) -> Update:
        """Bring the file to what ``curves`` has in snapshots; durable on return.

        Rows that another program added are imported first (into the first source's namespace). A
        file that cannot be read is set aside under a name that says so, never deleted. While
        another process has the file open for writing nothing is done and ``held_by`` names it;
        the next update catches up. Readers are never in the way.

        Raises
        ------
        BackendError
            The folder cannot be written, or other updates left no room for a minute: the file is
            as it was.
        """
        lock = self._lock()
        try:
            return self._update(curves)
        finally:
            lock.release()

    def _lock(self) -> WriterLock:
        """File and state are changed together: of two updates at once one waits."""
        path, deadline = self._state_path.with_suffix(".lock"), time.monotonic() + _PATIENCE
        path.parent.mkdir(parents=True, exist_ok=True)
        while (lock := WriterLock.take(path)) is None:
            if time.monotonic() > deadline:
                raise BackendError(
                    f"{self.path}: other processes kept updating it for {_PATIENCE:.0f} s: the"
                    " next save brings it up to date"
                )
            time.sleep(0.02)
        return lock

    def _update(self, curves: Curves) -> Update:
        state, aside = self._load(), None
        loaded = state is not None
        if state is None:
            if (held := self._held()) is not None:
                return held
            aside = self._absorb(curves)
        curves.refresh()
        batches = [b for s in curves.sources if isinstance(s, Source) for b in batches_of(s)]
        wide = any(f.wide for _, _, f in batches)
        rebuilt = state is None or (wide and not state.wide)
        if state is None or rebuilt:
            state = State(wide=wide)
        fresh = unseen(batches, state)
        if fresh or rebuilt or not state.sent:
            if (held := self._held()) is not None:
                return held
            if loaded and not self.is_ours():  # another program wrote, and closed it, meanwhile
                return self._update(curves)
        added = 0
        if fresh or rebuilt:
            added = self._replace(fresh, state, rebuilt, started(curves))
        if not state.sent:
            self._send(state)
        return Update(added, state.rows, rebuilt, set_aside=aside)

    def _held(self) -> Update | None:
        """What an update comes to while another process writes. The look waits for the kernel."""
        held_by = writer_of(self.path)
        if held_by is None:
            return None
        self._log.warning(
            "%s is open for writing in process %d and was left as it is; its rows are safe in"
            " the repository, the next save brings it up to date",
            *(self.path, held_by),
        )
        return Update(0, 0, held_by=held_by)

    def _replace(
        self,
        fresh: Sequence[tuple[Source, Batch, Facts]],
        state: State,
        rebuilt: bool,
        order: dict[str, int],
    ) -> int:
        with in_place(self.path) as temporary:
            if not rebuilt:
                shutil.copyfile(self.path, temporary)
            with attached(temporary) as connection:
                if rebuilt:
                    for table in TABLES:
                        connection.execute(create_table(table, "d.", state.wide))
                added = insert(connection, fresh, state, order)
        state.rows += added
        state.sent = self._write is None
        self._save(state)
        return added

    def _send(self, state: State) -> None:
        """To where the root is. Where it fails the next update sends the file again."""
        if self._write is not None:
            self._write(self.path.read_bytes())
        state.sent = True
        self._save(state)

    def _absorb(self, curves: Curves) -> str | None:
        """Import what is in the file, if there is one; gives where one that is unreadable went."""
        if not self.path.exists():
            return None
        first = next((s for s in curves.sources if isinstance(s, Source)), None)
        if first is None:
            raise InvalidInputError("a database is derived from a namespace: give one as a source")
        try:
            found = import_signals(
                first.repository, first.namespace, self.path.parent, source=first
            )
            for warning in found.warnings:
                self._log.warning("%s", warning)
            if found.warnings:
                return self._aside(wal_of(self.path))
            # Imported whole; beside a new file it would be replayed into that.
            wal_of(self.path).unlink(missing_ok=True)
            return None
        except CastoreError as e:
            if isinstance(e, BackendError):
                raise
            self._aside(wal_of(self.path))
            aside = self._aside(self.path)
            self._log.warning("%s: set aside as %s", e, aside)
            return aside

    def _aside(self, path: Path) -> str | None:
        if not path.exists():
            return None
        for n in range(1, 1000):
            target = path.with_name(f"{path.name}.set-aside-{n}")
            if not target.exists():
                os.rename(path, target)
                return str(target)
        raise BackendError(f"{path}: 1000 damaged ones are set aside already: look at them")

    def _load(self) -> State | None:
        try:
            state = State(**json.loads(self._state_path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None  # derived: what cannot be read is made again
        ours = state.identity == _identity(self.path) and not wal_of(self.path).exists()
        return state if ours else None

    def _save(self, state: State) -> None:
        state.identity = _identity(self.path)
        with in_place(self._state_path) as temporary:
            temporary.write_text(json.dumps(asdict(state)))


def _identity(path: Path) -> list[Any]:
    try:
        info = os.stat(path)
    except OSError:
        return []
    return [info.st_ino, info.st_size, info.st_mtime_ns]
