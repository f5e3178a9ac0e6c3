"""Canonical JSON: the one spelling of every document castore stores.

UTF-8, sorted keys, no spaces, finite numbers, one newline at the end, ``kind`` and ``format`` in
each document. A document that is spelled differently is refused, so equal content is equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from castore.errors import FormatError

FORMAT = 1
T = TypeVar("T")


def encode(kind: str, body: dict[str, Any]) -> bytes:
    """Canonical bytes of a document; ValueError for a number that is not finite."""
    document = {"kind": kind, "format": FORMAT, **body}
    text = json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode() + b"\n"


def decode(data: bytes, kind: str, keys: Iterable[str], where: str) -> dict[str, Any]:
    """The document in ``data``, whose keys beside ``kind`` and ``format`` must be ``keys``.

    Raises
    ------
    FormatError
        Not canonical, another kind, a newer format, or a missing or unknown key.
    """
    try:
        document = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{where}: not a JSON document: {e or type(e).__name__}") from e
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise FormatError(f"{where}: expected a document of kind {kind!r}")
    version = document.get("format")
    if type(version) is not int or version != FORMAT:
        raise FormatError(
            f"{where}: format {version!r} of {kind!r}, this castore reads {FORMAT}: upgrade castore"
        )
    wanted = {"kind", "format", *keys}
    if document.keys() != wanted:
        odd = ", ".join(sorted(document.keys() ^ wanted))
        raise FormatError(f"{where}: missing or unknown keys in {kind!r}: {odd}")
    body = {k: v for k, v in document.items() if k not in ("kind", "format")}
    try:
        canonical = encode(kind, body)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{where}: {e}") from e
    if canonical != data:
        raise FormatError(f"{where}: not in canonical form (another program wrote it?)")
    return body


def parsed(build: Callable[[], T], where: str) -> T:
    """``build()``, with any slip over a wrong type or value told as `FormatError` at ``where``."""
    try:
        return build()
    except FormatError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as e:
        raise FormatError(f"{where}: malformed: {e}") from e


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a finite number")
