"""One pass over a loader's sampler: begun, followed, and begun again in the middle.

A pass is what ``iter(loader)`` asks the sampler for. To get back into the middle of one, the
sampler is put to where it stood when the pass began, the random streams it drew from likewise,
and the batches that were handed out are skipped: only their indices are made, nothing is read.
A digest over these indices proves that the order is the same.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from castore import InvalidInputError
from castore_experiments import samplers, streams

_START = "0" * 32
SUPERSEDED = (
    "the position of this data loader was restored while a loop goes through it: leave that loop;"
    " the next one begins at the restored position"
)


class Pass:
    """Iterator over the index batches of one pass; `record` says where it stands.

    Parameters
    ----------
    sampler : iterable
        The caller's own.
    keep : int
        How many batches may be out at the workers; the digests of as many are kept.
    saved : mapping, optional
        A `record` of an earlier pass to go on with; ``skip`` must follow.
    """

    def __init__(self, sampler: Any, keep: int, saved: Mapping[str, Any] | None = None):
        self.sampler = sampler
        self.offset = 0
        self.issued = 0
        self.advanced = self.exhausted = self.superseded = False
        self.draws_global = self.draws_generators = self._skipping = False
        self._trail: deque[tuple[str, int]] = deque([(_START, 0)], maxlen=keep + 2)
        self._torch_only = type(sampler).__module__.startswith("torch.utils.data") and all(
            type(s).__module__.startswith("torch.utils.data") for _, s in samplers.chain(sampler)
        )
        if saved is None:
            self.began = samplers.read(sampler)
            before = streams.now()
            self._inner: Iterator[Any] = iter(sampler)
            self._before = streams.drawn(before)
            self._first: streams.States | None = None
            self._first_generators: dict[str, Any] = {}
        else:
            self._resume(saved)
        self._generators = samplers.generators(sampler)
        self._after: dict[str, Any] = {}
        self._prepared: dict[str, Any] | None = None
        self._globals: Mapping[str, Any] = {}

    def _resume(self, saved: Mapping[str, Any]) -> None:
        self.began = dict(saved["began"])
        samplers.write(self.sampler, self.began)
        self._before = streams.unpack_states(saved["before"])
        with streams.aside(self._before):
            self._inner = iter(self.sampler)
        first = saved["first"]
        self._first = None if first is None else streams.unpack_states(first)
        self._first_generators = dict(saved["first_generators"])

    # -- the sampler's side

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self.superseded:
            raise InvalidInputError(SUPERSEDED)
        if self._prepared is not None:
            # Making the loader's iterator draws a seed from the loader's own generator.
            self._put_generators(self._prepared)
            streams.put(self._globals)
            self._prepared = None
        return self._advance()

    def _advance(self) -> Any:
        batch = self._draw()
        self.issued += 1
        digest, samples = self._trail[-1]
        self._trail.append((_link(digest, batch), samples + _samples(batch)))
        return batch

    def _draw(self) -> Any:
        """The next batch of indices. The first also shows what the sampler draws from."""
        self.advanced = True
        try:
            if self.issued == 0:
                return self._draw_first()
            if self._torch_only and not self._generators:
                return next(self._inner)
            return self._draw_watched()
        except StopIteration:
            self.exhausted = True
            raise

    def _draw_first(self) -> Any:
        if self._first is not None:
            for name, state in self._first_generators.items():
                streams.write(self._generators[name], state)
            # While skipping, what comes after draws on from there as well: see `skip`.
            with streams.aside({}) if not self._skipping else nullcontext():
                streams.put(self._first)
                batch = next(self._inner)
        else:
            self._first_generators = self.read_generators()
            before = streams.now()
            try:
                batch = next(self._inner)
            finally:
                self._first = streams.drawn(before)
        self._after = self.read_generators()
        return batch

    def _draw_watched(self) -> Any:
        before = {} if self._torch_only else streams.now()
        generators = self.read_generators()
        try:
            return next(self._inner)
        finally:
            # Also where it ends: torch's RandomSampler draws once more then.
            self._after = self.read_generators()
            self.draws_generators |= self._after != generators
            self.draws_global |= bool(before and streams.drawn(before))

    def read_generators(self) -> dict[str, Any]:
        return {name: streams.read(g) for name, g in self._generators.items()}

    def _put_generators(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            streams.write(self._generators[name], state)

    # -- the watch's side

    def record(self, handed: int) -> dict[str, Any]:
        """Where the pass stands once ``handed`` batches were handed out, in plain JSON types."""
        digest, samples = self._at(handed)
        first = self._first
        return {
            "began": self.began,
            "before": streams.pack_states(self._before),
            "first": None if first is None else streams.pack_states(first),
            "first_generators": self._first_generators,
            "batches": handed,
            "samples": samples,
            "digest": digest,
            "draws_generators": self.draws_generators,
        }

    def _at(self, handed: int) -> tuple[str, int]:
        back = self.issued - handed
        if not 0 <= back < len(self._trail):
            raise InvalidInputError(
                f"{handed} batches were handed out of {self.issued} asked for: another program"
                " advances this loader's iterator"
            )
        return self._trail[-1 - back]

    def is_shared(self) -> bool:
        """Whether a generator of the sampler was drawn from by others since its last batch."""
        return self.advanced and self._after != self.read_generators()

    def skip(self, saved: Mapping[str, Any]) -> None:
        """Pass over the batches that were handed out before.

        Raises
        ------
        InvalidInputError
            The sampler gives another order than it did, or ends before.
        """
        self._skipping = True
        with streams.aside({}):
            self._skip(saved["batches"])
        self._skipping = False
        if self._trail[-1][0] != saved["digest"]:
            raise InvalidInputError(
                f"the sampler does not give the first {saved['batches']} batches in the order in"
                " which it gave them: it depends on more than its generators and plain attributes;"
                " give it state_dict and load_state_dict"
            )
        self.offset = self.issued

    def _skip(self, batches: int) -> None:
        for _ in range(batches):
            try:
                self._advance()
            except StopIteration:
                raise InvalidInputError(
                    f"the sampler ends after {self.issued} batches; {batches} had been handed out"
                    " when the position was saved: the data has changed"
                ) from None

    def prepare(
        self, generators: Mapping[str, Any] | None, global_: Mapping[str, Any] | None = None
    ) -> None:
        """Wait for the loader: generators will stand at ``generators`` when the pass goes on.

        None: where skipping has left them, as is right when the sampler draws from them as it
        goes. ``global_`` does the same for global streams.
        """
        self._globals = global_ or {}
        now = self.read_generators() if generators is None else dict(generators)
        self._put_generators(now)
        self._prepared = now

    @property
    def waiting(self) -> bool:
        """Whether it was prepared and is not yet gone on with."""
        return self._prepared is not None

    @property
    def generators(self) -> Mapping[str, Any]:
        """The sampler's generator objects, by place."""
        return self._generators


def _samples(batch: Any) -> int:
    return len(batch) if isinstance(batch, list | tuple) else 1


def _link(digest: str, batch: Any) -> str:
    text = f"{digest}{_text(batch)}".encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _text(batch: Any) -> str:
    """Indices as text that does not change from process to process."""
    if hasattr(batch, "tolist"):
        return _text(batch.tolist())
    if isinstance(batch, list) and all(type(i) is int for i in batch):
        return repr(batch)
    if isinstance(batch, list | tuple):
        return f"[{','.join(_text(b) for b in batch)}]"
    if batch is None or isinstance(batch, bool | int | float | str | bytes):
        return repr(batch)
    return type(batch).__qualname__
