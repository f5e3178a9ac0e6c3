"""The callback: at each due step an evaluated, hashed, chained receipt. SB3 is not modified."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback

from castore import AlreadyExistsError, InvalidInputError, SnapshotName
from castore_receipts import buffer, destination, normalize, probe, record, sign, training, watch
from castore_receipts.adapters import MakeAdapter, sac_actor
from castore_receipts.destination import Destination
from castore_receipts.documents import plain
from castore_receipts.episodes import Environment, Evaluation, evaluate, make
from castore_receipts.gates import Gate
from castore_receipts.journal import Journal, Measured, Resumed
from castore_receipts.measure import Timings, resources, synchronizer
from castore_receipts.policy import Adapter, assert_stored
from castore_receipts.provenance import check_shapes, facts_of_run
from castore_receipts.record import Parent, Watched
from castore_receipts.seeds import roles
from castore_receipts.tensors import assert_finite, state_of
from castore_receipts.validation import check_form

if TYPE_CHECKING:
    import gymnasium


class ReceiptCallback(BaseCallback):
    """Makes each checkpoint a receipt.

    A checkpoint is due when ``num_timesteps`` (all environments together) has crossed a multiple
    of ``every``; it is taken between the updates that follow a rollout and the next rollout, and
    once more when training ends. The run's weights, streams, statistics and environments are the
    same bits with and without this callback.

    Parameters
    ----------
    destination : path or URL
        Where ``checkpoints/step_0000100/`` folders appear; `castore_receipts.destination`.
    environment : str or callable
        A registered id, or what makes a fresh environment for validation.
    every : int
        Environment steps between checkpoints.
    validation_seeds, final_seeds : sequences of int
        Disjoint. Final seeds are used by `final_evaluation` alone.
    adapter : callable
        ``(model, tensors, normalizer) -> Adapter``.
    watched : mapping, optional
        Objects that must not change; the reference is taken at the start of training.
    repository, namespace, storage_options
        As in `Destination.open`.
    materialize : bool
        Whether the folders are written; the snapshots always are.
    background : bool
        Whether a checkpoint is packed and published while training goes on.
    resumable : bool
        Keep optimizers, streams and environment state in the repository.
    replay_buffer : bool
        Keep the replay buffer there too (blocks that did not change are stored once).
    on_failure : {"stop", "record"}
        What a checkpoint that cannot be published (a non-finite tensor) does to the run.
    gates : sequence of Gate
    sign_with : path, optional
        PEM file of an Ed25519 private key.
    source : path, optional
        The run's program or folder, whose revision is recorded.
    log : text stream
        Gets one JSON line a checkpoint.
    traces : {"npz", "zarr"}
        Whether validation trajectories are stored as ``validation.npz``, or as the zarr arrays
        of a folder ``validation.zarr``.
    clock : callable
        Seconds, monotonic.

    Raises
    ------
    InvalidInputError
        Overlapping seeds, a policy the adapter does not know, an environment of other shapes.
    AlreadyExistsError
        The destination holds receipts of another run, or the step's folder is there.
    AssertionError
        A watched object changed; the message names its leaves.
    """

    def __init__(
        self,
        destination: str | os.PathLike[str],
        environment: Environment,
        *,
        every: int,
        validation_seeds: Sequence[int],
        final_seeds: Sequence[int] = (),
        adapter: MakeAdapter = sac_actor,
        watched: Mapping[str, Any] | None = None,
        repository: str | os.PathLike[str] | None = None,
        namespace: str | None = None,
        storage_options: dict[str, Any] | None = None,
        materialize: bool = True,
        background: bool = True,
        resumable: bool = True,
        replay_buffer: bool = False,
        on_failure: str = "stop",
        gates: Sequence[Gate] = (),
        sign_with: str | os.PathLike[str] | None = None,
        source: str | os.PathLike[str] | None = None,
        log: TextIO | None = None,
        traces: str = "npz",
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__()
        if every < 1 or on_failure not in ("stop", "record"):
            raise InvalidInputError(
                f"every={every}, on_failure={on_failure!r}: expected at least 1 step, and 'stop'"
                " or 'record'"
            )
        if replay_buffer and not resumable:
            raise InvalidInputError("a replay buffer is kept to resume: leave resumable on")
        self.every, self.seeds = every, roles(validation_seeds, final_seeds)
        key = sign.load_private(sign_with) if sign_with is not None else None
        self.destination = Destination.open(destination, repository, namespace, storage_options)
        self.journal = Journal(
            self.destination,
            gates=gates,
            key=key,
            materialize=materialize,
            background=background,
            log=log,
            traces=check_form(traces),
        )
        self.environment, self.make_adapter = environment, adapter
        self._watched = dict(watched or {})
        self._resumable, self._replay = resumable, replay_buffer
        self._on_failure, self._source, self._clock = on_failure, source, clock
        self._pending: training.TrainingState | None = None
        self._earlier_seconds, self._train_calls, self._earlier_calls = 0.0, 0, 0
        self._last_taken = 0
        self._stepping = False  # within a step, whose transition is not stored yet
        self._rollout_ended: tuple[float, int] | None = None
        self._env: gymnasium.Env[Any, Any] | None = None

    @staticmethod
    def resume(
        model: BaseAlgorithm,
        destination: str | os.PathLike[str],
        step: int,
        *,
        environment: Environment | None = None,
        into: str | os.PathLike[str] | None = None,
        watched: Mapping[str, Any] | None = None,
        repository: str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        sign_with: str | os.PathLike[str] | None = None,
        log: TextIO | None = None,
    ) -> ReceiptCallback:
        """`castore_receipts.resuming.resume` with the parameters that are mostly needed."""
        from castore_receipts.resuming import resume

        return resume(
            model,
            destination,
            step,
            environment=environment,
            into=into,
            watched=watched,
            repository=repository,
            storage_options=storage_options,
            sign_with=sign_with,
            log=log,
        )

    def continue_from(
        self,
        resumed: Resumed,
        parent: Parent,
        base: SnapshotName | None,
        pending: training.TrainingState | None,
    ) -> None:
        """Take up a chain: counts, seconds and failures go on from the receipt.

        ``pending`` is put back at the first rollout.
        """
        receipt = resumed.receipt
        self.journal.parent, self.journal.base, self._pending = parent, base, pending
        self.journal.resumed = resumed
        self._earlier_seconds = float(receipt["seconds"])
        self._earlier_calls = int(receipt["budget"]["completed"]["training_steps"])
        self.journal.failures = list(receipt["failures"])

    @property
    def history(self) -> list[dict[str, Any]]:
        """The receipts published so far, oldest first."""
        return self.journal.history

    # -- events of the training loop

    def _on_training_start(self) -> None:
        self._began = self._clock()
        self.timings = Timings(self._clock, synchronizer(self.model.device))
        if self.journal.parent is None and self.destination.newest() is not None:
            raise AlreadyExistsError(
                f"{self.destination.backend.url} holds receipts of an earlier run: resume from one"
                " (ReceiptCallback.resume), or give this run a destination of its own"
            )
        with self.timings.measured("initialization"):
            if self.journal.materialize:
                self.destination.complete()
            self._reference = watch.leaves(self._watched)
            self._env = make(self.environment)
            check_shapes(self.model, self._env)
            if self._replay:
                buffer.check_known(self.model)
            self._facts = facts_of_run(self.model, self._env, self._source)
            probe.forward(self.model)
            stored = state_of(self.model.policy.state_dict())
            assert_stored(self.make_adapter(self.model, stored, None), stored)
        self._last_taken = self.model.num_timesteps

    def _on_rollout_start(self) -> None:
        if self._pending is not None:
            self._pending.reapply(self.model)
            self._pending = None
        self._count_updates()
        if self.model.num_timesteps // self.every > self._last_taken // self.every:
            self._take("rollout")
        self._rollout_began = self.timings.now()

    def _on_step(self) -> bool:
        self._stepping = True
        return True

    def _on_rollout_end(self) -> None:
        self._stepping = False
        ended = self.timings.now()
        self.timings.add("rollouts", ended - self._rollout_began)
        self._rollout_ended = (ended, _updates(self.model))

    def _on_training_end(self) -> None:
        self._count_updates()
        if self.model.num_timesteps > self._last_taken:
            self._take(training.FRESH if self._stepping else "end")
        self._settle(self.journal.close)
        self._earlier_seconds += self._clock() - self._began
        if self._env is not None:
            self._env.close()

    def _count_updates(self) -> None:
        """What passed since the rollout ended was training, if there were updates."""
        if self._rollout_ended is not None:
            ended, updates = self._rollout_ended
            if _updates(self.model) > updates:
                self.timings.add("training_updates", self.timings.now() - ended)
                self._train_calls += 1
            self._rollout_ended = None

    # -- one checkpoint

    def _take(self, phase: str) -> None:
        self._settle(self.journal.settle)
        self._last_taken = self.model.num_timesteps
        began = self._clock()
        try:
            measured = self._measure(phase, began)
        except InvalidInputError as e:
            self._failed(self.model.num_timesteps, e)
            return
        for name in ("mean_return", "seconds"):
            self.logger.record(f"receipts/{name}", measured.body[name])
        self.logger.record("receipts/checkpoint_seconds", measured.seconds)
        self.journal.submit(measured)

    def _settle(self, settle: Callable[[], None]) -> None:
        """Let the receipt under way be published; what it met is met here."""
        try:
            settle()
        except InvalidInputError as e:
            self._failed(self._last_taken, e)
        self.logger.record("receipts/bytes", self.journal.bytes)

    def _failed(self, step: int, error: InvalidInputError) -> None:
        self.journal.fail(step, error)
        if self._on_failure == "stop":
            raise error

    def _measure(self, phase: str, began: float) -> Measured:
        """Everything that needs the model as it is now."""
        step = self.model.num_timesteps
        if self.journal.materialize:
            self.destination.refuse_taken(destination.checkpoint_folder(step))
        tensors = state_of(self.model.policy.state_dict())
        assert_finite(tensors, "policy or critic")
        statistics = normalize.capture(self.model.get_vec_normalize_env())
        adapter = self.make_adapter(self.model, tensors, normalize.frozen(statistics, "statistics"))
        assert_stored(adapter, tensors)
        probe.data_preparation(self.model, self.timings)
        probe.warmed_forward(self.model, self.timings)
        evaluation, watched = self._validate(adapter)
        hidden = self._state_files(phase)
        plain({"mean_return": evaluation.mean_return}, "receipt")  # a number, before any more
        body = {
            **self._facts,
            **self._progress(),
            "every": self.every,
            "mean_return": evaluation.mean_return,
            "role": "validation",
            "seeds": self.seeds.record(),
            "watched": watched.record(),
            "world_model_immutable": watched.unchanged,
            "not_contained": record.not_contained(
                statistics is not None, list(hidden), training.kept(self.model, phase)
            ),
            **resources(self.model.policy),
        }
        seconds = self._clock() - began
        return Measured(step, body, tensors, adapter, evaluation, statistics, hidden, seconds)

    def _validate(self, adapter: Adapter) -> tuple[Evaluation, Watched]:
        assert self._env is not None
        before = watch.leaves(self._watched)
        watch.assert_same(self._reference, before, "before validation")
        self.seeds = self.seeds.used()
        with self.timings.measured("evaluation"):
            evaluation = evaluate(adapter, self._env, self.seeds.validation)
        after = watch.leaves(self._watched)
        watch.assert_same(self._reference, after, "during validation")
        objects = {name: watch.of_object(after, name) for name in self._watched}
        first, second, third = map(watch.digest, (self._reference, before, after))
        return evaluation, Watched(first, second, third, objects)

    def _state_files(self, phase: str) -> dict[str, bytes]:
        hidden: dict[str, bytes] = {}
        if self._resumable:
            hidden[destination.TRAINING] = training.capture(self.model, phase)
        if self._replay:
            held = buffer.capture_replay(self.model)
            if held is not None:
                hidden[destination.REPLAY] = held
        return hidden

    # -- measures and facts

    def _progress(self) -> dict[str, Any]:
        """Steps, calls and updates kept apart, what was configured beside what was completed."""
        completed = {
            "environment_steps": self.model.num_timesteps,
            "training_steps": self._earlier_calls + self._train_calls,
            "updates": _updates(self.model),
            "episodes": int(getattr(self.model, "_episode_num", 0)),
        }
        return {
            "step": self.model.num_timesteps,
            "updates": _updates(self.model),
            "seconds": self._earlier_seconds + self._clock() - self._began,
            "budget": {
                "configured": {"environment_steps": int(self.model._total_timesteps)},
                "completed": completed,
            },
            "timings": self.timings.record(),
        }

    # -- after training

    def final_evaluation(self, *, again: bool = False) -> dict[str, Any]:
        """Evaluate the last receipt's policy on the final seeds: once, and recorded as such.

        Returns the receipt, which is published as ``final/evaluation_0001/``.

        Raises
        ------
        InvalidInputError
            There are no final seeds or no receipt, or the policy is not the last receipt's.
        AlreadyExistsError
            It was run before; with ``again`` it is repeated, and the receipt says so.
        """
        from castore_receipts.final import final_evaluation

        return final_evaluation(self, again)


def _updates(model: BaseAlgorithm) -> int:
    return int(getattr(model, "_n_updates", 0))
