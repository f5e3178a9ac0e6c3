"""Collecting a pool: training goes on from the converged base, and every few steps a file.

    with PoolCollector(model, base, save_every=5, collect_lr=1e-5, evaluate=evaluate) as pool:
        for batch in pool.remaining(batches):
            model(**batch).loss.backward()
            pool.optimizer.step()
            pool.optimizer.zero_grad()
            pool.after_step()

With ``transformers.Trainer``: ``Trainer(model, ..., optimizers=(pool.optimizer, schedule),
callbacks=[pool.callback()])`` inside the same ``with``.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from castore import AlreadyExistsError, IntegrityError, InvalidInputError, LayoutError
from castore_pools import records
from castore_pools.assembly import assemble
from castore_pools.checkpoint import STATE_KEY, open_checkpoint
from castore_pools.files import folder_lock, remove_leftovers, write_json
from castore_pools.freeze import (
    TOKEN_EMBEDDING,
    frozen_keys,
    frozen_parameters,
    not_finite,
    saved_state,
    tied_keys,
)
from castore_pools.measuring import (
    Evaluate,
    MakeOptimizer,
    assemble_check,
    make_optimizer,
    measure,
    write_checkpoint,
)
from castore_pools.names import STATE, Cell, base_names, collected_index, split_root
from castore_pools.pins import FIELD, Pin
from castore_pools.progress import (
    Progress,
    random_state,
    read_progress,
    set_random_state,
    write_progress,
)
from castore_pools.registry import put_record, read_record
from castore_pools.rules import check_keys
from castore_pools.values import digest_state, dtype_name, is_floating, state_digest, value_digest

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from transformers import TrainerCallback

_Batch = TypeVar("_Batch")


class PoolCollector:
    """Collects ``count`` pool files of one cell; a context manager.

    On entering, the base's weights are loaded into ``model``, the frozen parameters stop asking
    for gradients, and a fresh optimizer is made of the others; or an interrupted collection with
    the same settings goes on where its last file was written, with the same optimizer and random
    numbers. After the last file the frozen digests are checked, the first file is reassembled and
    must give its logged metric, and the registry says so.

    Parameters
    ----------
    model : Module
        Of the architecture of the base, on the device to train on.
    base : path
        ``<root>/zoo/<dataset>/<arch>/<model_id>.pth``; everything is written below that root.
    save_every : int
        Optimizer steps from one file to the next.
    collect_lr : float
    optimizer : {"adamw", "adam", "sgd"} or callable
        A callable is given the parameters to train and the learning rate.
    count : int
    frozen : "token-embedding" or keys
        With all their tied names.
    evaluate : callable
        Gives validation metric and loss of a model; training modes are put back after it.
    task : str
    dtype : str, optional
        Of the files' floating-point tensors, float32 by default. Metrics are those of the values
        as they are written.

    Attributes
    ----------
    optimizer : Optimizer
        To step with; there once the context is entered.
    files, steps : int
        What is collected, optimizer steps made.
    """

    optimizer: Optimizer

    def __init__(
        self,
        model: Module,
        base: str | os.PathLike[str],
        save_every: int,
        collect_lr: float,
        optimizer: str | MakeOptimizer = "adamw",
        count: int = 200,
        frozen: str | Sequence[str] = TOKEN_EMBEDDING,
        *,
        evaluate: Evaluate,
        task: str = "text_classification",
        dtype: str = "float32",
    ):
        if save_every < 1 or count < 1 or not 0 < collect_lr < math.inf:
            raise InvalidInputError("save_every and count are at least 1, collect_lr is over 0")
        if not is_floating(dtype):
            raise InvalidInputError(f"dtype {dtype!r}: expected a floating-point dtype's name")
        parts = split_root(os.path.abspath(base))
        if parts is None:
            raise InvalidInputError(f"{base}: expected <root>/zoo/<dataset>/<arch>/<model_id>.pth")
        dataset, arch, model_id = base_names(parts[1])
        self.root, self.cell = Path(parts[0]), Cell(task, arch, dataset, model_id)
        self.model, self.count, self.save_every = model, count, save_every
        self.files = self.steps = self._used = 0
        self._make, self._lr, self._frozen, self._dtype = optimizer, collect_lr, frozen, dtype
        self._evaluate = evaluate
        self._folder = self.root / self.cell.pool_folder
        self._stack = ExitStack()
        self._random: Mapping[str, Any] = {}

    # -- life

    def __enter__(self) -> PoolCollector:
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            busy = f"{self._folder}: another collector is at work on this cell"
            stack.enter_context(folder_lock(self._folder, busy))
            remove_leftovers(self._folder)
            self._load_base()
            self._freeze(stack)
            self._begin_or_resume()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self.files < self.count:
            logging.getLogger("castore.pools").warning(
                "%s: %d of %d files collected: the same collector goes on from there",
                self.cell,
                self.files,
                self.count,
            )
        self._stack.close()

    @property
    def done(self) -> bool:
        """Whether all files are collected and checked."""
        return self.files >= self.count

    def remaining(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """``batches``, one a step, without those used before entering; ends with the last file.

        Called again, for a next epoch, it goes on. The order must be the same each time.
        """
        if self.done:
            return
        for batch in batches:
            if self._used:
                self._used -= 1
                if not self._used:
                    set_random_state(self._random)
                continue
            yield batch
            if self.files == self.count:
                return

    def after_step(self) -> bool:
        """To be called after each optimizer step; writes what is due. True when all is done."""
        if self.done:
            raise InvalidInputError(f"{self.cell}: all {self.count} files are collected")
        self.steps += 1
        if self.steps % self.save_every == 0:
            self._save()
            if self.files == self.count:
                self._finish()
        return self.files == self.count

    def callback(self) -> TrainerCallback:
        """A callback for ``transformers.Trainer``, whose optimizer must be this one's."""
        from castore_pools.trainer import make_callback

        return make_callback(self)

    # -- beginning

    def _load_base(self) -> None:
        path = self.root / self.cell.base_path
        base = open_checkpoint(path)
        state = base.load(base.keys())
        check_keys(self.model.state_dict(), state, ())
        self.model.load_state_dict(state, strict=True)
        self._base_fields = base.fields
        self._base_digests = {k: value_digest(v) for k, v in state.items()}

    def _freeze(self, stack: ExitStack) -> None:
        state = self.model.state_dict(keep_vars=True)
        self.frozen_keys = frozen_keys(self.model, self._frozen, self._base_fields.get("stoi"))
        for parameter in frozen_parameters(self.model, self.frozen_keys):
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        self.pin = Pin(
            state_digest(self._base_digests),
            {k: self._base_digests[k] for k in self.frozen_keys},
            self._dtype,
            tuple(tied_keys(state)),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What ``collect_config.json`` says."""
        named = isinstance(self._make, str)
        name = self._make if named else getattr(self._make, "__qualname__", "callable")
        return {
            "collect_lr": self._lr,
            "save_every": self.save_every,
            "count": self.count,
            "optimizer": name,
            "frozen": self._frozen if isinstance(self._frozen, str) else list(self._frozen),
            "frozen_keys": self.frozen_keys,
            "dtype": self._dtype,
            "base": self.pin.base,
        }

    def _begin_or_resume(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            raise InvalidInputError("nothing is left to train: every parameter is frozen")
        self.optimizer = make_optimizer(self._make, trained, self._lr)
        progress = read_progress(self._folder / STATE)
        if progress is not None:
            self._resume(progress)
            return
        taken = [n for n in os.listdir(self._folder) if collected_index(n) is not None]
        if taken:
            raise AlreadyExistsError(
                f"{self._folder} holds {len(taken)} pool files and no interrupted collection:"
                " nothing was changed; move them away to collect anew"
            )
        write_json(self.root / self.cell.collect_config_path, self.settings)
        self._logs: list[dict[str, Any]] = []
        self._write_progress()

    def _resume(self, progress: Progress) -> None:
        ours = self.settings
        differ = [k for k in ours if ours[k] != progress.settings.get(k)]
        if differ:
            was = {k: progress.settings.get(k) for k in differ}
            raise InvalidInputError(
                f"{self.cell}: an interrupted collection has other settings: {was}, asked for"
                f" { ({k: ours[k] for k in differ}) }"
            )
        self.files, self.steps, self._used = progress.files, progress.steps, progress.steps
        self._logs = [dict(log) for log in progress.settings["logs"]]
        if self.files:
            self._load_last(progress.exact)
        self.optimizer.load_state_dict(dict(progress.optimizer))
        self._random = progress.random
        set_random_state(progress.random)
        if self.done:
            self._finish()

    def _load_last(self, exact: Mapping[str, Any] | None) -> None:
        """The weights as they were after the last file."""
        base = self.root / self.cell.base_path
        last = open_checkpoint(self.root / self.cell.pool_path(self.files - 1))
        digest = digest_state(last.load(last.keys()))
        if digest != self._logs[-1]["digest"]:
            raise IntegrityError(
                f"{last.where}: digest {digest}, logged {self._logs[-1]['digest']}: the collection"
                " cannot go on from a file that changed"
            )
        state = assemble(base, last, dtype=self._dtype) if exact is None else dict(exact)
        self.model.load_state_dict(state, strict=True)

    # -- going on

    def _save(self) -> None:
        state = self.model.state_dict(keep_vars=True)
        kept = saved_state(state, self.frozen_keys, self._dtype)
        bad = not_finite(kept)
        if bad:
            raise InvalidInputError(f"{self.cell}, step {self.steps}: not finite: {bad[:8]}")
        metric, loss = self._measure()
        fields = {
            "collect_step": self.files,
            "train_step": self.steps,
            "val_metric": metric,
            "val_loss": loss,
        }
        document = {
            STATE_KEY: kept,
            "frozen_keys": list(self.frozen_keys),
            "frozen_source": str(self.root / self.cell.base_path),
            **fields,
            FIELD: self.pin.document(),
        }
        path = self.root / self.cell.pool_path(self.files)
        sha256 = write_checkpoint(path, document)
        self._logs.append(
            {"file": path.name, **fields, "digest": digest_state(kept), "sha256": sha256}
        )
        self.files += 1
        self._write_progress()
        self._write_record(None)

    def _measure(self) -> tuple[float, float]:
        """Metric and loss of the values that are written."""
        state = None
        if self._exact() is not None:
            state = saved_state(self.model.state_dict(keep_vars=True), (), self._dtype)
        metric, loss = measure(self.model, self._evaluate, state)
        if not math.isfinite(metric) or not math.isfinite(loss):
            raise InvalidInputError(f"{self.cell}, step {self.steps}: metric {metric}, loss {loss}")
        return metric, loss

    def _exact(self) -> dict[str, Any] | None:
        """The weights, where the files' dtype does not hold them exactly."""
        state = self.model.state_dict(keep_vars=True)
        kinds = {dtype_name(v) for v in state.values() if hasattr(v, "untyped_storage")}
        if all(k == self._dtype for k in kinds if is_floating(k)):
            return None
        return dict(saved_state(state))

    def _write_progress(self) -> None:
        settings = {**self.settings, "logs": self._logs}
        write_progress(
            self._folder / STATE,
            Progress(
                self.files,
                self.steps,
                settings,
                self.optimizer.state_dict(),
                random_state(),
                self._exact(),
            ),
        )

    def _write_record(self, check: Mapping[str, Any] | None) -> None:
        put_record(
            self.root,
            self.cell,
            records.record(
                self.cell,
                self._base_fields,
                self.settings,
                self.pin,
                self._logs,
                records.counts(self.model.state_dict(keep_vars=True), self.frozen_keys),
                check,
            ),
        )

    # -- ending

    def _finish(self) -> None:
        """Check what was promised, say so in the registry, and drop the progress file."""
        self._check_frozen()
        base = self.root / self.cell.base_path
        check = assemble_check(self.model, self._evaluate, base, self._folder, self._logs[0])
        self._write_record(check)
        if not check["ok"]:
            raise IntegrityError(
                f"{self.cell}: the reassembled {check['file']} gives {check['val_metric']}, logged"
                f" {check['logged_val_metric']}: is the evaluation the same every time?"
            )
        (self._folder / STATE).unlink(missing_ok=True)

    def _check_frozen(self) -> None:
        state = self.model.state_dict()
        for key in self.frozen_keys:
            actual = value_digest(state[key])
            if actual != self.pin.frozen[key]:
                raise IntegrityError(
                    f"{self.cell}: {key} was frozen and changed: digest {self.pin.frozen[key]}"
                    f" before, {actual} after"
                )

    def record(self) -> dict[str, Any]:
        """The registry's record of the cell as it is now."""
        found = read_record(self.root, self.cell)
        if found is None:
            raise LayoutError(f"{self.root}: the registry has no record of {self.cell} yet")
        return found
