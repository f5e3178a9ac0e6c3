"""Names and notes that people give to runs: small snapshots in ``<namespace>.runs``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from castore import Draft, FormatError, Repository

_KEY = re.compile(r"([0-9a-f]{24})\.run")


@dataclass(frozen=True, slots=True)
class RunWords:
    """The name and the notes of one hash; None where nobody said any."""

    name: str | None = None
    notes: str | None = None


def set_words(repository: Repository, namespace: str, hash: str, words: RunWords) -> None:
    """Keep the words of a hash; the newest stand."""
    draft = Draft(
        {},
        driver="experiments",
        key=f"{hash}.run",
        facts={"hash": hash, "name": words.name, "notes": words.notes},
    )
    repository.commit(draft, namespace=space(namespace))


def words_of(repository: Repository, namespace: str) -> dict[str, RunWords]:
    """The words of every hash that has some; the newest of each."""
    found: dict[str, RunWords] = {}
    for name in repository.snapshots(space(namespace)):
        match = _KEY.fullmatch(name.key)
        if match is None or match[1] in found:
            continue
        facts = repository.snapshot(name).facts
        said, notes = facts.get("name"), facts.get("notes")
        if not isinstance(said, str | None) or not isinstance(notes, str | None):
            raise FormatError(f"{name}: name or notes is no text")
        found[match[1]] = RunWords(said, notes)
    return found


def space(namespace: str) -> str:
    """Where the words of an experiment's runs are kept."""
    return f"{namespace}.runs"
