"""Tensors out of files, a few threads at once, and their digests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

from castore.tensors import ITEMSIZE, TensorFile, TensorInfo
from castore_pools.sources import PIECE, Source

if TYPE_CHECKING:
    from torch import Tensor, dtype

_Key: TypeAlias = tuple[int, str, int, int]

_LARGE = 64 << 10  # bytes: smaller tensors share blobs


def dtype_name(tensor: Tensor) -> str:
    """``float32`` and so on."""
    return str(tensor.dtype).removeprefix("torch.")


def dtype_of(name: str) -> dtype:
    """The torch dtype that is called ``name``."""
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def is_floating(name: str) -> bool:
    """Whether a dtype of this name follows the collection's dtype."""
    return name.startswith(("float", "bfloat"))


def load_tensors(wanted: Iterable[tuple[Source, TensorFile, TensorInfo]]) -> list[Tensor]:
    """Each wanted tensor; those that are one tensor in their file are one storage again.

    Only the bytes of their extents are read, by several threads.
    """
    items = list(wanted)
    spans: dict[_Key, tuple[Source, TensorFile, TensorInfo]] = {}
    for item in items:
        spans.setdefault(_span(item), item)
    parallel = max((source.parallel for source, _, _ in items), default=1)
    buffers: dict[_Key, Tensor] = {}
    small = [key for key, (_, _, info) in spans.items() if 0 < info.extent < _LARGE]
    with ThreadPoolExecutor(parallel) as pool:
        large = [key for key, (_, _, info) in spans.items() if info.extent >= _LARGE]
        jobs = [job for key in large for job in _jobs(spans[key], key, buffers, pool)]
        parts = [small[n::parallel] for n in range(parallel)]
        jobs += [pool.submit(_fill_small, spans, part, buffers) for part in parts]
        for job in jobs:
            job.result()
    return [_as_tensor(buffers.get(_span(item)), item[2]) for item in items]


def _span(item: tuple[Source, TensorFile, TensorInfo]) -> _Key:
    _, file, info = item
    return id(file), info.storage, info.offset, info.extent


def _jobs(
    item: tuple[Source, TensorFile, TensorInfo],
    key: _Key,
    buffers: dict[_Key, Tensor],
    pool: ThreadPoolExecutor,
) -> list[Future[None]]:
    """What fills the buffer of one large span: one job a cut."""
    source, file, info = item
    start, stop = file.range(info)
    cuts = list(source.cuts(start, stop))
    if len(cuts) == 1:
        return [pool.submit(_take, source, start, stop, key, buffers)]
    buffers[key] = buffer = _buffer(stop - start)
    view = _bytes(buffer)
    return [pool.submit(source.fill, a, view[a - start : b - start]) for a, b in cuts]


def _take(source: Source, start: int, stop: int, key: _Key, buffers: dict[_Key, Tensor]) -> None:
    import torch

    taken = source.take(start, stop)
    if taken is not None:
        buffers[key] = torch.frombuffer(taken, dtype=torch.uint8)
        return
    buffers[key] = buffer = _buffer(stop - start)
    source.fill(start, _bytes(buffer))


def _fill_small(
    spans: Mapping[_Key, tuple[Source, TensorFile, TensorInfo]],
    keys: Sequence[_Key],
    buffers: dict[_Key, Tensor],
) -> None:
    """Many small tensors in one job: a job each would cost more than the tensor."""
    for key in keys:
        source, file, info = spans[key]
        start, stop = file.range(info)
        buffers[key] = buffer = _buffer(stop - start)
        source.fill(start, _bytes(buffer))


def load_rows(source: Source, file: TensorFile, info: TensorInfo, start: int, stop: int) -> Tensor:
    """Rows ``[start, stop)`` of a tensor of one dimension or more, reading little else."""
    rows = max(0, min(stop, info.shape[0]) - start)
    shape = (rows, *info.shape[1:])
    skipped = start * info.strides[0] * ITEMSIZE[info.dtype]
    part = TensorInfo(
        info.name, info.dtype, shape, info.strides, info.storage, info.offset + skipped
    )
    return load_tensors([(source, file, part)])[0].contiguous()


def _bytes(flat: Tensor) -> memoryview:
    array: Any = flat.numpy()
    return memoryview(array)


def _buffer(size: int) -> Tensor:
    """Fresh memory; NumPy asks for huge pages, which torch does not: a third of the time."""
    import numpy as np
    import torch

    return torch.from_numpy(np.empty(size, np.uint8))


def _as_tensor(buffer: Tensor | None, info: TensorInfo) -> Tensor:
    import torch

    kind = dtype_of(info.dtype)
    if buffer is None:
        return torch.empty(info.shape, dtype=kind)
    return buffer.view(kind).as_strided(info.shape, info.strides)


def tensor_digest(tensor: Tensor) -> str:
    """BLAKE3-256 of dtype, shape and elements (row-major, little-endian); strides do not matter.

    It is that of a text: ``float32:384,384`` and a newline, then a line for each 16 MiB of the
    elements with their BLAKE3-256 in hex. A repository knows these: docs/layouts/pools.md.
    """
    import torch
    from blake3 import blake3

    pieces: list[str] = []
    if tensor.numel():
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        data = _bytes(flat.view(torch.uint8))
        for start in range(0, len(data), PIECE):
            piece = blake3(data[start : start + PIECE], max_threads=blake3.AUTO)
            pieces.append(piece.hexdigest())
    return digest_of_pieces(dtype_name(tensor), tuple(tensor.shape), pieces)


def digest_of_pieces(dtype: str, shape: tuple[int, ...], pieces: Sequence[str]) -> str:
    """`tensor_digest` from the digests of the pieces."""
    from blake3 import blake3

    lines = [f"{dtype}:{','.join(map(str, shape))}", *pieces]
    return str(blake3("".join(f"{line}\n" for line in lines).encode()).hexdigest())


def value_digest(value: Any) -> str:
    """`tensor_digest`, or for a plain value the BLAKE3-256 of its canonical JSON."""
    from blake3 import blake3

    if hasattr(value, "numel"):
        return tensor_digest(value)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)
    return str(blake3(b"value:" + text.encode()).hexdigest())


def state_digest(digests: Mapping[str, str]) -> str:
    """One digest for a state dict, from those of its keys; their order does not matter."""
    from blake3 import blake3

    text = "".join(f"{d} {json.dumps(k)}\n" for k, d in sorted(digests.items()))
    return str(blake3(text.encode()).hexdigest())


def digest_state(state: Mapping[str, Any]) -> str:
    """`state_digest` of a state dict at hand."""
    return state_digest({k: value_digest(v) for k, v in state.items()})
