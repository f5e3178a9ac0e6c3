"""Where a run's receipts go: snapshots in a repository first, then folders that anyone can read."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from castore import (
    AlreadyExistsError,
    Draft,
    InvalidInputError,
    MemoryFile,
    NotFoundError,
    Repository,
    RepositoryNotFoundError,
    SnapshotName,
)
from castore.backend import MAX_OBJECT, Backend
from castore.backends import open_backend

DRIVER = "receipts"
RECEIPT = "receipt.json"
POLICY = "policy.safetensors"
NORMALIZER = "normalizer.safetensors"
TRAINING = "training.safetensors"
REPLAY = "replay.safetensors"
CHECKPOINTS = "checkpoints"
STATE = "state"
FINAL = "final"
FAILURES = "failures"
OWN_REPOSITORY = ".castore"


def step_name(step: int) -> str:
    return f"step_{step:07d}"


def checkpoint_folder(step: int) -> str:
    return f"{CHECKPOINTS}/{step_name(step)}"


def checkpoint_key(step: int) -> str:
    return f"receipt.{step_name(step)}"


@dataclass(frozen=True, slots=True)
class Folder:
    """One thing to publish: ``files`` lie in ``path``; ``hidden`` ones in the repository only."""

    path: str
    key: str
    files: Mapping[str, bytes]
    hidden: Mapping[str, bytes]
    facts: Mapping[str, Any]


class Destination:
    """A place for receipts: a local folder or any fsspec URL, and the repository that backs it."""

    def __init__(self, backend: Backend, repository: Repository, namespace: str):
        self.backend, self.repository, self.namespace = backend, repository, namespace

    def __repr__(self) -> str:
        return f"Destination({self.backend.url!r})"

    @staticmethod
    def open(
        url: str | os.PathLike[str],
        repository: str | os.PathLike[str] | None = None,
        namespace: str | None = None,
        storage_options: dict[str, Any] | None = None,
        make: bool = True,
    ) -> Destination:
        """The destination at ``url``.

        The repository is the one named, else ``CASTORE_REPOSITORY``, else ``<url>/.castore``;
        with ``make`` one that is not there is made. ``storage_options`` go to all of them.

        Raises
        ------
        RepositoryNotFoundError
            There is none and ``make`` is false.
        BackendError
            A store cannot be reached.
        """
        backend = open_backend(url, storage_options)
        inside = f"{_address(backend)}/{OWN_REPOSITORY}"
        chosen = os.fspath(repository or os.environ.get("CASTORE_REPOSITORY") or inside)
        if make and backend.kind == "local":
            os.makedirs(backend.url, exist_ok=True)
        opened = _repository(chosen, storage_options, make)
        return Destination(backend, opened, namespace or _namespace(backend, chosen == inside))

    # -- looking

    def refuse_taken(self, folder: str) -> None:
        """`AlreadyExistsError` where ``folder`` is there, a link too: it is never overwritten."""
        there = next(iter(self.backend.list(folder, limit=1)), None) is not None
        if self.backend.kind == "local":
            there = there or os.path.lexists(f"{self.backend.url}/{folder}")
        if there:
            raise AlreadyExistsError(
                f"{self.backend.url}/{folder} exists already and is never overwritten: give this"
                " run a destination of its own, or resume from its newest receipt"
            )

    def snapshots(self, prefix: str = "receipt.") -> Iterator[SnapshotName]:
        """This destination's snapshots whose key begins with ``prefix``, newest first."""
        for name in self.repository.snapshots(self.namespace):
            if name.key.startswith(prefix):
                yield name

    def newest(self) -> SnapshotName | None:
        """The snapshot of the newest receipt."""
        return next(self.snapshots(), None)

    def snapshot_of(self, step: int) -> SnapshotName:
        """The newest snapshot of the receipt of ``step``; `NotFoundError` that lists the steps."""
        wanted = checkpoint_key(step)
        names = list(self.snapshots())
        found = next((n for n in names if n.key == wanted), None)
        if found is None:
            known = (
                ", ".join(sorted({n.key.removeprefix("receipt.step_") for n in names})) or "none"
            )
            raise NotFoundError(
                f"there is no receipt of step {step} in {self.repository.url}"
                f" (namespace {self.namespace}); there are: {known}"
            )
        return found

    # -- writing

    def publish(self, folder: Folder, base: SnapshotName | None, materialize: bool) -> SnapshotName:
        """Commit the folder, then write it with its receipt last.

        Once the commit is done the receipt is safe; a crash before the end leaves no
        ``receipt.json``, and `complete` finishes the folder.
        """
        content = {f"{folder.path}/{n}": d for n, d in folder.files.items()}
        content |= {
            f"{STATE}/{folder.path.split('/')[-1]}/{n}": d for n, d in folder.hidden.items()
        }
        if materialize:
            _refuse_large(folder)
        draft = Draft(
            {path: MemoryFile(data) for path, data in content.items()},
            driver=DRIVER,
            key=folder.key,
            facts=folder.facts,
            parents=(str(base),) if base is not None else (),
            base=self._bases(content, base),
        )
        name = self.repository.commit(draft, namespace=self.namespace).name
        if materialize:
            self.write(folder.path, folder.files)
        return name

    def write(self, path: str, files: Mapping[str, bytes]) -> None:
        """Create the files of a folder, ``receipt.json`` last; what is there must be the same."""
        first = [n for n in files if n != RECEIPT]
        for name in (*first, RECEIPT) if RECEIPT in files else first:
            try:
                self.backend.create(f"{path}/{name}", files[name])
            except AlreadyExistsError:
                if self.backend.get(f"{path}/{name}") != files[name]:
                    raise AlreadyExistsError(
                        f"{self.backend.url}/{path}/{name} holds something else and is never"
                        " overwritten; what was to be written is in the repository"
                    ) from None

    def complete(self) -> None:
        """Write the newest folder of each role if a crash kept it from being finished."""
        for prefix, parent in (("receipt.", f"{CHECKPOINTS}/"), ("final.", f"{FINAL}/evaluation_")):
            newest = next(self.snapshots(prefix), None)
            if newest is not None:
                self._finish(newest, f"{parent}{newest.key.removeprefix(prefix)}")

    def _finish(self, newest: SnapshotName, path: str) -> None:
        there = {s.name for s in self.backend.list(path)}
        if f"{path}/{RECEIPT}" not in there:
            files = self.repository.tree(newest).below(path).files()
            content = {n: b"".join(self.repository.read_file(f)) for n, f in files}
            self.write(path, content)

    def _bases(self, content: Mapping[str, bytes], base: SnapshotName | None) -> dict[str, str]:
        """The file of the same name in the previous snapshot, for each path."""
        if base is None:
            return {}
        earlier = {_within(p): p for p, _ in self.repository.tree(base).files()}
        names = {path: _within(path) for path in content}
        return {p: f"{base}:{earlier[n]}" for p, n in names.items() if n in earlier}


def _within(path: str) -> str:
    """A path less the two folders that name the checkpoint."""
    return path.split("/", 2)[-1]


def _address(backend: Backend) -> str:
    """The URL that opens ``backend`` again."""
    return backend.url.rstrip("/")


def _repository(url: str, options: dict[str, Any] | None, make: bool) -> Repository:
    try:
        return Repository.open(url, storage_options=options)
    except RepositoryNotFoundError:
        if not make:
            raise
        return Repository.init(url, storage_options=options)


def _namespace(backend: Backend, own: bool) -> str:
    """``receipts`` in a repository of one's own; in a shared one the place's name and digest."""
    if own:
        return "receipts"
    last = backend.url.rstrip("/").rpartition("/")[2]
    slug = re.sub(r"[^A-Za-z0-9._=+-]", "-", last).lstrip("._=+-")[:64] or "receipts"
    return f"{slug}-{hashlib.sha256(backend.url.encode()).hexdigest()[:8]}"


def _refuse_large(folder: Folder) -> None:
    for name, data in folder.files.items():
        if len(data) > MAX_OBJECT:
            raise InvalidInputError(
                f"{folder.path}/{name} takes {len(data)} bytes, more than the {MAX_OBJECT} that are"
                " written at once: keep it in the repository only (materialize=False)"
            )
