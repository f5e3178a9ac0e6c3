"""The running statistics of a `VecNormalize`: kept beside the policy, frozen for evaluation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from castore import FormatError, InvalidInputError
from castore_receipts.arrays import read_safetensors, tensor, write_safetensors
from castore_receipts.policy import Normalizer
from castore_receipts.tensors import assert_finite

_SETTINGS = ("norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon")


def capture(vec_normalize: Any) -> bytes | None:
    """The statistics and settings as a safetensors file; None where there is no normaliser.

    Raises
    ------
    InvalidInputError
        Statistics of dict observations, or not finite.
    """
    if vec_normalize is None:
        return None
    held = {"returns": np.asarray(vec_normalize.returns, np.float64)}
    for name, stats in (("obs", vec_normalize.obs_rms), ("ret", vec_normalize.ret_rms)):
        if isinstance(stats, dict):
            raise InvalidInputError("statistics of dict observations are not stored: flatten them")
        if stats is not None:
            for part in ("mean", "var", "count"):
                held[f"{name}_{part}"] = np.asarray(getattr(stats, part), np.float64)
    tensors = {name: tensor(array, name) for name, array in held.items()}
    assert_finite(tensors, "normaliser")
    settings = {name: getattr(vec_normalize, name) for name in _SETTINGS}
    plain = {n: v if isinstance(v, bool) else float(v) for n, v in settings.items()}
    return write_safetensors(tensors, json.dumps(plain, sort_keys=True, allow_nan=False))


def frozen(data: bytes | None, where: str) -> Normalizer | None:
    """How observations are scaled by what `capture` gave; None where they are not."""
    if data is None:
        return None
    file = read_safetensors(data, where)
    try:
        settings = json.loads(file.metadata["castore"])
        if not settings["norm_obs"]:
            return None
        mean, var = (file.tensors[f"obs_{part}"].numpy() for part in ("mean", "var"))
        return Normalizer(mean, var, float(settings["epsilon"]), float(settings["clip_obs"]))
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(f"{where}: no normaliser's statistics: {e}") from e
