"""Everything a root promises, recomputed: its snapshots, its files, its manifest, its curves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from castore import CastoreError, ObjectNotFoundError
from castore_experiments import layout
from castore_experiments.curves import local_copy
from castore_experiments.driver import ExperimentsDriver
from castore_experiments.exhibit import manifest_of
from castore_experiments.files import Files
from castore_experiments.manifest import parse
from castore_experiments.records import Records
from castore_experiments.verify import Defect

_COMPARED = (
    "hp_hash",
    "model_hash",
    "data_hash",
    "latest_weight_checkpoint",
    "latest_weight_step",
)


def audit(records: Records, files: Files) -> Iterator[Defect]:
    """Path and defect of every broken promise; nothing for a root that is whole.

    A documented file that is not real is no defect, since the repository holds it.
    """
    records.refresh()
    driver = ExperimentsDriver()
    for suffix in ("", ".signals", ".runs"):
        for name in records.repository.snapshots(records.namespace + suffix):
            try:
                yield from driver.verify(records.repository, name)
            except CastoreError as e:
                yield name.path, str(e)
    yield from _files(records, files)
    yield from _manifest(records, files)
    yield from _curves(records, files)


def _files(records: Records, files: Files) -> Iterator[Defect]:
    """Real files that are not what is committed under their name."""
    known: dict[str, set[str]] = {}
    for hash in records.hashes():
        for path, file in records.state_files(hash).items():
            known.setdefault(path, set()).add(file.sha256)
        for weights in records.weights(hash):
            known.setdefault(weights.path, set()).add(records.weight_sha256(weights))
    for folder in ("models", "HP", "data"):
        for stat in files.list(layout.in_root(folder)):
            path = stat.name.removeprefix(f"{layout.CHECKPOINTS}/")
            if layout.parse(path) is None:
                continue
            sha256 = hashlib.sha256(files.get(stat.name)).hexdigest()
            if sha256 not in known.get(path, ()):
                yield path, "was edited, or is of another program: it was never committed"


def _manifest(records: Records, files: Files) -> Iterator[Defect]:
    try:
        there = parse(files.get(layout.MANIFEST), layout.MANIFEST)
    except ObjectNotFoundError:
        yield layout.MANIFEST, "is missing: the next write, or 'materialize', makes it again"
        return
    except CastoreError as e:
        yield layout.MANIFEST, str(e)
        return
    right = manifest_of(records)
    for hash in sorted(there.entries.keys() - right.entries.keys()):
        yield layout.MANIFEST, f"has {hash}, which no snapshot here has"
    for hash, entry in right.entries.items():
        found = there.entries.get(hash)
        if found is None:
            yield layout.MANIFEST, f"lacks {hash}"
            continue
        for key in _COMPARED:
            if found.get(key) != entry.get(key):
                yield layout.MANIFEST, f"{hash}.{key}: {found.get(key)!r}, not {entry.get(key)!r}"
    if there.latest_hash != right.latest_hash:
        yield layout.MANIFEST, f"latest_hash: {there.latest_hash}, not {right.latest_hash}"


def _curves(records: Records, files: Files) -> Iterator[Defect]:
    from castore_experiments.signals import Curves, Source, compare

    curves = Curves([Source(records.repository, records.namespace)])
    with local_copy(files) as folder:
        path = Path(folder) / "loggers.duckdb" if folder is not None else None
        if path is None or not path.exists():
            if curves.metrics():
                yield layout.CURVES, "is missing: the next save makes it again"
            return
        try:
            yield from ((layout.CURVES, text) for text in compare(curves, path))
        except CastoreError as e:  # no database, or of a newer version
            yield layout.CURVES, str(e)
