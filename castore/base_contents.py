"""Where the content of a delta's base comes from during a commit: the nearest place that has it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from castore.cut import PIECE, SMALL
from castore.digest import Buffer, digest_of
from castore.errors import BackendError, IntegrityError, InvalidInputError, NotFoundError
from castore.objects import ObjectStore
from castore.pending import Blob
from castore.source import BaseFile, Source

_RECENT = 64 << 20  # bytes of content kept


class BaseContents:
    """Verified contents: kept in memory, read again from a source, or from the repository.

    Parameters
    ----------
    store : ObjectStore
    mine : mapping of digest to Blob
        What this commit reads; it grows meanwhile.
    at_hand : sequence of BaseFile
        Earlier files whose bytes need not be read from the repository.
    """

    def __init__(self, store: ObjectStore, mine: Mapping[str, Blob], at_hand: Sequence[BaseFile]):
        self._store, self._mine = store, mine
        self._at_hand = {d: place for b in at_hand for d, place in _whole_blobs(b)}
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, Buffer] = OrderedDict()
        self._recent_bytes = 0
        self._of_thread = threading.local()

    def keep(self, digest: str, content: Buffer) -> None:
        """Keep it for a while: the next file of the series is likely to be a delta to it."""
        with self._lock:
            self._recent[digest] = content
            self._recent_bytes += len(content)
            while self._recent_bytes > _RECENT:
                _, old = self._recent.popitem(last=False)
                self._recent_bytes -= len(old)

    def get(self, digest: str) -> Buffer | None:
        """The content, valid until this thread's next call; None where nothing sound is found."""
        with self._lock:
            kept = self._recent.get(digest)
        if kept is not None:
            return kept
        mine = self._mine.get(digest)
        if mine is not None:
            content = mine.reread(self._scratch())
            return content if digest_of(content) == digest else None
        try:
            return self._near(digest) or self._store.read(digest)
        except (IntegrityError, NotFoundError):
            return None

    def _scratch(self) -> bytearray:
        """This worker's memory for a base: fresh memory for each costs more than reading it."""
        if not hasattr(self._of_thread, "scratch"):
            self._of_thread.scratch = bytearray(PIECE)
        scratch: bytearray = self._of_thread.scratch
        return scratch

    def _near(self, digest: str) -> Buffer | None:
        place = self._at_hand.get(digest)
        if place is None:
            return None
        try:
            with place[0].open() as reader:
                content = reader.content(place[1], place[2], self._scratch())
        except (BackendError, InvalidInputError):
            return None  # gone or changed meanwhile: the repository has it
        return content if digest_of(content) == digest else None


def _whole_blobs(base: BaseFile) -> Iterator[tuple[str, tuple[Source, int, int]]]:
    """Where in the base's source each blob lies that fills one slice."""
    start = 0
    for slice in base.file.slices:
        if slice.offset == 0 and slice.length >= SMALL:
            yield slice.blob, (base.source, start, start + slice.length)
        start += slice.length
