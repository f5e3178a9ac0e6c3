"""The curves of a root as sources for a union that is made while reading; nothing is copied."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from castore import CastoreError
from castore_experiments import layout
from castore_experiments import root as root_
from castore_experiments.files import Files, open_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from castore_experiments.place import Place
    from castore_experiments.signals import Curves
    from castore_experiments.signals.index import RowSource


def sources_at(
    url: str, storage_options: dict[str, Any] | None, report: Callable[[str], None]
) -> list[RowSource]:
    """What a root has of curves: its namespace, or the files of one that has none.

    A sibling that cannot be read is left out and reported: its curves are missing, the others
    stand.
    """
    from castore_experiments.signals import Source

    files = open_files(url, storage_options)
    try:
        record = root_.read_root(files)
        if record is None:
            return files_of(files)
        repository = root_.open_repository(files, record, storage_options)
    except CastoreError as e:
        report(f"curves of {url} are left out: {e}")
        return []
    return [Source(repository, record.namespace)]


def curves_of(place: Place, *, merged: bool, report: Callable[[str], None]) -> Curves:
    """The curves of an opened root; ``merged`` those of all roots that were found with it."""
    from castore_experiments.signals import Curves

    urls = [place.files.url, *(place.discovery.siblings if merged else ())]
    return Curves([s for url in urls for s in sources_at(url, place.storage_options, report)])


def files_of(files: Files) -> list[RowSource]:
    """The curve files of a root that another program wrote; a remote one's are fetched."""
    from castore_experiments.signals import Foreign

    names = [s.name for s in files.list(layout.in_root("loggers"))]
    if not names:
        return []
    if files.kind == "local":
        return [Foreign(Path(files.url) / layout.in_root("loggers"))]
    folder = Path(mkdtemp(prefix="castore-curves-"))
    for name in names:
        (folder / name.rpartition("/")[2]).write_bytes(files.get(name))
    return [Foreign(folder)]
