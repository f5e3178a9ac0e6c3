"""How the trajectories of a validation are stored: an ``.npz``, or a folder of zarr arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from castore import FormatError, InvalidInputError
from castore_receipts.arrays import Array
from castore_receipts.record import sha256
from castore_receipts.trace_folder import RULE, digest_of_folder, write_folder
from castore_receipts.traces import write_npz

Form: TypeAlias = Literal["npz", "zarr"]

FILE = "validation.npz"
FOLDER = "validation.zarr"
RULE_FIELD = "validation_sha256_rule"
"""Says that the traces are a folder, and how its digest is computed; not there for an ``.npz``."""


def check_form(form: str) -> Form:
    """``form`` if there is such a one, else `InvalidInputError`."""
    if form == "npz":
        return "npz"
    if form == "zarr":
        return "zarr"
    raise InvalidInputError(f"traces={form!r}: expected 'npz' or 'zarr'")


def form_of(receipt: Mapping[str, Any]) -> Form:
    """How the traces of ``receipt`` are stored; `FormatError` for a rule that is not known."""
    rule = receipt.get(RULE_FIELD)
    if rule is None:
        return "npz"
    if rule != RULE:
        raise FormatError(f"{RULE_FIELD} is {rule!r:.80}, this castore knows {RULE!r}: upgrade it")
    return "zarr"


def pack(traces: Mapping[str, Array], form: Form) -> tuple[dict[str, bytes], dict[str, str]]:
    """The files to store, and the receipt's fields that are their digest."""
    if form == "npz":
        packed = write_npz(traces)
        return {FILE: packed}, {"validation_sha256": sha256(packed)}
    files = write_folder(traces)
    digests = {"validation_sha256": digest_of_folder(files), RULE_FIELD: RULE}
    return {f"{FOLDER}/{path}": data for path, data in files.items()}, digests
