"""A root as it would be with every file real, told from snapshots; nothing is written."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from castore import File, Repository, SnapshotName, SnapshotNotFoundError
from castore.digest import digest_of
from castore.driver import Shown
from castore_experiments import layout, runs
from castore_experiments.documents import OWN_FILES
from castore_experiments.exhibit import manifest_of
from castore_experiments.manifest import render
from castore_experiments.records import Records


def root_of(repository: Repository, namespace: str) -> dict[str, Shown]:
    """The documented files of an experiment, by path from its root: all weights, the manifest.

    ``loggers.duckdb`` where there are curves; it is made when it is first asked for. Empty where
    the namespace holds no experiment. Files of weights are looked up when they are asked for.
    """
    records = Records(repository, namespace)
    records.refresh()
    found: dict[str, Shown] = {}
    for hash in records.hashes():
        found |= _documents(records, hash)
        for weights in reversed(records.weights(hash)):
            load = partial(records.file_of, weights)
            found[layout.in_root(weights.path)] = Shown(load, weights.time)
    latest = records.latest()
    if latest is None:
        return found
    names = [*repository.snapshots(namespace), *repository.snapshots(runs.space(namespace))]
    found[layout.MANIFEST] = Shown(
        lambda: render(manifest_of(records)), records.last_used(latest), _mark(names)
    )
    rows = list(repository.snapshots(f"{namespace}.signals"))
    if rows:
        load_curves = partial(_curves, repository, namespace)
        found[layout.CURVES] = Shown(load_curves, rows[0].time, _mark(rows))
    return found


def _documents(records: Records, hash: str) -> dict[str, Shown]:
    def load(file: File) -> File:
        return file

    try:
        files, time = records.state_files(hash), records.created(hash)
    except SnapshotNotFoundError:  # forgotten meanwhile
        return {}
    return {
        layout.in_root(path): Shown(partial(load, file), time)
        for path, file in files.items()
        if path not in OWN_FILES
    }


def _curves(repository: Repository, namespace: str) -> bytes:
    from castore_experiments.signals import Curves, Source, export_merged

    with TemporaryDirectory(prefix="castore-") as folder:
        path = Path(folder) / "loggers.duckdb"
        export_merged(Curves([Source(repository, namespace)]), path)
        return path.read_bytes()


def _mark(names: Iterable[SnapshotName]) -> str:
    return digest_of("\n".join(n.path for n in names).encode())
