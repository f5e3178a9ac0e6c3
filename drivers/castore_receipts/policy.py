"""The frozen adapter: an actor's arrays as NumPy, and its deterministic action. No torch.

Shapes: B observations of O numbers give B actions of A numbers; one observation gives one action.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from castore import FormatError, InvalidInputError
from castore_receipts.arrays import Array, Tensor, arrays_digest

KIND = "sac-actor/1"
_LAYER = re.compile(r"actor\.latent_pi\.(\d+)\.weight")
_ACTIVATIONS = ("relu", "tanh")


class Adapter(Protocol):
    """What is evaluated at a checkpoint instead of the policy in training."""

    def act(self, observation: Array) -> Array:
        """The deterministic action for one observation, or a row for each of a batch."""

    def tensors(self) -> Mapping[str, Tensor]:
        """The arrays it computes with, under their names in ``policy.safetensors``, as there."""

    def describe(self) -> dict[str, Any]:
        """What beside the arrays is needed to build it again, as plain JSON."""


def assert_stored(adapter: Adapter, stored: Mapping[str, Tensor]) -> None:
    """`InvalidInputError` for an array of the adapter that is not what the checkpoint stores.

    Its digest could not be recomputed from ``policy.safetensors``.
    """
    for name, held in adapter.tensors().items():
        if name not in stored or not _same(held, stored[name]):
            raise InvalidInputError(
                f"the adapter's array {name[:80]!r} is not one of the policy's tensors: give from"
                " tensors() what it was made from, under the names of the policy's state dict"
            )


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape, bytes(a.data)) == (b.dtype, b.shape, bytes(b.data))


def numeric_bytes(adapter: Adapter) -> int:
    """Bytes of the adapter's arrays: no runtime, no replay, no allocator overhead."""
    return sum(t.nbytes for t in adapter.tensors().values())


def policy_digest(adapter: Adapter) -> str:
    """The rule ``castore-arrays/1`` over the adapter's arrays."""
    return arrays_digest(adapter.tensors())


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Frozen statistics of observations: clip((x - mean) / sqrt(var + epsilon), -clip, clip)."""

    mean: Array
    var: Array
    epsilon: float
    clip: float

    def __call__(self, observation: Array) -> Array:
        scaled = (observation - self.mean) / np.sqrt(self.var + self.epsilon)
        clipped: Array = np.clip(scaled, -self.clip, self.clip).astype(np.float32)
        return clipped


@dataclass(frozen=True, slots=True)
class ArrayPolicy:
    """The deterministic actor of SAC in NumPy float32.

    ReLU (or tanh) layers, a linear mean that gSDE clips to ``clip_mean``, tanh, and the way from
    [-1, 1] back to the action space: low + (a + 1) (high - low) / 2.
    """

    arrays: Mapping[str, Tensor]
    layers: tuple[tuple[Array, Array], ...]
    mean: tuple[Array, Array]
    low: Array
    high: Array
    activation: str = "relu"
    clip_mean: float = 0.0
    normalizer: Normalizer | None = None

    def act(self, observation: Array) -> Array:
        x = np.asarray(observation)
        if self.normalizer is not None:
            x = self.normalizer(x)
        x = x.astype(np.float32)
        for weight, bias in self.layers:
            x = x @ weight.T + bias
            x = np.maximum(x, 0) if self.activation == "relu" else np.tanh(x)
        weight, bias = self.mean
        x = x @ weight.T + bias
        if self.clip_mean > 0:
            x = np.clip(x, -self.clip_mean, self.clip_mean)
        action: Array = self.low + 0.5 * (np.tanh(x) + 1.0) * (self.high - self.low)
        return action

    def tensors(self) -> Mapping[str, Tensor]:
        return self.arrays

    def describe(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "arrays": sorted(self.arrays),
            "activation": self.activation,
            "clip_mean": self.clip_mean,
            "action_low": [float(v) for v in self.low],
            "action_high": [float(v) for v in self.high],
            "normalizer": self.normalizer is not None,
        }


def actor_names(names: Sequence[str]) -> tuple[list[str], str]:
    """The prefixes of an actor's hidden layers, in order, and of its mean.

    Raises
    ------
    InvalidInputError
        There is no SAC actor of fully connected layers among the names.
    """
    numbers = sorted(int(m[1]) for m in map(_LAYER.fullmatch, names) if m)
    means = [p for p in ("actor.mu.0", "actor.mu") if f"{p}.weight" in names]
    if not means or any(n.startswith("actor.features_extractor.") for n in names):
        raise InvalidInputError(
            "no fully connected SAC actor (actor.latent_pi.*, actor.mu.*) among the tensors: give"
            " the callback an adapter= of your own"
        )
    return [f"actor.latent_pi.{n}" for n in numbers], means[0]


def array_policy(
    tensors: Mapping[str, Tensor], described: Mapping[str, Any], normalizer: Normalizer | None
) -> ArrayPolicy:
    """The adapter that ``describe`` told of, from the tensors of a checkpoint.

    Raises
    ------
    FormatError
        Another kind of adapter, or tensors that do not fit together.
    """
    if described.get("kind") != KIND or described.get("activation") not in _ACTIVATIONS:
        raise FormatError(
            f"adapter {str(described.get('kind'))[:80]!r}: only {KIND!r} is known here"
        )
    try:
        hidden, mean = actor_names(list(tensors))
        pairs = [_layer(tensors, p) for p in [*hidden, mean]]
        low = np.array(described["action_low"], np.float32)
        high = np.array(described["action_high"], np.float32)
        clip = float(described["clip_mean"])
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(f"the adapter cannot be built: {e}") from e
    _check_shapes(pairs, low, high)
    used = {f"{p}.{part}" for p in [*hidden, mean] for part in ("weight", "bias")}
    return ArrayPolicy(
        {n: tensors[n] for n in sorted(used)},
        tuple(pairs[:-1]),
        pairs[-1],
        low,
        high,
        described["activation"],
        clip,
        normalizer,
    )


def _layer(tensors: Mapping[str, Tensor], prefix: str) -> tuple[Array, Array]:
    return tensors[f"{prefix}.weight"].numpy(), tensors[f"{prefix}.bias"].numpy()


def _check_shapes(pairs: Sequence[tuple[Array, Array]], low: Array, high: Array) -> None:
    width = pairs[0][0].shape[-1] if pairs[0][0].ndim == 2 else -1
    for weight, bias in pairs:
        if weight.ndim != 2 or weight.shape[1] != width or bias.shape != weight.shape[:1]:
            raise FormatError(f"layers of the actor do not fit: {weight.shape} after {width}")
        width = weight.shape[0]
    if not low.shape == high.shape == (width,):
        raise FormatError(f"an actor of {width} actions, bounds of {low.shape} and {high.shape}")
