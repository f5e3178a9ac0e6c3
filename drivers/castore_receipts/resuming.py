"""Going on from a receipt: the model as it was, and a callback that continues the chain."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from castore import AlreadyExistsError, InvalidInputError, ReceiptMismatchError, SnapshotName
from castore_receipts import seeds
from castore_receipts.adapters import MakeAdapter, sac_actor
from castore_receipts.arrays import Tensor
from castore_receipts.buffer import restore_replay
from castore_receipts.destination import NORMALIZER, POLICY, REPLAY, TRAINING, Destination
from castore_receipts.episodes import Environment
from castore_receipts.gates import Gate, gates_of
from castore_receipts.journal import Resumed
from castore_receipts.rebuild import environment_from
from castore_receipts.record import Parent
from castore_receipts.sources import SnapshotSource
from castore_receipts.subject import Family, Subject
from castore_receipts.tensors import to_torch
from castore_receipts.training import TrainingState
from castore_receipts.validation import form_of
from castore_receipts.verify import report

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

    from castore_receipts.callback import ReceiptCallback


def resume(
    model: BaseAlgorithm,
    destination: str | os.PathLike[str],
    step: int,
    *,
    environment: Environment | None = None,
    into: str | os.PathLike[str] | None = None,
    every: int | None = None,
    validation_seeds: Sequence[int] | None = None,
    final_seeds: Sequence[int] | None = None,
    adapter: MakeAdapter = sac_actor,
    watched: Mapping[str, Any] | None = None,
    repository: str | os.PathLike[str] | None = None,
    namespace: str | None = None,
    storage_options: dict[str, Any] | None = None,
    materialize: bool = True,
    on_failure: str = "stop",
    gates: Sequence[Gate] | None = None,
    sign_with: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    log: TextIO | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ReceiptCallback:
    """Restore ``model`` from the receipt of ``step`` and give a callback that continues its chain.

    The receipt is verified first. Policy, critics, targets, optimizers, entropy coefficient,
    replay buffer (where it was kept) and counters are put back now; random streams, noise and the
    environments' state at the first rollout of ``model.learn(..., reset_num_timesteps=False)``.
    Environment, cadence, seeds, gates and the form of traces are as in the receipt where they are
    not given; a key is never in it, so a signed chain is signed on only with ``sign_with``.

    Parameters
    ----------
    watched : mapping, optional
        Must be given where the run watched something; the reference is taken anew.
    into : path or URL, optional
        Where the continuation goes, where later receipts stand in ``destination`` already.

    Raises
    ------
    ReceiptMismatchError
        A link of the receipt does not hold; nothing was loaded.
    InvalidInputError
        The receipt keeps no training state, or the model is another one.
    AlreadyExistsError
        Later receipts are in the way: give ``into``.
    """
    from castore_receipts.callback import ReceiptCallback

    place = Destination.open(destination, repository, namespace, storage_options, make=False)
    name = place.snapshot_of(step)
    if into is None:
        _refuse_later(place, step)
    subject = verified(place, name)
    receipt = subject.receipt
    was = seeds.read(receipt["seeds"])
    _refuse_unwatched(receipt, watched)
    callback = ReceiptCallback(
        destination if into is None else into,
        environment if environment is not None else environment_from(receipt),
        every=every if every is not None else receipt["every"],
        validation_seeds=was.validation if validation_seeds is None else validation_seeds,
        final_seeds=was.final if final_seeds is None else final_seeds,
        adapter=adapter,
        watched=watched,
        repository=repository,
        namespace=namespace,
        storage_options=storage_options,
        materialize=materialize,
        replay_buffer=REPLAY in receipt["state"],
        on_failure=on_failure,
        gates=gates_of(receipt) if gates is None else gates,
        sign_with=sign_with,
        source=source,
        log=log,
        traces=form_of(receipt),
        clock=clock,
    )
    wrong = seeds.chain_defects(callback.seeds.following(was), was)
    if wrong:
        raise InvalidInputError(f"seeds: {'; '.join(wrong)}")
    pending = restore(model, subject)
    callback.seeds = callback.seeds.following(was, used=False)
    same = callback.destination.repository.id == place.repository.id
    parent = Parent("resumed", step, receipt["receipt_sha256"])
    statistics = subject.file(NORMALIZER) if receipt.get("normalizer") else None
    resumed = Resumed(dict(receipt), place, statistics)
    callback.continue_from(resumed, parent, name if same else None, pending)
    callback.model = model  # a final evaluation needs no training first
    return callback


def verified(place: Destination, name: SnapshotName) -> Subject:
    """A snapshot's receipt, every link of it checked; `ReceiptMismatchError` otherwise."""
    subject = Subject.read(SnapshotSource(place.repository, name))
    subject.family = Family([subject.receipt])
    found = report(subject)
    if not found.sound:
        some = "; ".join(f"{p.name}: {p.verdict}: {p.detail}" for p in found.problems[:5])
        raise ReceiptMismatchError(
            f"{found.location} is not what its receipt says, nothing was loaded: {some}; audit the"
            " run with 'castore receipts verify'"
        )
    return subject


def restore(model: BaseAlgorithm, subject: Subject) -> TrainingState:
    """Put a verified receipt's policy and training state into a model made alike."""
    if TRAINING not in subject.receipt["state"]:
        raise InvalidInputError(
            f"{subject.source.name} keeps no training state (resumable=False): it can be evaluated"
            " and expanded, not resumed"
        )
    pending = TrainingState(subject.file(TRAINING))
    load_policy(model, subject.tensors())
    pending.apply(model)
    if REPLAY in subject.receipt["state"]:
        restore_replay(model, subject.file(REPLAY))
    return pending


def load_policy(model: BaseAlgorithm, tensors: Mapping[str, Tensor]) -> None:
    """Load ``policy.safetensors`` strictly; `InvalidInputError` names the first difference."""
    own = model.policy.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        theirs = tensors[name].shape if name in tensors else None
        ours = tuple(own[name].shape) if name in own else None
        if theirs != ours:
            raise InvalidInputError(
                f"{name} has shape {ours} in the model and {theirs} in {POLICY}: make the model"
                " with the same networks and environment"
            )
    model.policy.load_state_dict({n: to_torch(t) for n, t in tensors.items()}, strict=True)


def _refuse_unwatched(receipt: Mapping[str, Any], watched: Mapping[str, Any] | None) -> None:
    """What was watched is not let go by leaving it out."""
    names = sorted(receipt["watched"]["objects"])
    if names and watched is None:
        raise InvalidInputError(
            f"the run watched {', '.join(names)}: give watched= the same objects, or an empty"
            " mapping to watch nothing from here on"
        )


def _refuse_later(place: Destination, step: int) -> None:
    later = sorted(int(n.key.rpartition("_")[2]) for n in place.snapshots())
    later = [s for s in later if s > step]
    if later:
        raise AlreadyExistsError(
            f"{place.backend.url} holds receipts of {len(later)} later step(s), up to"
            f" {later[-1]}, which are never overwritten: give into= another destination"
        )
