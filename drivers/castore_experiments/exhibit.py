"""A root's documented files, brought to what the repository holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from castore import File, InvalidInputError, MemoryFile, SnapshotNotFoundError, disk_file
from castore.digest import Buffer
from castore.source import Source
from castore_experiments import layout
from castore_experiments.components import WEIGHTSLAB_2
from castore_experiments.documents import OWN_FILES
from castore_experiments.files import Files
from castore_experiments.foreign_state import follow
from castore_experiments.local_files import Staged
from castore_experiments.manifest import Change, Manifest, entry_of, merge, stamp
from castore_experiments.manifest_file import ManifestFile
from castore_experiments.options import Materialize
from castore_experiments.records import Records
from castore_experiments.runs import RunWords, words_of
from castore_experiments.states import State, Weights
from castore_experiments.view import Parts, View, wanted_weights

AT_HAND = 256 << 20
"""Bytes of the largest weight file that is kept in memory until the next save."""


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
        self.records, self._report, self._files = records, report, files
        self._shown: dict[str, set[str]] = {}
        self._last: tuple[Weights, MemoryFile] | None = None
        self._caught_up = False
        self._behind: set[str] = set()
        self._going: list[tuple[str, File]] = []
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
            return any(self._has(w, sha256) for w in saved if w.step == found.step)
        return any(
            path in files and files[path].sha256 == sha256
            for files in map(self.records.state_files, self.records.with_folder(path))
        )

    def _has(self, weights: Weights, sha256: str) -> bool:
        with suppress(SnapshotNotFoundError):  # another process forgot it meanwhile
            return self.records.weight_sha256(weights) == sha256
        return False

    def _write(
        self, path: str, data: Buffer | Parts, sha256: str | None, staged: Staged | None = None
    ) -> None:
        outcome = self.view.write(path, data, sha256, staged)
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

    def stage_weights(self, path: str, data: Buffer) -> Staged | None:
        """Write weights that are to be real beside their name, while they are being committed."""
        return self.view.stage(path, data) if self._is_wanted(path) else None

    def _is_wanted(self, path: str) -> bool:
        return path in wanted_weights(self.materialize, path, [path])

    def show_weights(
        self, weights: Weights, data: Buffer | None = None, staged: Staged | None = None
    ) -> None:
        """Make ``weights`` real if they are to be, and others not real that need not be."""
        if self._is_wanted(weights.path):
            self._write_weights(weights, data, staged)
        if self.materialize == "latest":
            self._remove_others(weights.path)

    def _write_weights(
        self, weights: Weights, data: Buffer | None, staged: Staged | None = None
    ) -> None:
        file = self.records.file_of(weights)
        content = data if data is not None else partial(self.records.repository.read_file, file)
        self._write(weights.path, content, file.sha256, staged)

    def _remove_others(self, path: str) -> None:
        for other in self.view.weights():
            if other != path and not self._is_imported(other):
                self.view.remove(other)

    def _is_imported(self, path: str) -> bool:
        """Whether another program wrote this weight file, and may look for it."""
        found = layout.parse(path)
        if found is None or found.hash is None:
            return True
        same = [w for w in self.records.all_weights(found.hash) if w.step == found.step]
        return any(map(self.records.is_imported, same))

    def at_hand(self, weights: Weights) -> Source | None:
        """What has the bytes of weights: their real file, or memory where the root has none."""
        if self._last is not None and self._last[0] == weights:
            return self._last[1]
        if self.view.folder is None:
            return None
        try:
            return disk_file(self.view.folder / layout.in_root(weights.path))
        except InvalidInputError:
            return None

    def keep_at_hand(self, weights: Weights, data: Buffer) -> None:
        """Remember weights that are not real and not too large, for the next save to build on."""
        real = self.view.folder is not None and self._is_wanted(weights.path)
        self._last = None
        if not real and len(data) <= AT_HAND:
            self._last = weights, MemoryFile(bytes(data))

    def will_go(self, path: str, file: File) -> None:
        """A file whose snapshot is about to be forgotten: the next `withdraw` takes it away."""
        self._going.append((path, file))

    def withdraw(self) -> None:
        """Take away files that are committed no more; what else has their name comes back.

        Where that fails the next `withdraw` goes on.
        """
        while self._going:
            path, file = self._going[0]
            self._shown.setdefault(path, set()).add(file.sha256)
            right = self._still(path)
            if right is None:
                self.view.remove(path)
            else:
                self._write(path, partial(self.records.repository.read_file, right), right.sha256)
            del self._going[0]

    def _still(self, path: str) -> File | None:
        """What is to be real under a path by now."""
        found = layout.parse(path)
        if found is None or found.kind != "weights":
            files = map(self.records.state_files, self.records.with_folder(path))
            return next((f[path] for f in files if path in f), None)
        if self.materialize != "all" or found.hash is None:
            return None
        same = (w for w in self.records.weights(found.hash) if w.step == found.step)
        return next(map(self.records.file_of, same), None)

    # -- everything

    def rebuild(self) -> int:
        """Write all that is to be real, and the manifest; gives the number of hashes."""
        hashes = self.records.hashes()
        self._show(hashes)
        self.manifest.update(change_of(manifest_of(self.records), self._time()))
        return len(hashes)

    def _show(self, hashes: Sequence[str]) -> None:
        """The documents of some hashes, and those of their weights that are to be real."""
        for hash in hashes:
            self.show_state(hash)
        newest = self._newest()
        every = {w.path: w for h in hashes for w in reversed(self.records.weights(h))}
        for path in sorted(wanted_weights(self.materialize, newest, every) & every.keys()):
            self._write_weights(every[path], None)

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

    def note_use(self, hash: str) -> None:
        """Enter a hash that is the latest again."""
        self._update(hash, {"last_used": stamp(self.records.last_used(hash) / 1e6)})

    def note_withdrawn(self, hash: str) -> None:
        """Take out a hash that there is no more, or enter the one that still has its name."""
        if hash not in self.records:
            self.manifest.update(Change(drop=(hash,)))
            return
        state = self.records.state(hash)
        update = entry(self.records, state, RunWords(state.experiment_name))
        self.manifest.update(Change({hash: update}))

    def note_words(self, hash: str, words: RunWords) -> None:
        """Enter a name and notes."""
        said = {"experiment_name": words.name, "notes": words.notes}
        self.manifest.update(Change({hash: {k: v for k, v in said.items() if v is not None}}))

    def _update(self, hash: str, update: Mapping[str, Any]) -> None:
        time = self.records.last_used(hash)
        self._catch_up(self.manifest.update(Change({hash: update}, hash, stamp(time / 1e6), time)))
        state = self.records.state(hash)
        if state.scheme == WEIGHTSLAB_2:
            newest = next(iter(self.records.weights(hash)), None)
            step = newest.step if newest else state.step or 0
            follow(self._files, state, step, stamp(time / 1e6))

    @contextmanager
    def following(self, *hashes: str) -> Iterator[None]:
        """What fails within left the root behind the repository: the next write brings it after."""
        try:
            yield
        except BaseException:
            self._behind.update(hashes)
            raise

    def _catch_up(self, there: Manifest) -> None:
        """Show and enter what was committed and then not shown: once what processes that ended
        early left, or people edited, and after each failure of this one.
        """
        if not self._caught_up:
            self._behind.update(h for h in self.records.hashes() if not self._is_entered(h, there))
            self._caught_up = True
        if self._behind or self._going:
            self.records.refresh()
            self.withdraw()
        for hash in sorted(self._behind):
            if hash in self.records:
                self._show([hash])
                self._enter(hash, there)
            self._behind.remove(hash)

    def _enter(self, hash: str, there: Manifest) -> None:
        """The whole entry of a hash; newer weights that another machine entered stay."""
        said = there.entries.get(hash, {}).get("latest_weight_checkpoint")
        gone = said not in (None, *map(_name_of, self.records.weights(hash)))
        state = self.records.state(hash)
        update = entry(self.records, state, RunWords(state.experiment_name))
        time = 0 if gone else self.records.last_used(hash)
        self.manifest.update(Change({hash: update}, time=time))

    def _is_entered(self, hash: str, there: Manifest) -> bool:
        found = there.entries.get(hash, {})
        names = map(_name_of, self.records.weights(hash))
        labels = layout.split(hash)._asdict().items()
        return found.get("latest_weight_checkpoint") == next(names, None) and all(
            found.get(f"{component}_hash") == label for component, label in labels
        )


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
        weights=_name_of(newest) if newest else None,
        step=newest.step if newest else None,
        castore=own,
    )


def _weights_entry(weights: Weights) -> dict[str, Any]:
    return {
        "last_used": stamp(weights.time / 1e6),
        "latest_weight_checkpoint": _name_of(weights),
        "latest_weight_step": weights.step,
    }


def _name_of(weights: Weights) -> str:
    return weights.path.rpartition("/")[2]


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
