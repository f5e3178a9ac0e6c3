"""`CastoreWriter`: what ``torch.distributed.checkpoint`` saves, as one snapshot of all ranks.

Each rank commits its files as *parts*, small snapshots in a namespace of their own, so that no
prune takes them; the coordinator then commits one snapshot of all the ranks' files and forgets
the parts. So a checkpoint is there with all ranks or not at all.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from castore import (
    BackendError,
    BaseFile,
    Draft,
    File,
    FormatError,
    IntegrityError,
    InvalidInputError,
    MemoryFile,
    NotFoundError,
    Options,
    Repository,
    Snapshot,
    SnapshotName,
    SnapshotNotFoundError,
)
from castore_dcp import find
from castore_dcp.layout import Item
from castore_dcp.metadata import to_layout
from castore_dcp.names import (
    DRIVER,
    METADATA,
    Checkpoint,
    at_step,
    is_id,
    parse_id,
    parts_of,
    shard_path,
)
from castore_dcp.pickles import plain_value
from castore_dcp.shard import (
    Piece,
    Placed,
    bytes_piece,
    fill,
    grouped,
    is_bytes,
    placed,
    tensor_piece,
)

GIB = 1 << 30
DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Stored:
    """Where an item was put: in ``file`` of the snapshot ``part`` of the repository of that id."""

    item: Item
    file: File
    part: SnapshotName
    repository: str


class CastoreWriter(StorageWriter):
    """Saves distributed checkpoints into a repository. One save at a time for each writer.

    What was saved is durable when ``save`` returns (or the future of ``async_save`` completes);
    when it raises on any rank, no snapshot was made. Pickles without secrets.

    Parameters
    ----------
    repository : Repository, str or path
        The same store on every rank.
    namespace : str
        Where the checkpoints are listed; parts lie in ``<namespace>.parts`` while a save lasts.
    step : int, optional
        The step of saves that are given no ``checkpoint_id``.
    labels : mapping of text to text, optional
        Kept with every snapshot, beside ``step`` or ``checkpoint``.
    previous : str, optional
        The snapshot whose shards the new ones are stored as differences to; ``latest`` is the
        newest of the namespace, None none. A wrong one costs bytes, never correctness.
    storage_options : dict, optional
        For a URL: passed to the fsspec file system; never stored, shown or pickled.
    options : Options
        How to write: see `castore.Options`.
    file_bytes : int
        A rank writes its shard in files of at most this size (or one tensor), one after another,
        and holds one of them in memory.
    keep_bytes : int
        How much of what it wrote last a rank keeps in memory, so that the next save need not
        read it back to take the differences. 0 keeps nothing.
    abandoned_after : float
        Seconds after which parts that no checkpoint took up are forgotten by the next save.
    trust_pickles : bool
        Also save values that only a full unpickling gives back.
    """

    def __init__(
        self,
        repository: Repository | str | os.PathLike[str],
        namespace: str = "main",
        *,
        step: int | None = None,
        labels: Mapping[str, str] | None = None,
        previous: str | None = "latest",
        storage_options: dict[str, Any] | None = None,
        options: Options = Options(),
        file_bytes: int = GIB,
        keep_bytes: int = GIB,
        abandoned_after: float = DAY,
        trust_pickles: bool = False,
    ):
        self.repository = opened(repository, storage_options)
        self.namespace, self._parts = namespace, parts_of(namespace)
        self._labels = dict(labels or {})
        Snapshot("0" * 64, 0, namespace, labels=self._labels).encode()  # refused here, not later
        self._default = self._checkpoint = at_step(step)
        self._previous, self._options = previous, options
        self._file_bytes, self._keep_bytes = file_bytes, keep_bytes
        self._abandoned_after, self._trust = abandoned_after, trust_pickles
        self._rank = 0
        self._earlier: Mapping[str, File] | None = None
        self._kept: dict[str, BaseFile] = {}
        self._snapshot: SnapshotName | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}, "_earlier": None}

    @property
    def snapshot(self) -> SnapshotName | None:
        """What the last save in this process made; None on ranks that do not coordinate."""
        return self._snapshot

    @property
    def checkpoint_id(self) -> str | None:
        """The checkpoint that is being saved, for torch's logs."""
        return None if self._checkpoint == Checkpoint() else str(self._checkpoint)

    # -- what torch calls, in this order

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `names.parse_id` takes it."""
        return is_id(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new checkpoint begins: of the id's step or name, else of the writer's step."""
        self._checkpoint = self._default if checkpoint_id is None else parse_id(checkpoint_id)
        self._earlier = self._snapshot = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Told the rank; without torch's collectives there is no whole to commit.

        Raises
        ------
        InvalidInputError
            ``use_collectives=False``.
        """
        if not kwargs.get("use_collectives", True):
            raise InvalidInputError(
                "use_collectives=False saves each rank on its own: a castore checkpoint is one"
                " snapshot of all ranks; leave it True"
            )
        told = kwargs.get("rank")
        alone = not (dist.is_available() and dist.is_initialized())
        self._rank = int(told) if told is not None else 0 if alone else dist.get_rank()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to plan: each rank writes its own files."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to plan."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Commit this rank's files as parts.

        Raises
        ------
        InvalidInputError, UntrustedPickleError
            Something that cannot be stored, named.
        BackendError
            The store failed.
        """
        results: list[WriteResult] = []
        room = self._keep_bytes
        pieces = self._pieces(plan, planner)
        for number, group in enumerate(grouped(pieces, self._file_bytes)):
            image, places = placed(group)
            for place in places:
                if place.piece.data is None:
                    fill(image, place, _tensor(planner, place.piece))
            path = shard_path(self._rank, number)
            file, part = self._part(path, image)
            results += [self._result(p, path, file, part) for p in places]
            if len(image) <= room:
                room -= len(image)
                self._kept[path] = BaseFile(file, MemoryFile(memoryview(image)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint: one snapshot of all ranks' files; then the parts are forgotten.

        Raises
        ------
        InvalidInputError
            A rank wrote into another repository, or two had one number.
        BackendError, ObjectNotFoundError
            The store failed, or lost a rank's part: there is no checkpoint.
        """
        written = [w for of_rank in results for w in of_rank]
        stored = [self._checked(w.storage_data) for w in written]
        if len({s.item.file for s in stored}) < len({s.part for s in stored}):
            raise InvalidInputError(
                "two ranks wrote files of one name: each must be told its own rank (a class around"
                " the writer must pass set_up_storage_writer's keywords on)"
            )
        metadata.storage_data = {w.index: w.storage_data.item for w in written}
        metadata.storage_meta = self.storage_meta()
        document = MemoryFile(to_layout(metadata).encode())
        draft = Draft(
            {METADATA: document, **{s.item.file: s.file for s in stored}},
            DRIVER,
            self._checkpoint.key,
            labels={**self._labels, **self._checkpoint.labels},
            facts={"ranks": len(results), "torch": str(torch.__version__)},
        )
        made = self.repository.commit(draft, namespace=self.namespace, options=self._options)
        self._snapshot = made.name
        self._forget({s.part for s in stored})

    def storage_meta(self) -> StorageMeta:
        """What planners are told of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # -- within

    def _pieces(self, plan: SavePlan, planner: SavePlanner) -> Iterator[Piece]:
        """Tensors first, so that the length of a value moves none of them to another file."""
        for item in plan.items:
            if not is_bytes(item):
                yield tensor_piece(item)
        for item in plan.items:
            if is_bytes(item):
                value = planner.resolve_data(item)
                if not isinstance(value, io.BytesIO):
                    raise InvalidInputError(f"{item.index.fqn!r}: the planner gave no bytes")
                if not self._trust:
                    plain_value(value.getvalue(), item.index.fqn, "not saved")
                yield bytes_piece(item, value.getvalue())

    def _part(self, path: str, image: bytearray) -> tuple[File, SnapshotName]:
        """Commit one file of this rank; gives it, and the snapshot that holds it."""
        base = self._kept.pop(path, None) or self._files_before().get(path)
        draft = Draft(
            {path: MemoryFile(memoryview(image))},
            key=self._checkpoint.key,
            labels={"part": path, **self._checkpoint.labels},
            base=None if base is None else {path: base},
        )
        made = self.repository.commit(draft, namespace=self._parts, options=self._options)
        file = made.tree.entries[path]
        assert isinstance(file, File)
        return file, made.name

    def _files_before(self) -> Mapping[str, File]:
        """The files of the previous checkpoint; none where there is none or it is damaged."""
        if self._earlier is None:
            self._earlier = {}
            latest = self._previous == "latest"
            name = find.newest(self.repository, self.namespace) if latest else self._previous
            try:
                self._earlier = dict(self.repository.tree(name).files()) if name else {}
            except SnapshotNotFoundError:
                if not latest:
                    raise
            except (NotFoundError, IntegrityError, FormatError):
                pass  # a base is a hint: what is damaged is not written against
        return self._earlier

    def _result(self, place: Placed, path: str, file: File, part: SnapshotName) -> WriteResult:
        index = place.piece.item.index
        offsets = None if index.offset is None else tuple(index.offset)
        item = Item(index.fqn, offsets, index.index, path, place.start, place.stop)
        stored = Stored(item, file, part, self.repository.id)
        return WriteResult(index, place.stop - place.start, stored)

    def _checked(self, stored: Stored) -> Stored:
        if stored.repository != self.repository.id:
            raise InvalidInputError(
                f"{stored.item.file} was written into another repository ({stored.repository}, the"
                f" coordinator's {self.repository.url} is {self.repository.id}): give every rank"
                " one store that all of them reach"
            )
        return stored

    def _forget(self, mine: Iterable[SnapshotName]) -> None:
        """Forget parts: these, and abandoned ones. The checkpoint stands either way."""
        try:
            before = (self.repository.backend.now() - self._abandoned_after) * 1_000_000
            old = [n for n in self.repository.snapshots(self._parts) if n.time < before]
            with ThreadPoolExecutor(self.repository.backend.parallel) as pool:
                list(pool.map(self._forget_one, {*mine, *old}))
        except BackendError as e:
            logging.getLogger("castore").warning(
                "%s: %s was saved; its parts could not be forgotten and are left to the next save"
                " after they are %d seconds old: %s",
                self.repository.url,
                self._checkpoint,
                self._abandoned_after,
                e,
            )

    def _forget_one(self, part: SnapshotName) -> None:
        try:
            self.repository.forget(part)
        except NotFoundError:
            pass  # another save found it abandoned as well


def _tensor(planner: SavePlanner, piece: Piece) -> torch.Tensor:
    found = planner.resolve_data(piece.item)
    if not isinstance(found, torch.Tensor):
        raise InvalidInputError(f"{piece.name!r}: the planner gave no tensor for a tensor's item")
    return found


def opened(
    repository: Repository | str | os.PathLike[str], storage_options: dict[str, Any] | None
) -> Repository:
    """The repository itself, or the one at a URL."""
    if isinstance(repository, Repository):
        if storage_options is not None:
            raise InvalidInputError("storage_options belong to a URL: the repository is open")
        return repository
    return Repository.open(repository, storage_options=storage_options)
