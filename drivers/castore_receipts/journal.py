"""The chain of a run's receipts: sealed, published and told one after the other.

What was measured is packed and published by one worker while training goes on. The next
checkpoint, and the end of training, wait for it and raise what it met.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from castore import AlreadyExistsError, InvalidInputError, SnapshotName
from castore_receipts import destination, record, sign, validation
from castore_receipts.arrays import Tensor, read_safetensors, write_safetensors
from castore_receipts.destination import Destination, Folder
from castore_receipts.documents import encode, plain, seal
from castore_receipts.episodes import Evaluation
from castore_receipts.gates import Gate
from castore_receipts.policy import Adapter
from castore_receipts.record import Parent
from castore_receipts.validation import Form

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_FACTS = ("step", "mean_return", "receipt_sha256", "role")


@dataclass(frozen=True, slots=True)
class Measured:
    """A checkpoint as it was measured: copies of everything, so that training may go on.

    ``body`` is the receipt less what follows from the packed files; ``seconds`` is how long the
    training waited for it.
    """

    step: int
    body: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    adapter: Adapter
    evaluation: Evaluation
    statistics: bytes | None
    hidden: Mapping[str, bytes]
    seconds: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """A receipt that training was taken up from, where it lies, and its normaliser's file."""

    receipt: dict[str, Any]
    place: Destination
    statistics: bytes | None


class Journal:
    """Publishes receipts to one destination, each naming the one before.

    Attributes
    ----------
    history : list of dict
        The receipts published by this run, oldest first.
    failures : list of dict
        Step and error of each checkpoint that could not be published.
    parent, base : Parent or None, SnapshotName or None
        The receipt that the next one follows, and the snapshot it is delta-coded against.
    resumed : Resumed or None
        What training was taken up from.
    """

    def __init__(
        self,
        place: Destination,
        *,
        gates: Sequence[Gate],
        key: Ed25519PrivateKey | None,
        materialize: bool,
        background: bool,
        log: TextIO | None,
        traces: Form = "npz",
    ):
        self._traces = traces
        self.destination, self.materialize = place, materialize
        self.history: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self.parent: Parent | None = None
        self.base: SnapshotName | None = None
        self.bytes = 0
        self.resumed: Resumed | None = None
        self._gates, self._key, self._log = tuple(gates), key, log
        self._background = background
        self._worker: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    # -- one after the other

    def submit(self, measured: Measured) -> None:
        """Publish in the background, or at once where there is none; `settle` comes before."""
        assert self._under_way is None
        if not self._background:
            self._checkpoint(measured)
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "receipts")
        self._under_way = self._worker.submit(self._checkpoint, measured)

    def settle(self) -> None:
        """Wait for what is under way and raise what it met."""
        under_way = self._under_way
        if under_way is not None:
            error = under_way.exception()
            self._under_way = None  # only now: Ctrl-C may have ended a wait before
            if error is not None:
                raise error

    def close(self) -> None:
        """`settle`, and let the worker go."""
        try:
            self.settle()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
                self._worker = None

    # -- one receipt

    def _checkpoint(self, measured: Measured) -> None:
        policy = write_safetensors(measured.tensors)
        read_safetensors(policy, destination.POLICY)  # what is published has been read once
        packed, digests = validation.pack(measured.evaluation.traces(), self._traces)
        files = {destination.POLICY: policy, **packed}
        if measured.statistics is not None:
            files[destination.NORMALIZER] = measured.statistics
        body = {
            **measured.body,
            **record.policy_fields(measured.adapter, policy, measured.tensors),
            **record.evaluation_fields(measured.evaluation, digests),
            "normalizer": record.files(files).get(destination.NORMALIZER),
            "state": record.files(measured.hidden),
        }
        receipt = self.sealed(body, self.parent)
        files[destination.RECEIPT] = encode(receipt)
        path = destination.checkpoint_folder(measured.step)
        key = destination.checkpoint_key(measured.step)
        self.publish(Folder(path, key, files, measured.hidden, {}), receipt)
        self.bytes = sum(map(len, files.values()))
        self.history.append(receipt)
        self._tell(receipt, measured.seconds)

    def sealed(self, body: Mapping[str, Any], parent: Parent | None) -> dict[str, Any]:
        """The receipt: gates decided, parent named, sealed and, with a key, signed."""
        whole = plain(dict(body), "receipt")
        whole["gates"] = [g.decide(whole) for g in self._gates]
        whole["failures"] = list(self.failures)
        whole["parent"] = None if parent is None else parent.record()
        receipt = seal(whole)
        return receipt if self._key is None else sign.sign(receipt, self._key)

    def publish(self, folder: Folder, receipt: Mapping[str, Any]) -> None:
        """Commit and write a folder; a checkpoint becomes the parent of the next."""
        facts = {k: receipt[k] for k in _FACTS}
        whole = Folder(folder.path, folder.key, folder.files, folder.hidden, facts)
        name = self.destination.publish(whole, self.base, self.materialize)
        if receipt["role"] == "validation":
            self.base = name
            self.parent = Parent("previous", receipt["step"], receipt["receipt_sha256"])

    # -- telling

    def fail(self, step: int, error: InvalidInputError) -> None:
        """Record that the checkpoint of ``step`` could not be published."""
        failure = {"step": step, "error": str(error)}
        self.failures.append(failure)
        self._write({"phase": "failed", **failure})
        name = destination.step_name(step)
        files = {f"{name}.json": (json.dumps(failure, sort_keys=True) + "\n").encode()}
        folder = Folder(destination.FAILURES, f"failed.{name}", files, {}, failure)
        try:
            self.destination.publish(folder, None, self.materialize)
        except AlreadyExistsError:
            # An earlier attempt at this step, before a resumption, failed in another way: its file
            # stays. This failure is in the repository, and in every later receipt.
            return

    def _tell(self, receipt: Mapping[str, Any], seconds: float) -> None:
        fields = ("step", "mean_return", "seconds", "mps_driver_bytes")
        line = {"phase": "checkpoint", **{f: receipt[f] for f in fields}}
        self._write({**line, "bytes": self.bytes, "checkpoint_seconds": seconds})

    def _write(self, line: Mapping[str, Any]) -> None:
        stream = self._log if self._log is not None else sys.stdout
        stream.write(json.dumps(line, allow_nan=False) + "\n")
        stream.flush()
