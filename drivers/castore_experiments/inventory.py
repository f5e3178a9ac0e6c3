"""Everything of the experiments layout that a repository holds, over all namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from castore import Repository
from castore_experiments.records import Records


@dataclass(frozen=True, slots=True)
class Experiment:
    """One hash: its weight steps, the bytes of its weights, microseconds of its last use."""

    namespace: str
    hash: str
    steps: tuple[int, ...]
    size: int
    last_used: int
    name: str | None

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "namespace": self.namespace,
            "hash": self.hash,
            "steps": list(self.steps),
            "size": self.size,
            "last_used": self.last_used,
            "name": self.name,
        }


def inventory(repository: Repository) -> Iterator[Experiment]:
    """Every experiment of a repository, by namespace, the last used first.

    ``size`` is logical: what the weight files would take as files.
    """
    for namespace in repository.namespaces():
        records = Records(repository, namespace)
        records.refresh()
        for hash in records.hashes():
            weights = records.weights(hash)
            yield Experiment(
                namespace,
                hash,
                tuple(sorted({w.step for w in weights})),
                sum(repository.snapshot(w.snapshot).size for w in weights if w.snapshot),
                records.last_used(hash),
                records.state(hash).experiment_name,
            )
