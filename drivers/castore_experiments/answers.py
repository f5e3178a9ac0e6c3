"""What a manager answers: paths, mappings and lists in the shape that callers know."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castore import InvalidInputError
from castore_experiments import layout
from castore_experiments.manifest import stamp
from castore_experiments.records import Records
from castore_experiments.resume import Loaded
from castore_experiments.runs import RunWords, words_of
from castore_experiments.states import Archive, Weights


def place(url: str) -> Path | str:
    """A local URL as a path, any other as it is."""
    return url if "://" in url else Path(url)


def below(root: Path | str, path: str) -> Path | str:
    """``path`` below a root."""
    return root / path if isinstance(root, Path) else f"{root.rstrip('/')}/{path}"


def same_place(a: str, b: str) -> bool:
    """Whether two spellings name one root."""
    return a.rstrip("/") == b.rstrip("/") or (
        "://" not in a + b and os.path.realpath(a) == os.path.realpath(b)
    )


def one_root(given: str | None, root: str | os.PathLike[str] | None, config: Any) -> str | None:
    """The root that constructor (``given``), `watch` and configuration name, in this order.

    Raises
    ------
    InvalidInputError
        They name two, or the configuration is no mapping.
    """
    if config is not None and not isinstance(config, Mapping):
        hint = ": watch vars() of it, which is live" if hasattr(config, "__dict__") else ""
        raise InvalidInputError(
            f"hyperparameters: expected a mapping, found {type(config).__qualname__}{hint}"
        )
    named = [given, None if root is None else os.fspath(root)]
    if config is not None and config.get("root_log_dir") is not None:
        named.append(os.fspath(config["root_log_dir"]))
    urls = [url for url in named if url is not None]
    first = next(iter(urls), None)
    for url in urls[1:]:
        if first is not None and not same_place(first, url):
            raise InvalidInputError(
                f"root_log_dir: {url!r} is not {first!r}, which this manager was given before: one"
                " manager has one root"
            )
    return first


def step_of(metric: str, step: Any) -> int:
    """The step of a point of a curve; `InvalidInputError` for what is no whole number."""
    if type(step) is int:
        return step
    from castore_experiments.signals.values import integer

    return integer(step, f"{metric}: step")


def refuse_stateless(objects: Mapping[str, Any]) -> None:
    """`InvalidInputError` for a model, optimizer or scheduler that has no state to save."""
    for name in ("model", "optimizer", "scheduler"):
        value = objects.get(name)
        needed = ("state_dict", "load_state_dict")
        if value is not None and not all(callable(getattr(value, n, None)) for n in needed):
            raise InvalidInputError(
                f"{name}: {type(value).__qualname__} has no state_dict and load_state_dict; of"
                " several, watch one object whose two methods hold them all"
            )


def checkpoint(loaded: Loaded) -> dict[str, Any]:
    """What `CheckpointManager.load_checkpoint` gives, with the documented keys."""
    parts = {
        "model": loaded.model,
        "weights": weights(loaded),
        "config": loaded.config,
        "data_state": None if loaded.data is None else {"snapshot": loaded.data.to_frame()},
    }
    names = {"data_state": "data"}
    answer: dict[str, Any] = {
        **parts,
        "rng_state": loaded.rng_state,
        "loaded_components": {names.get(k, k) for k, v in parts.items() if v is not None},
        "exp_hash": loaded.state.hash,
    }
    if loaded.loaders:
        answer["dataloader_iteration_state"] = loaded.loaders
    return answer


def nothing(hash: str) -> dict[str, Any]:
    """The answer for a hash that does not exist."""
    parts = dict.fromkeys(("model", "weights", "config", "data_state", "rng_state"))
    return {**parts, "loaded_components": set(), "exp_hash": hash}


def weights(loaded: Loaded) -> dict[str, Any] | None:
    """A weight file as the mapping that it is on disk."""
    file = loaded.file
    if file is None:
        return None
    found: dict[str, Any] = {
        "step": file.step,
        "model_state_dict": file.model_state,
        "timestamp": file.timestamp,
        "exp_hash": file.exp_hash,
        "rng_state": file.rng_state,
        "dataloader_iteration_state": dict(file.loaders) or None,
        "optimizer_state_dict": file.optimizer_state,
        "scheduler_state_dict": file.scheduler_state,
        "metadata": file.metadata,
    }
    return {k: v for k, v in found.items() if v is not None}


def runs(archive: Archive, current: str | None) -> list[dict[str, Any]]:
    """Every hash with its entry, name and notes; last used first."""
    if isinstance(archive, Records):
        words = words_of(archive.repository, archive.namespace)
    else:
        words = {}
    return [run(archive, h, words.get(h, RunWords()), current) for h in archive.hashes()]


def run(archive: Archive, hash: str, words: RunWords, current: str | None) -> dict[str, Any]:
    """One row of `CheckpointManager.list_runs`."""
    state = archive.state(hash)
    newest = next(iter(archive.weights(hash)), None)
    return {
        "hash": hash,
        **{f"{c}_hash": label for c, label in layout.split(hash)._asdict().items()},
        "created": state.created,
        "last_used": last_used(archive, hash, newest),
        "latest_weight_checkpoint": newest.path.rpartition("/")[2] if newest else None,
        "latest_weight_step": newest.step if newest else None,
        "experiment_name": words.name or state.experiment_name,
        "notes": words.notes or "",
        "parent": state.parent,
        "is_current": hash == current,
    }


def last_used(archive: Archive, hash: str, newest: Weights | None) -> str:
    """Local ISO time of the last write under a hash."""
    if isinstance(archive, Records):
        return stamp(archive.last_used(hash) / 1e6)
    return stamp(newest.time / 1e6) if newest else archive.state(hash).created


def info(archive: Archive, hash: str, metrics: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """What `CheckpointManager.get_checkpoint_info` gives of one hash."""
    state = archive.state(hash)
    return {
        "hash": hash,
        "scheme": state.scheme,
        "digests": state.digests.facts(),
        "init_step": state.init_step,
        "parent": state.parent,
        "parent_step": state.step,
        "created": state.created,
        "changed": list(state.changed),
        "steps": sorted({w.step for w in archive.weights(hash)}),
        "metrics": {step: dict(found) for step, found in metrics.items()},
    }
