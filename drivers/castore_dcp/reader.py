"""`CastoreReader`: a snapshot as ``torch.distributed.checkpoint`` loads it.

Whoever loads may be fewer or more ranks than saved. A rank reads the blobs that hold what its
plan asks for, and no others; each is verified before a byte of it reaches a tensor.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from castore import InvalidInputError, LayoutError, Repository, SnapshotName
from castore_dcp import find
from castore_dcp.find import Found
from castore_dcp.layout import SIZES, Numbers, TensorEntry
from castore_dcp.metadata import named, to_metadata
from castore_dcp.names import Checkpoint, at_step, is_id, parse_id
from castore_dcp.pickles import rewritten
from castore_dcp.ranges import Need, Run, box, runs
from castore_dcp.writer import opened

_AT_ONCE = 8  # runs in flight, so at most half a GiB beside tensors that are larger


@dataclass(frozen=True, slots=True)
class Chosen:
    """The snapshot the coordinator read, and the SHA-256 of its description."""

    name: SnapshotName
    document: str


class CastoreReader(StorageReader):
    """Loads distributed checkpoints from a repository.

    Parameters
    ----------
    repository : Repository, str or path
        A store that every rank reaches.
    namespace : str
        Where the checkpoints are listed.
    snapshot : str
        ``latest``, or an id or its prefix (4 characters or more). All ranks load one snapshot:
        where ``latest`` moved on between two ranks' looks, the coordinator's.
    step : int, optional
        The newest checkpoint of this step instead. So does a ``checkpoint_id`` given to ``load``.
    storage_options : dict, optional
        For a URL: passed to the fsspec file system.
    trust_pickles : bool
        Give values that are no tensors to torch's planner as they were stored. It unpickles
        whatever they hold, so only for checkpoints of people you trust.
    """

    def __init__(
        self,
        repository: Repository | str | os.PathLike[str],
        namespace: str = "main",
        snapshot: str = "latest",
        *,
        step: int | None = None,
        storage_options: dict[str, Any] | None = None,
        trust_pickles: bool = False,
    ):
        self.repository = opened(repository, storage_options)
        self.namespace = namespace
        if step is not None and snapshot != "latest":
            raise InvalidInputError(f"step {step} and snapshot {snapshot!r}: give one of them")
        self._default: Checkpoint | str = snapshot if step is None else at_step(step)
        self._wanted = self._default
        self._trust = trust_pickles
        self._found: Found | None = None

    @property
    def snapshot(self) -> SnapshotName | None:
        """What was loaded, once it is known."""
        return None if self._found is None else self._found.name

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint that is being loaded, for torch's logs."""
        return str(self._wanted)

    # -- what torch calls, in this order

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `names.parse_id` takes it."""
        return is_id(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins: of the id's step or name, else of the reader's own snapshot."""
        self._wanted = self._default if checkpoint_id is None else parse_id(checkpoint_id)
        self._found = None

    # Not named ``kwargs``: torch would take that for per-rank metadata, and ask once more.
    def read_metadata(self, *args: Any, **others: Any) -> Metadata:
        """The checkpoint's description, from JSON: nothing is unpickled.

        Raises
        ------
        SnapshotNotFoundError
            No such checkpoint.
        LayoutError, FormatError
            The snapshot holds none, or one of a newer format.
        IntegrityError, ObjectNotFoundError, BackendError
        """
        name = find.resolve(self.repository, self.namespace, self._wanted)
        self._found = find.read(self.repository, name)
        metadata = to_metadata(self._found.layout)
        metadata.storage_meta = StorageMeta(checkpoint_id=str(name))
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up: `read_metadata` found all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Says which snapshot this rank planned with."""
        return replace(plan, storage_data=self._chosen())

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """One snapshot for all ranks: the coordinator's.

        Raises
        ------
        InvalidInputError
            Ranks planned with checkpoints that are laid out differently.
        """
        chosen = self._chosen()
        for rank, plan in enumerate(plans):
            if plan.storage_data is not None and plan.storage_data.document != chosen.document:
                raise InvalidInputError(
                    f"rank {rank} found {plan.storage_data.name}, the coordinator {chosen.name},"
                    " and they are laid out differently (was one saved meanwhile?): load again, or"
                    " name a step or snapshot"
                )
        return [replace(plan, storage_data=chosen) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for.

        Raises
        ------
        CorruptObjectError, ObjectNotFoundError
            A blob is damaged or lost; nothing of it was used.
        UntrustedPickleError
            A value needs a full unpickling.
        """
        found = self._of_plan(plan)
        needs = [self._need(found, item) for item in plan.items]
        for run, data in self._read(found, runs(needs)):
            for need in run.needs:
                self._deliver(found, need, memoryview(data)[need.start - run.start :], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # -- within

    def _planned(self) -> Found:
        if self._found is None:
            self.read_metadata()
        assert self._found is not None
        return self._found

    def _chosen(self) -> Chosen:
        found = self._planned()
        return Chosen(found.name, found.document)

    def _of_plan(self, plan: LoadPlan) -> Found:
        """The coordinator's snapshot: laid out as this rank's, so the plan holds for it."""
        found, chosen = self._planned(), plan.storage_data
        if isinstance(chosen, Chosen) and chosen.name != found.name:
            found = self._found = find.read(self.repository, chosen.name)
        return found

    def _need(self, found: Found, item: ReadItem) -> Need[ReadItem]:
        place = found.items[item.storage_index.fqn, _offsets(item)]
        if item.type == LoadItemType.BYTE_IO:
            return Need(place.file, place.start, place.stop, item)
        entry, sizes = self._chunk(found, item)
        first, stop, *_ = box(sizes, item.storage_offsets, item.lengths)
        width = SIZES[entry.dtype]
        return Need(place.file, place.start + first * width, place.start + stop * width, item)

    def _read(
        self, found: Found, wanted: list[Run[ReadItem]]
    ) -> Iterator[tuple[Run[ReadItem], bytearray]]:
        width = min(self.repository.backend.parallel, _AT_ONCE)
        with ThreadPoolExecutor(width) as pool:
            for i in range(0, len(wanted), width):
                some = wanted[i : i + width]
                yield from zip(some, pool.map(lambda r: self._bytes(found, r), some), strict=True)

    def _bytes(self, found: Found, run: Run[ReadItem]) -> bytearray:
        data = bytearray(run.stop - run.start)
        at = 0
        for part in self.repository.read_file(found.file(run.file), run.start, run.stop):
            data[at : at + len(part)] = part
            at += len(part)
        if at != len(data):
            raise LayoutError(f"{found.name}:{run.file} ends before what its description says")
        return data

    def _deliver(
        self, found: Found, need: Need[ReadItem], data: memoryview, planner: LoadPlanner
    ) -> None:
        item, size = need.what, need.stop - need.start
        if item.type == LoadItemType.BYTE_IO:
            raw, where = bytes(data[:size]), f"{found.name}:{need.file}"
            value = io.BytesIO(raw)
            if not self._trust:
                value = rewritten(raw, item.storage_index.fqn, where)
            planner.load_bytes(item, value)
            return
        tensor = self._tensor(found, item, data[:size])
        target = planner.resolve_tensor(item).detach()
        if target.size() != tensor.size():
            raise InvalidInputError(
                f"{item.storage_index.fqn!r}: the checkpoint gives {tuple(tensor.size())}, the"
                f" planner's tensor is {tuple(target.size())}"
            )
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _tensor(self, found: Found, item: ReadItem, data: memoryview) -> Tensor:
        entry, sizes = self._chunk(found, item)
        dtype = named(entry.dtype, torch.dtype)
        if not data:
            return torch.empty(item.lengths, dtype=dtype)
        _, _, *strides = box(sizes, item.storage_offsets, item.lengths)
        elements = torch.frombuffer(data, dtype=torch.uint8)
        if elements.data_ptr() % SIZES[entry.dtype]:
            elements = elements.clone()  # torch may crash on what a description puts unaligned
        return elements.view(dtype).as_strided(item.lengths, strides)

    def _chunk(self, found: Found, item: ReadItem) -> tuple[TensorEntry, Numbers]:
        return found.chunks[item.storage_index.fqn, _offsets(item)]


def _offsets(item: ReadItem) -> Numbers | None:
    offset = item.storage_index.offset
    return None if offset is None else tuple(offset)
