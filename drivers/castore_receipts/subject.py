"""One receipt under verification: its bytes, what it says, and the receipts it may stand among."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from castore import (
    BackendError,
    FormatError,
    IntegrityError,
    NotFoundError,
    ObjectNotFoundError,
)
from castore_receipts import documents
from castore_receipts.arrays import Array, Tensor, read_safetensors
from castore_receipts.destination import POLICY, RECEIPT
from castore_receipts.links import MISSING, NOT_CHECKED, UNREADABLE, Link
from castore_receipts.sources import Source
from castore_receipts.trace_folder import read_folder
from castore_receipts.traces import MAX_MEMBERS, MAX_TRACES, read_npz
from castore_receipts.validation import FILE, FOLDER, Form, form_of

EVALUATION = "evaluation.npz"


class Family:
    """Receipts by the digest of their content; ``complete``: they are all of their run."""

    def __init__(self, receipts: Iterable[Mapping[str, Any]] = (), complete: bool = False):
        self._receipts = {documents.digest_of(r): r for r in receipts}
        self.complete = complete

    def parent_of(self, receipt: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The receipt that is named as parent, if it is among these."""
        parent = receipt.get("parent")
        named = parent.get("receipt_sha256") if isinstance(parent, Mapping) else None
        return self._receipts.get(named) if isinstance(named, str) else None

    def around(self, receipt: Mapping[str, Any]) -> Family:
        """As much of the family as one receipt is judged by."""
        parent = self.parent_of(receipt)
        return Family([receipt] if parent is None else [receipt, parent], self.complete)


@dataclass(slots=True)
class Subject:
    """What the links are computed from; each file is read once.

    ``receipt`` is empty where ``receipt.json`` could not be read; ``trouble`` says why.
    """

    source: Source
    family: Family = field(default_factory=Family)
    trust: frozenset[str] | None = None
    raw: bytes = b""
    receipt: Mapping[str, Any] = field(default_factory=dict)
    trouble: Link | None = None
    _files: dict[str, bytes | Exception] = field(default_factory=dict)

    @staticmethod
    def read(source: Source, trust: frozenset[str] | None = None) -> Subject:
        """Read and parse the receipt; what goes wrong is kept as ``trouble``."""
        subject = Subject(source, trust=trust)
        try:
            subject.raw = source.read(RECEIPT)
            subject.receipt = documents.parse(subject.raw, f"{source.name}/{RECEIPT}")
        except (NotFoundError, FormatError, IntegrityError, BackendError) as e:
            subject.trouble = told("receipt", e)
        return subject

    @property
    def ours(self) -> bool:
        return documents.is_ours(self.receipt)

    @property
    def final(self) -> bool:
        """Whether it tells of a final evaluation, which has no weights of its own."""
        return self.receipt.get("role") == "final"

    @property
    def evaluated(self) -> str:
        """The file that holds the traces."""
        if self.final:
            return EVALUATION
        return FILE if self.form == "npz" else FOLDER

    @property
    def form(self) -> Form:
        """How the traces of a validation are stored; `FormatError` where that is not known."""
        return form_of(self.receipt)

    def file(self, name: str) -> bytes:
        """The bytes of a file beside the receipt; the same error each time if it has none."""
        if name not in self._files:
            try:
                self._files[name] = self.source.read(name)
            except (NotFoundError, FormatError, IntegrityError, BackendError) as e:
                self._files[name] = e
        found = self._files[name]
        if isinstance(found, Exception):
            raise found
        return found

    def tensors(self) -> Mapping[str, Tensor]:
        where = f"{self.source.name}/{POLICY}"
        return read_safetensors(self.file(POLICY), where).tensors

    def traces(self) -> dict[str, Array]:
        where = f"{self.source.name}/{self.evaluated}"
        if self.evaluated == FOLDER:
            return read_folder(self.folder(FOLDER), where)
        return read_npz(self.file(self.evaluated), where)

    def folder(self, name: str) -> dict[str, bytes]:
        """The files of a folder beside the receipt, by relative path.

        Raises
        ------
        ObjectNotFoundError
            It holds none.
        FormatError
            It holds more, or more bytes, than trajectories that are read.
        """
        sizes = self.source.sizes(name)
        where = f"{self.source.name}/{name}"
        if not sizes:
            raise ObjectNotFoundError(f"{where} is not there, or holds no file")
        if len(sizes) > MAX_MEMBERS or sum(sizes.values()) > MAX_TRACES:
            raise FormatError(
                f"{where}: {len(sizes)} files of {sum(sizes.values())} bytes, at most"
                f" {MAX_MEMBERS} and {MAX_TRACES} are read"
            )
        return {path: self.file(f"{name}/{path}") for path in sizes}


def told(name: str, error: Exception) -> Link:
    """An error as a verdict: the store said it is not there, or it could not be read."""
    return Link(name, MISSING if isinstance(error, NotFoundError) else UNREADABLE, str(error))


def absent(subject: Subject, field_name: str, link: str) -> Link | None:
    """The verdict on a field that is not there; None where it is.

    Ours promise it, so it is missing; a foreign receipt need not have it.
    """
    if field_name in subject.receipt:
        return None
    if subject.trouble is not None:
        return Link(link, NOT_CHECKED, "there is no readable receipt to compare with")
    verdict = MISSING if subject.ours else NOT_CHECKED
    return Link(link, verdict, f"the receipt has no {field_name!r}")
