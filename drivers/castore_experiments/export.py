"""Write a whole root as real files, in its own place or in another."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from castore import AlreadyExistsError, ObjectNotFoundError
from castore_experiments import layout
from castore_experiments.curves import Journal, put
from castore_experiments.exhibit import Exhibit
from castore_experiments.files import Files, open_files
from castore_experiments.manifest import parse
from castore_experiments.records import Records


def exhibit_of(records: Records, files: Files, report: Callable[[str], None]) -> Exhibit:
    """The view of a root, as its kind has it by default."""
    return Exhibit(files, records, None, report, time.time)


def export(records: Records, files: Files, to: str | None, report: Callable[[str], None]) -> int:
    """Every weight file, document, the manifest and the curves; gives the number of hashes.

    In place what stands there already and was never committed is kept and reported. An export that
    was cut off may be repeated.

    Raises
    ------
    AlreadyExistsError
        ``to`` has hashes of another experiment.
    """
    records.refresh()
    target = open_files(to) if to is not None else files
    if to is not None:
        _check_target(target, records)
    count = Exhibit(target, records, "all", report, time.time).rebuild()
    if to is not None:
        _write_curves(records, target)
    else:
        journal = Journal(files, report, time.time)
        journal.publish(records.repository, records.namespace)
    return count


def _check_target(target: Files, records: Records) -> None:
    try:
        there = parse(target.get(layout.MANIFEST), layout.MANIFEST).entries
    except ObjectNotFoundError:
        return
    foreign = [h for h in there if h not in records]
    if foreign:
        raise AlreadyExistsError(
            f"{target.url} has {len(foreign)} hashes of another experiment, such as {foreign[0]}:"
            " give another folder"
        )


def _write_curves(records: Records, target: Files) -> None:
    from tempfile import TemporaryDirectory

    from castore_experiments.signals import Curves, Source, export_merged

    with TemporaryDirectory(prefix="castore-") as folder:
        path = Path(folder) / "loggers.duckdb"
        export_merged(Curves([Source(records.repository, records.namespace)]), path)
        put(target, layout.CURVES, path.read_bytes())
