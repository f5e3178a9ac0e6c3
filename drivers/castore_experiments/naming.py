"""The part of `CheckpointManager` that gives runs names and notes."""

from __future__ import annotations

from castore_experiments import ranks
from castore_experiments.loading import Loading
from castore_experiments.runs import RunWords, set_words, words_of


class Naming(Loading):
    """Words on states, which count for no hash."""

    def rename_run(self, exp_hash: str, name: str | None) -> bool:
        """Give a run a name; False for an empty name or a hash that does not exist.

        It is shown instead of the configuration's ``experiment_name``, which stays as it is, in the
        HP file and in what is watched: that names the states that are yet to be written.
        """
        name = (name or "").strip()
        return bool(name) and self._say(exp_hash, RunWords(name=name))

    def set_run_notes(self, exp_hash: str, notes: str) -> bool:
        """Keep notes on a run; False for a hash that does not exist."""
        return self._say(exp_hash, RunWords(notes=notes))

    def _say(self, hash: str, said: RunWords) -> bool:
        archive = self._archive()
        if archive is None or hash not in archive:
            return False
        if not ranks.writes():
            return True
        records = self._session.records()
        before = words_of(records.repository, records.namespace).get(hash, RunWords())
        words = RunWords(
            said.name or before.name, before.notes if said.notes is None else said.notes
        )
        set_words(records.repository, records.namespace, hash, words)
        self._session.exhibit(records).note_words(hash, words)
        return True
