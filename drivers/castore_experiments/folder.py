"""What a root's own files tell, where there is no repository behind them yet.

Such a root was written by the public tool, or its ``.castore`` was deleted. It is only read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from castore import CastoreError, FormatError, ObjectNotFoundError, SnapshotNotFoundError
from castore_experiments import layout
from castore_experiments.components import WEIGHTSLAB_2, scheme
from castore_experiments.documents import read_object
from castore_experiments.files import Files
from castore_experiments.manifest import Manifest, parse, parse_time
from castore_experiments.resume import read_config, read_data
from castore_experiments.states import Digests, State, Weights

_TRIES, _PAUSE = 5, 0.2  # of reading the manifest, and seconds between


class FolderRecords:
    """The states and weights of a root at ``files``, as of the last `refresh`.

    Parameters
    ----------
    files : Files
    report : callable
        Told one line of what was left out and why: a file that is missing or stands in no entry.
    sleep : callable
        Waits some seconds. The public tool writes the manifest in place, so one that cannot be read
        may be under way, and is read a few times more.

    Raises
    ------
    FormatError
        The manifest stays unreadable.
    ObjectNotFoundError
        There is none.
    """

    def __init__(
        self,
        files: Files,
        report: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.files, self._report, self._sleep = files, report, sleep
        self.manifest = Manifest()
        self._weights: dict[str, list[Weights]] = {}
        self._own: Mapping[str, Any] = {}
        self.refresh()

    @property
    def scheme(self) -> str:
        """The rule that the labels follow: the public tool's, unless the manifest says another."""
        said = (e.get("castore", {}).get("scheme") for e in self.manifest.entries.values())
        return next((str(s) for s in said if s), WEIGHTSLAB_2)

    def _scheme_of(self, hash: str) -> str:
        """An entry that says none is the public tool's, also in a root of ours."""
        said = self.manifest.entries[hash].get("castore", {}).get("scheme")
        return str(said) if said else WEIGHTSLAB_2

    def refresh(self) -> None:
        self.manifest = self._read_manifest()
        self._own = self._state_file()
        self._weights = {}
        for stat in self.files.list(layout.in_root("models")):
            found = layout.parse(stat.name.removeprefix(f"{layout.CHECKPOINTS}/"))
            if found is not None and found.kind == "weights" and found.step is not None:
                self._take(found, stat.name.removeprefix(f"{layout.CHECKPOINTS}/"), stat.modified)
        for hash, entry in self.manifest.entries.items():
            self._order(hash, entry.get("latest_weight_checkpoint"))

    def _read_manifest(self) -> Manifest:
        where = f"{self.files.url}/{layout.MANIFEST}"
        for _ in range(_TRIES - 1):
            try:
                return parse(self.files.get(layout.MANIFEST), where)
            except FormatError:
                self._sleep(_PAUSE)
        return parse(self.files.get(layout.MANIFEST), where)

    def _state_file(self) -> Mapping[str, Any]:
        try:
            data = self.files.get(layout.FOREIGN_STATE)
        except ObjectNotFoundError:
            return {}
        try:
            return read_object(data, layout.FOREIGN_STATE)
        except FormatError as e:
            self._report(str(e))
            return {}

    def _take(self, found: layout.Document, path: str, modified: float) -> None:
        """A file under its hash; one that carries only its model's label is every such hash's."""
        owners = (
            [found.hash]
            if found.hash
            else [h for h in self.manifest.entries if layout.split(h).model == found.label]
        )
        for hash in owners:
            weights = Weights(hash, found.step or 0, path, int(modified * 1e6))
            self._weights.setdefault(hash, []).append(weights)

    def _order(self, hash: str, latest: object) -> None:
        """Last saved first: the one that the manifest names, then by time, then by step."""
        found = self._weights.get(hash, [])
        found.sort(key=lambda w: (w.path.rpartition("/")[2] == latest, w.time, w.step))
        found.reverse()
        if isinstance(latest, str) and not any(w.path.endswith(f"/{latest}") for w in found):
            self._report(f"{hash}: the manifest names {latest}, which is not there")

    # -- Archive

    def hashes(self) -> list[str]:
        entries = self.manifest.entries
        return sorted(entries, key=lambda h: self._used(entries[h]), reverse=True)

    def _used(self, entry: Mapping[str, Any]) -> float:
        return parse_time(entry.get("last_used")) or parse_time(entry.get("created")) or 0.0

    def in_order(self) -> list[str]:
        """Every hash, the oldest first: as they are to be imported."""
        entries = self.manifest.entries
        return sorted(entries, key=lambda h: parse_time(entries[h].get("created")) or 0.0)

    def latest(self) -> str | None:
        hash = self.manifest.latest_hash
        return hash if hash in self.manifest.entries else next(iter(self.hashes()), None)

    def state(self, hash: str) -> State:
        entry = self.manifest.entries.get(hash)
        if entry is None:
            raise SnapshotNotFoundError(f"there is no experiment {hash} in {self.files.url}")
        ours = entry.get("castore", {})
        known = ours.get("digests", {})
        labels = layout.split(hash)
        found = [_digest(known.get(c), getattr(labels, c)) for c in layout.COMPONENTS]
        digests = [self._whole(hash, c, d) for c, d in zip(layout.COMPONENTS, found, strict=True)]
        init = ours.get("init_step", self._init_step(hash))
        return State(
            hash,
            Digests(*digests),
            self._scheme_of(hash),
            init if type(init) is int and init >= 0 else 0,
            parent=ours.get("parent"),
            step=ours.get("step"),
            experiment_name=entry.get("experiment_name"),
            created=str(entry.get("created") or ""),
        )

    def _init_step(self, hash: str) -> object:
        """The step the model of ``hash`` was initialised at.

        The public tool keeps it for the current hash only. A model that is new at a hash starts at
        the step it was loaded at, under which its first weights are saved.
        """
        if self._own.get("current_exp_hash") == hash and "model_init_step" in self._own:
            return self._own["model_init_step"]
        first = next(self.with_label("model", layout.split(hash).model))
        return min((w.step for w in self.weights(first)), default=0)

    def with_label(self, component: str, label: str) -> Iterator[str]:
        return (h for h in self.in_order() if getattr(layout.split(h), component) == label)

    def words(self, hash: str) -> tuple[str | None, str | None]:
        """The name and the notes that the manifest has of a hash."""
        entry = self.manifest.entries[hash]
        name, notes = entry.get("experiment_name"), entry.get("notes")
        return (None if name is None else str(name), str(notes) if notes else None)

    def _whole(self, hash: str, component: str, digest: str) -> str:
        """The full digest of a component of which only the label is known, from its file."""
        if len(digest) != 8 or component == "model":
            return digest
        try:
            rule = scheme(self._scheme_of(hash))
            if component == "hp":
                config = read_config(self, hash)
                full = rule.hp(config) if config is not None else digest
            else:
                data, _ = read_data(self, hash)
                full = rule.data(data) if data is not None else digest
        except CastoreError as e:
            self._report(f"{hash}: its {component} cannot be read: {e}")
            return digest
        return full if full[:8] == digest else digest

    def weights(self, hash: str) -> Sequence[Weights]:
        return self._weights.get(hash, [])

    def document(self, hash: str, path: str) -> bytes | None:
        try:
            return self.files.get(layout.in_root(path))
        except ObjectNotFoundError:
            return None

    def documents(self, hash: str) -> dict[str, bytes]:
        """The documents of a hash that are there."""
        found = {path: self.document(hash, path) for path in paths_of(hash)}
        return {path: data for path, data in found.items() if data is not None}

    def weight_file(self, weights: Weights) -> bytes:
        return self.files.get(layout.in_root(weights.path))

    def __contains__(self, hash: str) -> bool:
        return hash in self.manifest.entries


def paths_of(hash: str) -> list[str]:
    """Where the documents of a hash stand, its weights apart."""
    hp, model, data = layout.split(hash)
    return [
        layout.config_path(hp),
        layout.data_json_path(data),
        layout.data_parquet_path(data),
        layout.data_rows_path(data),
        layout.architecture_path(model),
        layout.architecture_ref_path(model),
    ]


def _digest(known: object, label: str) -> str:
    if isinstance(known, str) and len(known) == 64:
        return known
    return "" if label == layout.NO_SEGMENT else label
