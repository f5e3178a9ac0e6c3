"""Receipts as bytes: strict JSON in, one canonical spelling out, sealed by a digest of itself.

The layout is written down in ``docs/layouts/receipts.md``. Pure; no I/O.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from castore import FormatError, InvalidInputError

KIND = "castore-receipt"
FORMAT = 1
MAX_RECEIPT = 4 << 20
"""Bytes of the largest receipt that is read or written."""

SEALS = ("receipt_sha256", "signature")
"""The fields that speak about the document, and so are not part of its sealed body."""

_LARGEST = (1 << 63) - 1
_DEEPEST = 60


def canonical(body: Mapping[str, Any]) -> bytes:
    """UTF-8, keys sorted, no spaces, finite numbers, one newline at the end."""
    text = json.dumps(
        body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode() + b"\n"


def sealed_body(receipt: Mapping[str, Any]) -> bytes:
    """The canonical bytes that ``receipt_sha256`` and a signature are taken over."""
    return canonical({k: v for k, v in receipt.items() if k not in SEALS})


def digest_of(receipt: Mapping[str, Any]) -> str:
    """What ``receipt_sha256`` must be."""
    return hashlib.sha256(sealed_body(receipt)).hexdigest()


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
    """``body`` as a receipt of this layout: plain finite values, kind, format and its own digest.

    Raises
    ------
    InvalidInputError
        A value is no JSON or no finite number; the message names the field.
    """
    receipt = {**plain(dict(body), "receipt"), "kind": KIND, "format": FORMAT}
    return {**receipt, "receipt_sha256": digest_of(receipt)}


def encode(receipt: Mapping[str, Any]) -> bytes:
    """The bytes of ``receipt.json``."""
    data = canonical(receipt)
    if len(data) > MAX_RECEIPT:
        raise InvalidInputError(
            f"a receipt of {len(data)} bytes, at most {MAX_RECEIPT}: put what is large into a file"
        )
    return data


def is_ours(receipt: Mapping[str, Any]) -> bool:
    """Whether any mark of this layout is there; a foreign receipt carries none.

    One mark is enough, so that a damaged one does not make a receipt pass as foreign.
    """
    return receipt.get("kind") == KIND or "receipt_sha256" in receipt or "format" in receipt


def plain(value: Any, where: str) -> Any:
    """``value`` with NumPy's scalars, tuples and mappings as plain JSON values.

    Raises
    ------
    InvalidInputError
        Something that JSON cannot say, at ``where``: a number that is not finite, an integer of
        more than 63 bits, a key that is no text, an object of another type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        return int(value) if abs(value) <= _LARGEST else _refuse(value, where, "over 63 bits")
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _refuse(value, where, "not finite")
    if isinstance(value, Mapping):
        return {_key(k, where): plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    return _refuse(value, where, f"a {type(value).__name__}")


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(value, where, "not Unicode")
    return str(value)


def _key(key: Any, where: str) -> str:
    return _text(key, where) if isinstance(key, str) else _refuse(key, where, "a key, not text")


def _refuse(value: Any, where: str, why: str) -> NoReturn:
    # Python refuses to spell integers of more than 4300 digits.
    large = isinstance(value, int) and value.bit_length() > 1000
    shown = f"an integer of {value.bit_length()} bits" if large else ascii(value)[:80]
    raise InvalidInputError(
        f"{where} is {shown} ({why}): a receipt holds finite numbers, text, lists and mappings;"
        " nothing was published"
    )


def parse(data: bytes, where: str) -> dict[str, Any]:
    """The object in strict JSON ``data``.

    Raises
    ------
    FormatError
        Too large, not UTF-8 JSON, a key that stands twice, a number that is not finite, deeper
        than 60 levels, or not an object. The message says where.
    """
    if len(data) > MAX_RECEIPT:
        raise FormatError(f"{where}: {len(data)} bytes, a receipt has at most {MAX_RECEIPT}")
    try:
        text = data.decode()
        document = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{where}: not strict JSON: {_why(e)}") from e
    if not isinstance(document, dict):
        raise FormatError(f"{where}: expected a JSON object, found a {type(document).__name__}")
    if _depth(document) > _DEEPEST:
        raise FormatError(f"{where}: over {_DEEPEST} levels deep")
    try:
        canonical(document)
    except ValueError as e:
        raise FormatError(f"{where}: text that is not Unicode: {_why(e)}") from e
    return document


def _why(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key[:80]!r} stands twice")
        if isinstance(value, _NotFinite):
            raise ValueError(f"the field {key[:80]!r} is {value}, not a finite number")
        result[key] = value
    return result


class _NotFinite(str):
    """A number that is none, kept until the name of its field is known."""

    __slots__ = ()


def _constant(text: str) -> _NotFinite:
    return _NotFinite(text)


def _finite(text: str) -> float | _NotFinite:
    value = float(text)
    return value if math.isfinite(value) else _NotFinite(text)


def _depth(value: Any) -> int:
    deepest, todo = 0, [(value, 1)]
    while todo:
        item, level = todo.pop()
        deepest = max(deepest, level)
        if isinstance(item, dict):
            todo += [(v, level + 1) for v in item.values()]
        elif isinstance(item, list):
            if any(isinstance(v, _NotFinite) for v in item):
                return _no_list()
            todo += [(v, level + 1) for v in item]
    return deepest


def _no_list() -> NoReturn:
    raise FormatError("a list holds a number that is not finite: not strict JSON")
