"""The receipts layout as a driver of the store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from os import PathLike

from castore import (
    BackendError,
    Draft,
    LayoutError,
    NotFoundError,
    Repository,
    SnapshotName,
    disk_file,
    scan,
)
from castore.source import SourceEntry
from castore_receipts import destination, documents, validation
from castore_receipts.links import MISSING, UNREADABLE
from castore_receipts.sources import FolderSource, SnapshotSource, sources
from castore_receipts.subject import Family, Subject
from castore_receipts.verify import report

_FILES = (
    *(destination.POLICY, validation.FILE, destination.NORMALIZER, "evaluation.npz"),
    destination.RECEIPT,
)


class ReceiptsDriver:
    """Folders of receipts as snapshots, one each; also those that other programs wrote."""

    name = destination.DRIVER

    def collect(self, root: str | PathLike[str]) -> Iterator[Draft]:
        """A draft for each folder that holds a readable receipt, in the order of steps.

        Raises
        ------
        LayoutError
            There is none, or a receipt cannot be read: what is damaged is not committed.
        """
        try:
            found, _ = sources(root)
        except NotFoundError as e:
            raise LayoutError(f"{os.fspath(root)} holds no receipts: {e}") from e
        for source in found:
            if not isinstance(source, FolderSource):
                raise LayoutError(
                    f"{source.name} is no folder of a receipt: what a repository holds is sent to"
                    " another one with 'castore copy', and a link is not followed"
                )
            yield _draft(os.fspath(root), source)

    def materialize(
        self, repository: Repository, snapshot: SnapshotName, target: str | PathLike[str]
    ) -> None:
        """Write a snapshot's folders, training state included."""
        repository.checkout(snapshot, target)

    def verify(self, repository: Repository, snapshot: SnapshotName) -> Iterator[tuple[str, str]]:
        """Each link that does not hold: the receipt's path, and link, verdict and detail."""
        if snapshot.key.startswith("failed."):
            return
        source = SnapshotSource(repository, snapshot)
        subject = Subject.read(source)
        subject.family = Family([subject.receipt])
        for link in report(subject).problems:
            path = source.name.partition(":")[2]
            yield f"{path}/{destination.RECEIPT}", f"{link.name}: {link.verdict}: {link.detail}"


def _refuse_links(source: FolderSource) -> None:
    """A link in a folder somebody else wrote would bring in any file of this machine."""
    for name in (*_FILES, validation.FOLDER):
        at = f"{source.name}/{name}"
        if os.path.islink(at):
            raise LayoutError(
                f"{at} is a symbolic link, which is not followed: put the file itself there, and"
                " collect again"
            )
    try:
        source.sizes(validation.FOLDER)
    except BackendError as e:
        raise LayoutError(f"{source.name}: {e}") from e


def _draft(root: str, source: FolderSource) -> Draft:
    subject = Subject.read(source)
    receipt = subject.receipt
    if subject.trouble is not None:
        what = {MISSING: "holds no receipt", UNREADABLE: "holds a receipt that cannot be read"}
        raise LayoutError(
            f"{source.name} {what[subject.trouble.verdict]}: {subject.trouble.detail}; move the"
            " folder away, or mend it, and collect again"
        )
    path = os.path.relpath(source.name, os.path.abspath(root))
    inside = path if path != "." else f"{destination.CHECKPOINTS}/{source.folder}"
    _refuse_links(source)
    names = [n for n in _FILES if os.path.lexists(f"{source.name}/{n}")]
    entries: dict[str, SourceEntry] = {n: disk_file(f"{source.name}/{n}") for n in names}
    if os.path.isdir(folder := f"{source.name}/{validation.FOLDER}"):
        entries |= {f"{validation.FOLDER}/{p}": e for p, e in scan([folder]).items()}
    step = receipt.get("step")
    kind = "final" if subject.final else "receipt"
    number = receipt.get("run") if subject.final else step
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise LayoutError(f"{source.name}: the receipt tells no step")
    ours = documents.is_ours(receipt)
    return Draft(
        {f"{inside}/{n}": entry for n, entry in entries.items()},
        driver=destination.DRIVER,
        key=f"final.{number:04d}" if kind == "final" else destination.checkpoint_key(number),
        facts={"step": step, "receipt_sha256": receipt.get("receipt_sha256") if ours else None},
    )
