"""Scheme ``weightslab-2``: the segment values of WeightsLab 2.0.3, for roots it wrote.

Only to go on with hashes that stand already. The values are weak: the model's sizes do not count,
and unlike data states can have one digest. Every function gives the full SHA-256 as 64 hex
characters, of which the label is the first 8. Checked against values a real run wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from castore import InvalidInputError

if TYPE_CHECKING:
    from torch.nn import Module

    from castore_experiments.samples import DataState

_KEPT_OUT = ("is_training", "pause_at_step", "experiment_name")
_TRACKERS = ("train_dataset_tracker", "eval_dataset_tracker")


def hp_digest(config: Mapping[Any, Any]) -> str:
    """SHA-256 of the JSON of ``config`` without its run switches and name, keys sorted.

    ``auditor_mode: false`` is added where it is absent. ``root_log_dir`` counts, so a root that
    moved starts a new HP segment, as it does in that tool.

    Raises
    ------
    InvalidInputError
        It cannot be written as JSON (keys of several types), where that tool's value is constant,
        or holds an object whose text has its address.
    """
    counted = {k: v for k, v in config.items() if k not in _KEPT_OUT}
    counted.setdefault("auditor_mode", False)
    try:
        text = json.dumps(counted, sort_keys=True, default=_text)
    except (TypeError, ValueError, RecursionError) as e:
        raise InvalidInputError(
            f"configuration: scheme weightslab-2 has no value for it ({e}): use text for its keys, "
            "or a new root, whose scheme castore-1 takes them"
        ) from e
    return sha256(text.encode()).hexdigest()


def _text(value: object) -> str:
    """What that tool makes of a value that JSON lacks; of the orders of a set, the sorted one."""
    if isinstance(value, set | frozenset):
        inner = f"{{{', '.join(sorted(map(repr, value)))}}}" if value else ""
        return inner if type(value) is set and value else f"{type(value).__name__}({inner})"
    text = str(value)
    if re.search(r"\bat 0x[0-9a-fA-F]+", text):
        raise TypeError(f"the text of a {type(value).__name__} has its address in memory")
    return text


def model_digest(model: object, init_step: int = 0) -> str:
    """SHA-256 of the sorted names and classes of the model's modules, and ``init_step``.

    Where ``model`` has a ``model`` of its own, that one counts.
    """
    inner: Any = getattr(model, "model", None)
    module: Any = model if inner is None else inner
    if not hasattr(module, "named_modules"):
        raise InvalidInputError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    lines = [f"class:{type(module).__name__}", f"init_step:{int(init_step)}", *_modules(module)]
    return sha256("|".join(sorted(lines)).encode()).hexdigest()


def _modules(module: Module) -> Iterator[str]:
    for name, child in module.named_modules():
        if not name or any(tracker in name for tracker in _TRACKERS):
            continue
        line = f"{name}:{type(child).__name__}"
        if hasattr(child, "in_neurons") and hasattr(child, "out_neurons"):
            line += f"_in{child.in_neurons}_out{child.out_neurons}"
        ages = getattr(child, "operation_age", None)
        if isinstance(ages, dict):
            line += "".join(f"_{operation}->{age}" for operation, age in ages.items())
        yield line


def data_digest(state: DataState, *, tags: bool = False) -> str:
    """SHA-256 of the samples in the order of their ids, each with its discard mark and its tags.

    Parameters
    ----------
    state : DataState
        Samples, discards, tags.
    tags : bool
        False (what that tool's running data frame amounts to): tags do not count. True: the names
        of each sample's tags count; of a tag with values, the name.
    """
    names = state.tag_lists() if tags else [()] * len(state)
    rows = zip(state.ids_text(), state.discarded.tolist(), names, strict=True)
    text = "|".join(f"{i}:d{int(out)}:t{','.join(sorted(t))}" for i, out, t in rows)
    return sha256(text.encode()).hexdigest()
