"""Torch tensors as `Tensor`: contiguous, on the CPU, whatever their dtype, strides or device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from castore import InvalidInputError
from castore_receipts.arrays import BITS, Tensor, first_nonfinite

if TYPE_CHECKING:
    import torch

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "complex64": "C64",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


def from_torch(value: torch.Tensor, name: str) -> Tensor:
    """The visible elements of a tensor; a view and its clone give the same.

    Raises
    ------
    InvalidInputError
        A sparse, quantised or meta tensor, or a dtype that safetensors does not have, by name.
    """
    import torch

    dtype = _DTYPES.get(str(value.dtype).removeprefix("torch."))
    if dtype is None or value.layout != torch.strided or value.device.type == "meta":
        raise InvalidInputError(
            f"{name} is a {value.dtype} tensor ({value.layout}, on {value.device}): safetensors"
            " cannot hold it; nothing was published"
        )
    flat = value.detach().resolve_conj().resolve_neg().to("cpu").reshape(-1)
    if flat.numel() and flat.stride(0) != 1:  # one element of a wider layout counts as contiguous
        flat = flat.new_empty(flat.numel()).copy_(flat)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    assert len(data) * 8 == flat.numel() * BITS[dtype]
    return Tensor(dtype, tuple(value.shape), data)


def to_torch(held: Tensor) -> torch.Tensor:
    """A tensor of its own memory with the content of ``held``."""
    import torch

    named = {safe: name for name, safe in _DTYPES.items()}
    dtype = getattr(torch, named[held.dtype])
    if not held.nbytes:
        return torch.empty(held.shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(held.data), dtype=torch.uint8)
    return raw.view(dtype).reshape(held.shape)


def state_of(module_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state dict as tensors; an entry that is no tensor is refused by name."""
    import torch

    held: dict[str, Tensor] = {}
    for name, value in module_state.items():
        if not isinstance(value, torch.Tensor):
            raise InvalidInputError(
                f"{name} in the policy's state is a {type(value).__name__}, not a tensor: it"
                " cannot be stored without pickle; keep it out of the state dict"
            )
        held[name] = from_torch(value, name)
    return held


def assert_finite(tensors: Mapping[str, Tensor], what: str) -> None:
    """`InvalidInputError` with the first bad tensor's name, count, index and value."""
    bad = first_nonfinite(tensors)
    if bad is not None:
        raise InvalidInputError(f"non-finite {what} tensor {bad}; nothing was published")
