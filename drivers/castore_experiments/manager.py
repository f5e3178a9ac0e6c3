"""`CheckpointManager`: versions an experiment by content and resumes it."""

from __future__ import annotations

import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

from castore import InvalidInputError
from castore_experiments import answers, chosen, layout, ranks
from castore_experiments.background import Handle, before_shutdown
from castore_experiments.canonical import from_yaml
from castore_experiments.catalog import Place
from castore_experiments.naming import Naming
from castore_experiments.options import parse_options
from castore_experiments.pending_save import Saving
from castore_experiments.place import World
from castore_experiments.resume import Wanted, log_report
from castore_experiments.session import Session
from castore_experiments.tracker import Update


class CheckpointManager(Naming):
    """Keeps an experiment under the hash of its content, on a local root or on S3.

    Opening an existing root resumes its latest hash: model, optimizer, random streams, positions
    of data loaders, tags and discards are restored when their object is watched.

    Parameters
    ----------
    root_log_dir : path or URL, optional
        The experiment's root, or a folder up to three levels above several of them. May come from
        `watch` or from the watched configuration instead; ``root_experiment`` if nothing says.
    load_model, load_config, load_data : bool
        Whether resuming gives weights to a watched model, the old configuration to a watched
        mapping (False: one that differs counts as an edit), and tags and discards to watched data.
    checkpoint_manager : mapping, optional
        Options, as under that key of a configuration; see `castore_experiments.options`.
    storage_options : dict, optional
        For the fsspec file system of root and repository; never stored or shown.
    allow_pickle : bool
        Whether pickled architectures may be loaded. That runs whatever code they hold.
    report : callable, optional
        Told one line for people about what was found and done; by default the logger ``castore``.
    clock : callable
        Seconds since the epoch, for times in documents.

    Raises
    ------
    BackendError, RepositoryNotFoundError, IntegrityError
        The root or its repository cannot be reached, or another one is in its place.
    FormatError
        A document of the root is damaged, or newer than this version.

    Notes
    -----
    Every method may raise those, and what a save in the background failed with. In a job of
    torch.distributed rank 0 writes; the others get the same answers.
    """

    def __init__(
        self,
        root_log_dir: str | os.PathLike[str] | None = None,
        load_model: bool = True,
        load_config: bool = False,
        load_data: bool = True,
        *,
        checkpoint_manager: Mapping[str, Any] | None = None,
        storage_options: dict[str, Any] | None = None,
        allow_pickle: bool = False,
        report: Callable[[str], None] = log_report,
        clock: Callable[[], float] = time.time,
    ):
        given = os.fspath(root_log_dir) if root_log_dir is not None else None
        world = World(storage_options, report, clock, lambda: secrets.token_hex(4))
        wanted = Wanted(load_model, load_model, load_config, load_data)
        super().__init__(Session(given, parse_options(checkpoint_manager), world, wanted))
        self._allow_pickle = allow_pickle
        if given is not None:
            _ = self._session.place
        before_shutdown(partial(_close_at_exit, weakref.ref(self), os.getpid()))

    @classmethod
    def from_config(
        cls, config: str | os.PathLike[str] | Mapping[str, Any], **more: Any
    ) -> CheckpointManager:
        """A manager as a configuration (a YAML file, or a mapping) says.

        Its ``root_log_dir`` and ``checkpoint_manager`` count; it is watched as hyperparameters.
        ``more`` are keyword arguments of the constructor.

        Raises
        ------
        OSError, FormatError, InvalidInputError
            The file cannot be read, is no configuration, or names another root than ``more``; and
            as the constructor and `watch`.
        """
        if not isinstance(config, Mapping):
            config = from_yaml(Path(config).read_bytes(), os.fspath(config))
        root = more.pop("root_log_dir", None) or config.get("root_log_dir")
        manager = cls(root, checkpoint_manager=config.get("checkpoint_manager"), **more)
        manager.watch(hyperparameters=config if isinstance(config, dict) else dict(config))
        return manager

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"CheckpointManager({self._session.given!r})"

    # -- what is watched

    def watch(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        hyperparameters: MutableMapping[Any, Any] | None = None,
        data: Any = None,
        dataloaders: Mapping[str, Any] | None = None,
        root_log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Follow objects; what was resumed is given to them now.

        ``data`` is a DataFrame with ``sample_id``, ``discarded`` and ``tag:<name>`` columns, a
        mapping, or a callable that gives one.

        Raises
        ------
        InvalidInputError
            A second root, an unknown option in ``hyperparameters["checkpoint_manager"]``, or an
            object that does not take its resumed part.
        """
        objects = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "hyperparameters": hyperparameters,
            "data": data,
        }
        self._session.watch(objects, chosen.mapping("dataloaders", dataloaders), root_log_dir)

    def update_experiment_hash(
        self,
        model_snapshot: Any = None,
        hp_snapshot: Any = None,
        dfm_snapshot: Any = None,
        force: bool = False,
        first_time: bool = False,
        dump_immediately: bool = False,
    ) -> Update:
        """Find what changed since the last call, and make its hash the current one.

        Parameters
        ----------
        model_snapshot, hp_snapshot, dfm_snapshot : optional
            Stand in for the watched model, configuration and data; -1 keeps the segment.
        force : bool
            Count everything as changed and new.
        first_time : bool
            On a manager's first hash: as ``force`` with ``dump_immediately``.
        dump_immediately : bool
            Write now; otherwise the change waits for `save_pending_changes` or a save.

        Returns
        -------
        Update
            ``(hash, is_new, changed)``; ``changed`` is a set of ``hp``, ``model``, ``data``.

        Raises
        ------
        InvalidInputError
            Something that counts has no canonical form; the message names its key path.
        """
        session = self._session
        _ = session.place
        first = first_time and session.tracker.state is None
        content = chosen.content(session, model_snapshot, hp_snapshot, dfm_snapshot)
        update = session.update(content, force or first)
        if dump_immediately or first:
            self.save_pending_changes(force=force or first)
        elif update.changed:
            session.remember_pending()
        return update

    def has_pending_changes(self) -> tuple[bool, set[str]]:
        """Whether something waits to be written, and which components."""
        _ = self._session.place
        pending = self._session.tracker.pending
        return bool(pending), pending

    def save_pending_changes(self, force: bool = False) -> bool:
        """Write what waits: the changed segments, and the weights under the new hash.

        Returns
        -------
        bool
            Whether something was written; with ``force`` also when nothing waits.
        """
        session = self._session
        _ = session.place
        if session.tracker.state is None or not (session.tracker.pending or force):
            return False
        if not session.options.enable_checkpoints:
            return False
        if ranks.writes():
            with session.background.starting:
                handle = session.save(
                    step=None, metrics={}, metadata=None, optimizer=True, weights=True
                )
            handle.result()
        else:
            session.elsewhere(None)
        return True

    def get_current_experiment_hash(self) -> str:
        """The current hash; computed from what is watched if there is none yet."""
        return self.current_exp_hash or self.update_experiment_hash().hash

    # -- saving

    def save_model_checkpoint(
        self,
        model: Any = None,
        save_optimizer: bool = True,
        save_model_checkpoint: bool = True,
        metadata: Mapping[str, Any] | None = None,
        force_dump_pending: bool = True,
        update_manifest: bool = True,
        step: int | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        wait: bool = True,
    ) -> Any:
        """Save weights, optimizer, random streams and loader positions under the current hash.

        What the caller does after the call returns does not change what is saved. Changes that
        wait are written with it, since weights under a hash without its state could not be resumed.

        Parameters
        ----------
        model : optional
            Instead of the watched one.
        save_optimizer : bool
        save_model_checkpoint : bool
            False writes only changes that wait.
        metadata : mapping, optional
            Plain values for the key ``metadata`` of the file.
        force_dump_pending, update_manifest : bool
            Always done; False is refused.
        step : int, optional
            The training step; the last one known by default.
        metrics : mapping of str to float, optional
            Kept with the weights; the ``keep`` option chooses by them.
        wait : bool
            False returns as soon as the state is copied.

        Returns
        -------
        path or Handle or None
            The documented file's path (a URL for a remote root), durable in the repository. With
            ``wait=False`` a handle whose ``result()`` gives that. None if nothing is to be saved.

        Raises
        ------
        InvalidInputError
            Something that could not be read back, or a model whose tensors have other names or
            shapes than those the current hash stands for; it is named. Nothing was saved.
        """
        session = self._session
        chosen.refuse_false(force_dump_pending=force_dump_pending, update_manifest=update_manifest)
        if not session.place or not session.options.enable_checkpoints:
            return None
        self.get_current_experiment_hash()
        if not ranks.writes():
            saving = Saving(Handle.of(session.elsewhere(step)), self.checkpoints_dir)
            return saving.result() if wait else saving
        with session.background.starting:
            handle = session.save(
                step=step,
                metrics=chosen.numbers(metrics),
                metadata=chosen.metadata(metadata),
                optimizer=save_optimizer,
                weights=save_model_checkpoint,
                model=model,
            )
        saving = Saving(handle, self.checkpoints_dir)
        return saving.result() if wait else saving

    def save_model_architecture(self, model: Any = None) -> Place | None:
        """Where the pickled architecture of the current model stands.

        It is written with a state, when ``dump_model_architecture`` is on, and never again: a
        ``model`` given here, as public code does, is not written. None if the current hash has
        none.
        """
        return self._document("model", layout.architecture_path)

    def save_config(
        self, config: Mapping[Any, Any] | None = None, config_name: str = "config"
    ) -> Place | None:
        """Where the configuration of the current hash stands; what waits is written first.

        None if there is no hash, or its configuration is not dumped. ``config`` may only be the
        one of that hash, and ``config_name`` the documented one: else `InvalidInputError`.
        """
        chosen.refuse_other_config(self._session, config, config_name)
        self.save_pending_changes()
        return self._document("hp", layout.config_path)

    def save_data_snapshot(self, force_new_state: bool = False) -> Place | None:
        """Where the data snapshot (JSON) of the current hash stands; what waits is written first.

        None if there is no hash, or its data are not dumped. Nothing is ever overwritten, so that
        ``force_new_state`` is refused: equal data are one state.
        """
        if force_new_state:
            raise InvalidInputError("force_new_state=True: equal data are one state; leave it out")
        self.save_pending_changes()
        return self._document("data", layout.data_json_path)

    def _document(self, component: layout.Component, path_of: Callable[[str], str]) -> Place | None:
        """Where a document of the current hash stands, if it was written."""
        archive, hash = self._archive(), self.current_exp_hash
        if archive is None or hash is None or hash not in archive:
            return None
        path = path_of(getattr(layout.split(hash), component))
        found = archive.document(hash, path) is not None
        return answers.below(self.checkpoints_dir, path) if found else None

    # -- curves

    def log(self, metric: str, value: Any, step: int | None = None, **more: Any) -> None:
        """Take one point of a curve under the current hash; see `signals.Log.log` for ``more``.

        Raises what went wrong in the background since the last call.
        """
        self._session.log(metric, value, step, more)

    def flush_logger_to_disk(self) -> None:
        """Every row so far into the repository and ``loggers.duckdb``; durable on return."""
        if self._session.is_open:
            self._session.background.settle()
            if ranks.writes():
                self._session.publish_curves(self._session.records())

    # -- the end

    def close(self) -> None:
        """Finish a save under way and flush curves. Closing twice is no error.

        Raises
        ------
        CastoreError
            What a save in the background failed with, if nobody was told yet.
        """
        self._session.close()


def _close_at_exit(manager: weakref.ref[CheckpointManager], process: int) -> None:
    """A save under way at the interpreter's exit is finished; nobody is left to raise to.

    A forked child, such as a worker of a data loader, leaves that to the process that made it.
    """
    found = manager()
    if found is None or os.getpid() != process:
        return
    try:
        found.close()
    except Exception:
        logging.getLogger("castore").exception("%r could not be closed", found)
