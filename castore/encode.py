"""Which codec and element width to store a blob with: measured on a sample, then tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from castore import frame
from castore.digest import Buffer

Compression = Literal["auto", "none"]

_LEAST_SAMPLE, _MOST_SAMPLE = 8 << 10, 64 << 10
_LEAST_GAIN = 0.95
_DEFAULT_WIDTH = 4
_WIDTH_MUST_WIN = 0.97


@dataclass(frozen=True, slots=True)
class Base:
    """A present object to take the difference to.

    ``proven``: the object that came before is itself a delta that gained much, so another may
    be taken without a sample.
    """

    digest: str
    depth: int
    width: int
    content: Buffer
    proven: bool = False


def encode(content: Buffer, width: int, base: Base | None, compression: Compression) -> frame.Parts:
    """The smallest frame for ``content`` by what a sample says.

    ``width`` is the element width in bytes, or 0 when it is not known. Gives a raw frame where
    the best gains under 5 %.
    """
    if compression == "none" or len(content) < 64:
        return frame.raw(content, max(1, width))
    if base is not None and len(base.content) != len(content):
        base = None
    width = width or (base.width if base else _guess_width(content))
    if len(content) % width:
        width = 1
    if base is not None and (base.proven or _delta_wins(content, base.content, width)):
        parts = frame.delta(content, base.content, base.digest, base.depth, width)
        if sum(map(len, parts)) <= _LEAST_GAIN * len(content):
            return parts
    sample = _sample(content)
    if len(sample) < len(content) and _ratio(sample, width) > _LEAST_GAIN:
        return frame.raw(content, width)
    return frame.packed(content, width)


def _delta_wins(content: Buffer, base: Buffer, width: int) -> bool:
    sample = _sample(content)
    close = frame.difference(sample, _sample(base), width)
    return _ratio(close, width) < min(_ratio(sample, width), _LEAST_GAIN)


def _sample(content: Buffer) -> Buffer:
    """Two stretches, a thirty-second of the content in all, or all of it when it is small; a
    multiple of 8 long.
    """
    n = len(content)
    stretch = min(max(n // 64 & ~7, _LEAST_SAMPLE), _MOST_SAMPLE)
    if n <= 2 * stretch:
        return content
    view = memoryview(content)
    a, b = n // 4 & ~7, n * 3 // 4 & ~7
    return bytes(view[a : a + stretch]) + bytes(view[b : b + stretch])


def _ratio(sample: Buffer, width: int) -> float:
    return len(frame.compress(sample, width)) / len(sample)


def _guess_width(content: Buffer) -> int:
    """The width whose shuffle packs a sample best; 4 unless another wins by 3 %."""
    sample = _sample(content)
    sample = memoryview(sample)[: len(sample) & ~7]
    if not sample:
        return 1
    ratios = {w: _ratio(sample, w) for w in frame.WIDTHS}
    best = min(ratios, key=ratios.__getitem__)
    return best if ratios[best] < _WIDTH_MUST_WIN * ratios[_DEFAULT_WIDTH] else _DEFAULT_WIDTH
