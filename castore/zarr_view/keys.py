"""What both stores need of zarr's keys and byte requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest

NODE = "zarr.json"
"""The last element of the key of a node's metadata."""


def span(request: ByteRequest | None, size: int) -> tuple[int, int]:
    """The range of ``size`` bytes that is asked for; ``start <= stop <= size``.

    Raises
    ------
    ValueError
        It is none of zarr's requests.
    """
    if request is None:
        return 0, size
    if isinstance(request, RangeByteRequest):
        start, stop = request.start, request.end
    elif isinstance(request, OffsetByteRequest):
        start, stop = request.offset, size
    elif isinstance(request, SuffixByteRequest):
        start, stop = size - request.suffix, size
    else:
        raise ValueError(f"Unexpected byte_range, got {request!r}: expected a request of zarr's")
    stop = max(0, min(stop, size))
    return max(0, min(start, stop)), stop


def folder(prefix: str) -> str:
    """``prefix`` as the beginning of the keys below it."""
    bare = prefix.strip("/")
    return f"{bare}/" if bare else ""


def children(keys: Iterable[str], prefix: str) -> list[str]:
    """The first elements of ``keys`` below ``prefix``, sorted."""
    head = folder(prefix)
    return sorted({k[len(head) :].partition("/")[0] for k in keys if k.startswith(head)})
