"""The experiments layout as castore's commands see it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from castore import Draft, LayoutError, Repository, SnapshotName

if TYPE_CHECKING:
    from castore.driver import Shown

_STATE = re.compile(r"[0-9a-f]{24}\.state")
_WEIGHTS = re.compile(r"[0-9a-f]{24}\.step\.[0-9]+")
_RUN = re.compile(r"[0-9a-f]{24}\.run")


class ExperimentsDriver:
    """A root: ``checkpoints/`` with its manifest, models, configurations, data and curves."""

    name = "experiments"

    def collect(self, root: str | PathLike[str]) -> Iterator[Draft]:
        """The states and weight files of a root, oldest first, the latest hash last.

        Curves are rows, not files: ``castore experiments import`` takes those in as well.

        Raises
        ------
        LayoutError
            There is no readable ``checkpoints/manifest.yaml``.
        """
        from castore import FormatError, ObjectNotFoundError
        from castore_experiments.files import open_files
        from castore_experiments.folder import FolderRecords
        from castore_experiments.importer import drafts

        problems: list[str] = []
        try:
            folder = FolderRecords(open_files(root), problems.append)
        except (ObjectNotFoundError, FormatError) as e:
            raise LayoutError(f"{root} is no experiment root: {e}") from e
        yield from drafts(folder, problems.append)
        if problems:
            raise LayoutError(f"{root}: {'; '.join(problems)}")

    def materialize(
        self, repository: Repository, snapshot: SnapshotName, target: str | PathLike[str]
    ) -> None:
        """Write the documented files of a snapshot below ``target``/checkpoints, new ones only.

        ``castore experiments materialize`` writes a whole root, manifest and curves included.
        """
        from castore_experiments.documents import OWN_FILES
        from castore_experiments.files import open_files
        from castore_experiments.layout import in_root

        files = open_files(Path(target))
        for path, file in repository.tree(snapshot).files():
            if path not in OWN_FILES:
                files.create(in_root(path), b"".join(repository.read_file(file)))

    def view(self, repository: Repository, namespace: str) -> Mapping[str, Shown]:
        """The whole root, as if everything were materialised: what ``castore://`` shows."""
        from castore_experiments.shown import root_of

        return root_of(repository, namespace)

    def verify(self, repository: Repository, snapshot: SnapshotName) -> Iterator[tuple[str, str]]:
        """Labels against digests, names against content, rows against what is said of them."""
        from castore_experiments import verify

        if _STATE.fullmatch(snapshot.key):
            yield from verify.verify_state(repository, snapshot)
        elif _WEIGHTS.fullmatch(snapshot.key):
            yield from verify.verify_weights(repository, snapshot)
        elif snapshot.namespace.endswith(".signals"):
            yield from verify.verify_curves(repository, snapshot)
        elif not _RUN.fullmatch(snapshot.key):
            yield snapshot.path, f"{snapshot.key} is no key of the experiments layout"
