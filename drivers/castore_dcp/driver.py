"""The driver: a checkpoint's files as a folder and back, and what its description promises."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from castore import (
    CastoreError,
    Draft,
    File,
    IntegrityError,
    LayoutError,
    NotFoundError,
    Repository,
    SnapshotName,
    scan,
)
from castore_dcp import find
from castore_dcp.layout import Item, Layout
from castore_dcp.names import DRIVER, METADATA


class DcpDriver:
    """See docs/layouts/dcp.md."""

    name = DRIVER

    def collect(self, root: str | os.PathLike[str]) -> Iterator[Draft]:
        """The checkpoint in a folder; `LayoutError` without a readable ``dcp.json``."""
        path = Path(root) / METADATA
        try:
            layout = Layout.decode(path.read_bytes(), str(path))
        except (OSError, ValueError) as e:
            raise LayoutError(f"{os.fspath(root)} holds no distributed checkpoint: {e}") from e
        entries = scan([root])
        for file in sorted({i.file for i in layout.items} - entries.keys()):
            raise LayoutError(f"{path} names {file!r}, which is not there")
        yield Draft(entries, DRIVER, "checkpoint")

    def materialize(
        self, repository: Repository, snapshot: SnapshotName, target: str | os.PathLike[str]
    ) -> None:
        """Write a checkpoint's files into a folder."""
        repository.checkout(snapshot, target)

    def verify(self, repository: Repository, snapshot: SnapshotName) -> Iterator[tuple[str, str]]:
        """Read everything; gives path and defect of each broken promise.

        Promised are every file's SHA-256, and that each item of ``dcp.json`` is a tensor of the
        safetensors file it names, to the byte.
        """
        tree = repository.tree(snapshot)
        for path, file in tree.files():
            yield from _unlike(repository, path, file)
        try:
            found = find.read(repository, snapshot)
        except (LayoutError, NotFoundError, IntegrityError, ValueError) as e:
            yield METADATA, str(e)
            return
        for path in sorted({i.file for i in found.layout.items}):
            items = [i for i in found.layout.items if i.file == path]
            try:
                yield from _misplaced(repository, found.file(path), items)
            except (CastoreError, ValueError, KeyError, TypeError, struct.error) as e:
                yield path, f"no safetensors file as described: {e}"


def _unlike(repository: Repository, path: str, file: File) -> Iterator[tuple[str, str]]:
    sha = hashlib.sha256()
    try:
        for part in repository.read_file(file):
            sha.update(part)
    except (IntegrityError, NotFoundError) as e:
        yield path, str(e)
        return
    if sha.hexdigest() != file.sha256:
        yield path, f"SHA-256 {sha.hexdigest()}, the tree says {file.sha256}"


def _misplaced(repository: Repository, file: File, items: list[Item]) -> Iterator[tuple[str, str]]:
    size = struct.unpack("<Q", b"".join(repository.read_file(file, 0, 8)))[0]
    if size > file.size - 8:
        raise ValueError(f"a header of {size} bytes in a file of {file.size}")
    header = json.loads(b"".join(repository.read_file(file, 8, 8 + size)))
    ranges = sorted((8 + size + a, 8 + size + b) for a, b in _offsets(header))
    if ranges != sorted((i.start, i.stop) for i in items):
        yield items[0].file, f"its tensors are not the items that {METADATA} lists"


def _offsets(header: dict[str, dict[str, tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    return (e["data_offsets"] for k, e in header.items() if k != "__metadata__")
