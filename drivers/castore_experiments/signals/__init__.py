"""Curves: what a training logs, kept as immutable Parquet files in ``<namespace>.signals``.

    log = Log(repository, "exp", ".castore/wal")
    log.log("loss", 0.5, 100, hash24, per_sample={"img7": 0.4})
    log.flush()
    Curves([Source(repository, "exp")], live=log).signals("loss")

Writing
    ``Log``                  rows in; each second to a local file, each minute and `Log.flush` into
                             the repository. ``Log.begin`` starts another run (resume, rewind).
    ``recover``              takes over what a killed writer left in its local file.
Reading
    ``Curves``, ``Source``   curves of one or several roots, united as they are read.
    ``Run``                  one attempt; names its parent and the step it forked at.
The public tool's files
    ``Database``             ``loggers.duckdb``, brought up to date atomically.
    ``export_merged``        one database of all the roots that a `Curves` unites.
    ``compare``              what differs between a database and the repository.
    ``import_signals``       a database, or the older JSON files, into the repository.
    ``foreign_run``          the run that imported rows belong to.
    ``Foreign``              such files as a source of `Curves`, nothing copied.

The layout is docs/layouts/experiments-signals.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castore_experiments.signals.curves import Curves
    from castore_experiments.signals.database import Database, Update
    from castore_experiments.signals.imports import (
        Foreign,
        Imported,
        foreign_run,
        import_signals,
    )
    from castore_experiments.signals.index import Source
    from castore_experiments.signals.log import Log
    from castore_experiments.signals.merged import compare, export_merged
    from castore_experiments.signals.recovery import Recovered, recover
    from castore_experiments.signals.run import Run

_HOMES = {
    "Curves": "curves",
    "Database": "database",
    "Foreign": "imports",
    "Imported": "imports",
    "Log": "log",
    "Recovered": "recovery",
    "Run": "run",
    "Source": "index",
    "Update": "database",
    "compare": "merged",
    "export_merged": "merged",
    "foreign_run": "imports",
    "import_signals": "imports",
    "recover": "recovery",
}

__all__ = [
    "Curves",
    "Database",
    "Foreign",
    "Imported",
    "Log",
    "Recovered",
    "Run",
    "Source",
    "Update",
    "compare",
    "export_merged",
    "foreign_run",
    "import_signals",
    "recover",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
