"""A root's documented files, brought to what the repository holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from castore.digest import Buffer
from castore_experiments import layout
from castore_experiments.documents import OWN_FILES
from castore_experiments.files import Files
from castore_experiments.manifest import Change, Manifest, entry_of, merge, stamp
from castore_experiments.manifest_file import ManifestFile
from castore_experiments.options import Materialize
from castore_experiments.records import Records, State, Weights
from castore_experiments.runs import RunWords, words_of
from castore_experiments.view import Parts, View, wanted_weights


class Exhibit:
    """Writes the view of one root: documents, the weight files that are to be real, the manifest.

    Everything here can be made again from the repository, so it comes after the commits.
    """

    def __init__(
        self,
        files: Files,
        records: Records,
        materialize: Materialize | None,
        report: Callable[[str], None],
        clock: Callable[[], float],
    ):
        self.materialize: Materialize = materialize or (
            "latest" if files.kind == "local" else "documents"
        )
        self.records, self._report = records, report
        self._shown: dict[str, set[str]] = {}
        self.view = View(files, self._committed)
        self.manifest = ManifestFile(
            files, lambda: manifest_of(records), report=report, clock=clock
        )

    # -- what may be replaced

    def _committed(self, path: str, sha256: str) -> bool:
        """Whether some snapshot has, or had, this content under this path."""
        if sha256 in self._shown.get(path, ()):
            return True
        found = layout.parse(path)
        if found is None:
            return False
        if found.kind == "weights" and found.hash is not None:
            saved = self.records.all_weights(found.hash)
            same = [w for w in saved if w.step == found.step]
            return any(self.records.weight_sha256(w) == sha256 for w in same)
        return any(
            path in files and files[path].sha256 == sha256
            for files in map(self.records.state_files, self.records.with_folder(path))
        )

    def _write(self, path: str, data: Buffer | Parts, sha256: str | None) -> None:
        outcome = self.view.write(path, data, sha256)
        if outcome == "kept":
            self._report(
                f"{path}: holds something that was never committed: it is kept as it is;"
                " 'castore experiments import' takes it in"
            )
        elif sha256 is not None:
            self._shown.setdefault(path, set()).add(sha256)

    # -- states and weights

    def show_state(self, hash: str) -> None:
        """The documents of a hash."""
        repository = self.records.repository
        for path, file in self.records.state_files(hash).items():
            if path not in OWN_FILES:
                self._write(path, partial(repository.read_file, file), file.sha256)

    def show_weights(self, weights: Weights, data: Buffer | None = None) -> None:
        """Make ``weights`` real if they are to be, and others not real that need not be."""
        wanted = wanted_weights(self.materialize, weights.path, [weights.path])
        if weights.path in wanted:
            self._write_weights(weights, data)
        if self.materialize == "latest":
            self._remove_others(weights.path)

    def _write_weights(self, weights: Weights, data: Buffer | None) -> None:
        file = self.records.file_of(weights)
        content = data if data is not None else partial(self.records.repository.read_file, file)
        self._write(weights.path, content, file.sha256)

    def _remove_others(self, path: str) -> None:
        for other in self.view.weights():
            if other != path:
                self.view.remove(other)

    def remove(self, weights: Weights) -> None:
        """Take away the file of weights that were forgotten."""
        self.view.remove(weights.path)

    # -- everything

    def rebuild(self) -> int:
        """Write all that is to be real, and the manifest; gives the number of hashes."""
        hashes = self.records.hashes()
        for hash in hashes:
            self.show_state(hash)
        newest = self._newest()
        every = {w.path: w for h in hashes for w in reversed(self.records.weights(h))}
        for path in sorted(wanted_weights(self.materialize, newest, every)):
            self._write_weights(every[path], None)
        self.manifest.update(change_of(manifest_of(self.records), self._time()))
        return len(hashes)

    def _newest(self) -> str | None:
        latest = self.records.latest()
        found = self.records.weights(latest) if latest else []
        return found[0].path if found else None

    def _time(self) -> int:
        latest = self.records.latest()
        return self.records.last_used(latest) if latest else 0

    # -- the manifest

    def note_state(self, state: State, name: str | None) -> None:
        """Enter a hash that was just written, as the latest."""
        self._update(state.hash, entry(self.records, state, RunWords(name)))

    def note_weights(self, weights: Weights) -> None:
        """Enter weights that were just saved; their hash is the latest now."""
        self._update(weights.hash, _weights_entry(weights))

    def note_words(self, hash: str, words: RunWords) -> None:
        """Enter a name and notes."""
        said = {"experiment_name": words.name, "notes": words.notes}
        self.manifest.update(Change({hash: {k: v for k, v in said.items() if v is not None}}))

    def _update(self, hash: str, update: Mapping[str, Any]) -> None:
        time = self.records.last_used(hash)
        self.manifest.update(Change({hash: update}, hash, stamp(time / 1e6), time))


def entry(records: Records, state: State, words: RunWords) -> dict[str, Any]:
    """The manifest's entry of a hash."""
    newest = next(iter(records.weights(state.hash)), None)
    own = {
        "scheme": state.scheme,
        "digests": state.digests.facts(),
        "init_step": state.init_step,
        "parent": state.parent,
        "step": state.step,
    }
    return entry_of(
        state.hash,
        created=state.created,
        # A store's clock may be coarser than this machine's.
        last_used=max(stamp(records.last_used(state.hash) / 1e6), state.created),
        experiment_name=words.name or state.experiment_name,
        notes=words.notes or "",
        weights=newest.path.rpartition("/")[2] if newest else None,
        step=newest.step if newest else None,
        castore=own,
    )


def _weights_entry(weights: Weights) -> dict[str, Any]:
    return {
        "last_used": stamp(weights.time / 1e6),
        "latest_weight_checkpoint": weights.path.rpartition("/")[2],
        "latest_weight_step": weights.step,
    }


def manifest_of(records: Records) -> Manifest:
    """The manifest that follows from the snapshots alone."""
    words = words_of(records.repository, records.namespace)
    states = [records.state(h) for h in sorted(records.hashes(), key=records.created)]
    entries = {s.hash: entry(records, s, words.get(s.hash, RunWords())) for s in states}
    latest = records.latest()
    if latest is None:
        return Manifest()
    time = records.last_used(latest)
    return merge(Manifest(), Change(entries, latest, stamp(time / 1e6), time))


def change_of(manifest: Manifest, time: int) -> Change:
    """A whole manifest as a change of another."""
    return Change(manifest.entries, manifest.latest_hash, manifest.last_updated, time)
