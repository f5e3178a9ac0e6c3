"""The replay buffer as a safetensors file, cut into blocks of rows.

A block that did not change since the last checkpoint is the same bytes, so it is stored once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from castore import FormatError, InvalidInputError
from castore_receipts.arrays import (
    Array,
    SafetensorsFile,
    Tensor,
    read_safetensors,
    tensor,
    write_safetensors,
)

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

FORMAT = 1
_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
_KNOWN = ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer")
_BLOCK = 64 << 10  # what the store keeps as an object of its own begins here


def check_known(model: BaseAlgorithm) -> None:
    """`InvalidInputError` for a kind of buffer that cannot be stored, by name."""
    kind = type(getattr(model, "replay_buffer", None)).__name__
    if kind not in (*_KNOWN, "NoneType"):
        raise InvalidInputError(
            f"a {kind} cannot be stored: turn replay_buffer off; known are {', '.join(_KNOWN)}"
        )


def capture_replay(model: BaseAlgorithm) -> bytes | None:
    """The filled part of the replay buffer, or None where the algorithm has none.

    Raises
    ------
    InvalidInputError
        A kind of buffer that is not known here, by name.
    """
    buffer = getattr(model, "replay_buffer", None)
    if buffer is None:
        return None
    check_known(model)
    rows = buffer.size()
    tensors: dict[str, Tensor] = {}
    for name, array in _buffer_arrays(buffer):
        filled = (
            array[: min(rows + 1, len(array))] if buffer.optimize_memory_usage else array[:rows]
        )
        for i, block in enumerate(_blocks(filled)):
            tensors[f"{name}/{i:06d}"] = tensor(block, name)
    state = {"format": FORMAT, "class": type(buffer).__name__, "pos": buffer.pos}
    return write_safetensors(tensors, json.dumps({**state, "full": bool(buffer.full)}))


def _buffer_arrays(buffer: Any) -> Iterator[tuple[str, Array]]:
    for name in _ARRAYS:
        value = getattr(buffer, name, None)
        if isinstance(value, np.ndarray):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}/{k}", v) for k, v in value.items())


def _blocks(array: Array) -> Iterator[Array]:
    rows = -(-_BLOCK // max(1, array[:1].nbytes))
    for at in range(0, len(array), rows):
        yield array[at : at + rows]


def restore_replay(model: BaseAlgorithm, data: bytes) -> None:
    """Fill the model's replay buffer with what `capture_replay` gave; strict in names."""
    file = read_safetensors(data, "replay buffer")
    state = state_in(file, "replay buffer")
    buffer: Any = getattr(model, "replay_buffer", None)
    if buffer is None or type(buffer).__name__ != state.get("class"):
        raise InvalidInputError(f"the model has no {state.get('class')}: it was made otherwise")
    used = 0
    for name, array in _buffer_arrays(buffer):
        parts = sorted(n for n in file.tensors if n.rpartition("/")[0] == name)
        used += len(parts)
        _fill(array, [file.tensors[n].numpy() for n in parts], name)
    if used != len(file.tensors):
        raise FormatError("replay buffer: holds arrays that the model's buffer has not")
    buffer.pos, buffer.full = int(state["pos"]), bool(state["full"])


def _fill(array: Array, blocks: list[Array], name: str) -> None:
    at = 0
    for block in blocks:
        if (
            block.shape[1:] != array.shape[1:]
            or block.dtype != array.dtype
            or at + len(block) > len(array)
        ):
            raise InvalidInputError(
                f"replay buffer: {name} holds at least {at + len(block)} rows of"
                f" {block.dtype}{block.shape[1:]}, the model's {len(array)} of"
                f" {array.dtype}{array.shape[1:]}: make the model with the same settings"
            )
        array[at : at + len(block)] = block
        at += len(block)


def state_in(file: SafetensorsFile, where: str) -> dict[str, Any]:
    """The JSON beside the arrays; `FormatError` for none or another format."""
    try:
        state = json.loads(file.metadata["castore"])
    except (KeyError, ValueError, RecursionError) as e:
        raise FormatError(f"{where}: its metadata holds no state: {e}") from e
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise FormatError(f"{where}: format {state!r:.80}, this castore reads {FORMAT}")
    return state
