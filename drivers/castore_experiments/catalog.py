"""The half of `CheckpointManager` that only answers: where, which hashes, which curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard

from castore import InvalidInputError
from castore_experiments import answers, layout
from castore_experiments.components import Content
from castore_experiments.records import Records
from castore_experiments.saving import metrics_of
from castore_experiments.session import Session
from castore_experiments.states import Archive

if TYPE_CHECKING:
    import pandas as pd

    from castore_experiments.signals import Curves

Place: TypeAlias = Path | str


class Catalog:
    """Questions to the root of one session. Nothing is written."""

    def __init__(self, session: Session):
        self._session = session

    @property
    def is_closed(self) -> bool:
        """Whether `CheckpointManager.close` was called."""
        return self._session.closed

    # -- where it is

    @property
    def given_root_log_dir(self) -> str | None:
        """What was passed."""
        return self._session.given

    @property
    def root_log_dir(self) -> Place:
        """The effective root that was adopted: a path, or a URL for a remote one."""
        return answers.place(self._session.place.files.url)

    @property
    def discovered_root_dirs(self) -> list[Place]:
        """Every root that was found at or below the given one."""
        return [answers.place(f.url) for f in self._session.place.discovery.roots]

    @property
    def is_multi_root(self) -> bool:
        """Whether more than one root was found."""
        return self._session.place.discovery.is_multi_root

    @property
    def checkpoints_dir(self) -> Place:
        """``checkpoints/`` of the effective root."""
        return answers.below(self.root_log_dir, layout.CHECKPOINTS)

    @property
    def models_dir(self) -> Place:
        """``checkpoints/models/``."""
        return answers.below(self.checkpoints_dir, "models")

    @property
    def hp_dir(self) -> Place:
        """``checkpoints/HP/``."""
        return answers.below(self.checkpoints_dir, "HP")

    @property
    def data_checkpoint_dir(self) -> Place:
        """``checkpoints/data/``."""
        return answers.below(self.checkpoints_dir, "data")

    @property
    def loggers_dir(self) -> Place:
        """``checkpoints/loggers/``."""
        return answers.below(self.checkpoints_dir, "loggers")

    @property
    def manifest_file(self) -> Place:
        """``checkpoints/manifest.yaml``."""
        return answers.below(self.root_log_dir, layout.MANIFEST)

    def get_logger_db_path(self) -> Place:
        """Where ``loggers.duckdb`` stands after a save."""
        return answers.below(self.root_log_dir, layout.CURVES)

    @property
    def hyperparameters(self) -> Mapping[Any, Any] | None:
        """The watched configuration; before one is watched, the resumed one."""
        if self._session.watched.hyperparameters is not None:
            return self._session.watched.hyperparameters
        _ = self._session.place
        return self._session.resume.loaded.config if self._session.resume else None

    # -- the hash

    @property
    def current_exp_hash(self) -> str | None:
        """The current hash; None before there is one."""
        _ = self._session.place
        return self._session.tracker.hash

    @property
    def previous_exp_hash(self) -> str | None:
        """The hash before the current one."""
        _ = self._session.place
        return self._session.tracker.previous

    @property
    def hash_by_module(self) -> dict[str, str]:
        """The labels of the current hash: ``hp``, ``model``, ``data``."""
        hash = self.current_exp_hash
        return dict(layout.split(hash)._asdict()) if hash else {}

    @property
    def first_time(self) -> bool:
        """Whether the root held nothing when it was opened."""
        _ = self._session.place
        return self._session.fresh

    @property
    def error_loading_checkpoint(self) -> bool:
        """Whether resuming had to skip an experiment that is damaged."""
        return self._session.damaged

    def get_current_experiment_hash(self) -> str | None:
        """The current hash."""
        return self.current_exp_hash

    # -- which hashes there are

    def _archive(self) -> Archive | None:
        """What the root holds, saves under way included and others' writes seen."""
        place = self._session.place
        self._session.background.settle()
        place.look_again()
        return place.archive

    def get_latest_hash(self) -> str | None:
        """The hash that was current at the last write; None if nothing was written."""
        archive = self._archive()
        return archive.latest() if archive is not None else None

    def get_all_hashes(self, sort_by: Literal["created", "last_used"] = "created") -> list[str]:
        """Every hash that was written, newest first; `InvalidInputError` for another order."""
        if sort_by not in ("created", "last_used"):
            raise InvalidInputError(f"sort_by {sort_by!r}: expected 'created' or 'last_used'")
        archive = self._archive()
        if archive is None:
            return []
        if sort_by == "last_used":
            return archive.hashes()
        order = {h: i for i, h in enumerate(reversed(archive.hashes()))}
        return sorted(order, key=lambda h: (archive.state(h).created, order[h]), reverse=True)

    def list_experiment_hashes(self) -> list[str]:
        """Every hash that was written, oldest first."""
        return self.get_all_hashes()[::-1]

    def get_hashes_by_component(
        self,
        hp_hash: str | None = None,
        model_hash: str | None = None,
        data_hash: str | None = None,
    ) -> list[str]:
        """The hashes whose labels are those given; None stands for any."""
        wanted = (hp_hash, model_hash, data_hash)
        return [
            h
            for h in self.get_all_hashes()
            if all(w in (None, label) for w, label in zip(wanted, layout.split(h), strict=True))
        ]

    def get_hp_hash(self) -> str | None:
        """The label of the current configuration."""
        return self.hash_by_module.get("hp")

    def get_model_hash(self) -> str | None:
        """The label of the current model."""
        return self.hash_by_module.get("model")

    def get_data_hash(self) -> str | None:
        """The label of the current data state."""
        return self.hash_by_module.get("data")

    # Names of the public tool's.
    def get_HP_snapshot(self) -> Mapping[Any, Any] | None:  # noqa: N802
        """The watched configuration in normal form, without the keys that do not count."""
        return self._content().config

    def get_model_snapshot(self) -> Any:
        """The watched model."""
        return self._session.watched.model

    def get_dataframe_snapshot(self) -> pd.DataFrame | None:
        """The tags and discards of the watched data, one row a sample."""
        data = self._content().data
        return None if data is None else data.to_frame()

    def _content(self) -> Content:
        watched = self._session.watched
        _ = self._session.place
        rule = self._session.tracker.rule
        return rule.content(watched.hyperparameters, watched.model, watched.frame())

    def list_runs(self) -> list[dict[str, Any]]:
        """Every hash with its manifest entry, parent, name and notes; last used first.

        ``is_current`` marks the current one.
        """
        archive = self._archive()
        return [] if archive is None else answers.runs(archive, self._session.tracker.hash)

    def get_checkpoint_info(self, exp_hash: str | None = None) -> dict[str, Any]:
        """Digests, parent, steps and metrics of a hash, the current one by default.

        Empty for a hash that does not exist.
        """
        archive = self._archive()
        hash = exp_hash or self.current_exp_hash
        if archive is None or hash is None or hash not in archive:
            return {}
        found = archive.weights(hash)
        metrics = (
            {w.step: metrics_of(archive, w) for w in reversed(found)} if _is_kept(archive) else {}
        )
        return answers.info(archive, hash, metrics)

    # -- curves

    def signals(self, metric: str, hash: str | None = None, run: str | None = None) -> pd.DataFrame:
        """The points of a metric over all discovered roots, by step.

        By default the curve of the newest run and its ancestors; of one hash with ``hash``; as one
        run left it with ``run``. Columns as in ``loggers.duckdb``.
        """
        return self._curves().signals(metric, hash, run)

    def per_sample(
        self,
        metric: str,
        hash: str | None = None,
        run: str | None = None,
        sample_id: str | None = None,
    ) -> pd.DataFrame:
        """The values of samples behind a metric, as `signals`."""
        return self._curves().per_sample(metric, hash, run, sample_id)

    def load_logger_snapshot(self) -> bool:
        """Whether this root or a sibling has curves. They are read when asked for, never loaded."""
        return bool(self._curves().metrics())

    def _curves(self) -> Curves:
        return self._session.curves()


def _is_kept(archive: Archive) -> TypeGuard[Records]:
    """Whether a repository stands behind the root already."""
    return isinstance(archive, Records)
