"""One save from its copy in memory to the root's files: commits first, the view after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from castore import Options as StoreOptions
from castore import SnapshotNotFoundError
from castore_experiments.clashes import settle
from castore_experiments.commits import Save, commit_state, commit_weights
from castore_experiments.components import Content
from castore_experiments.dump import Instant, state_documents
from castore_experiments.exhibit import Exhibit
from castore_experiments.layout import weights_path
from castore_experiments.local_files import Staged
from castore_experiments.options import Keep, Options
from castore_experiments.records import Records
from castore_experiments.retention import Saved, to_forget
from castore_experiments.states import State, Weights

if TYPE_CHECKING:
    from castore_experiments.weights import Captured


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be written. ``captured`` is None where no weights are; ``content`` is None where
    the state of the hash is written already; ``look`` says whether another machine may have given
    its label to another content meanwhile.
    """

    state: State
    instant: Instant
    content: Content | None = None
    captured: Captured | None = None
    save: Save | None = None
    look: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """What was written: the state as it stands, and the weights."""

    state: State
    weights: Weights | None = None


def carry_out(
    job: Job, records: Records, exhibit: Exhibit, options: Options, curves: Callable[[], None]
) -> Done:
    """Commit weights, then the state they belong to, then bring the root's files after.

    Durable on return. The captured memory is released in any case.
    """
    store = StoreOptions(compression=options.compression)
    try:
        job = settle_label(job, records, exhibit, store)
        with exhibit.following(job.state.hash):
            weights = _commit_weights(job, records, exhibit, store)
    finally:
        if job.captured is not None:
            job.captured.release()
    with exhibit.following(job.state.hash):
        done = _commit_state(job, weights, records, exhibit, options)
    curves()
    if weights is not None:
        retain(records, exhibit, options, done.state.hash)
    return done


def _commit_state(
    job: Job, weights: Weights | None, records: Records, exhibit: Exhibit, options: Options
) -> Done:
    """The state that weights belong to, unless it is there already; and the manifest after."""
    if job.content is not None and job.state.hash not in records:
        return _write_state(job, weights, records, exhibit, options)
    if weights is not None:
        exhibit.note_weights(weights)
    elif job.state.hash in records and records.latest() != job.state.hash:
        records.touch(job.state.hash)
        exhibit.note_use(job.state.hash)
    return Done(job.state, weights)


def settle_label(job: Job, records: Records, exhibit: Exhibit, store: StoreOptions) -> Job:
    """The job under the label its content has by now: another machine may have taken the one it
    was given meanwhile. Of two contents with one label the earlier keeps it.
    """
    if job.content is None and not job.look:
        return job
    records.refresh()
    return replace(job, state=settle(records, exhibit, job.state, store))


def _write_state(
    job: Job, weights: Weights | None, records: Records, exhibit: Exhibit, options: Options
) -> Done:
    store = StoreOptions(compression=options.compression)
    assert job.content is not None
    documents = state_documents(records, job.state, job.content, options, job.instant)
    commit_state(records, job.state, documents, store)
    exhibit.show_state(job.state.hash)
    exhibit.note_state(job.state, job.state.experiment_name)
    records.refresh()
    state = settle(records, exhibit, job.state, store)
    if weights is not None and state.hash != job.state.hash:
        weights = next(w for w in records.weights(state.hash) if w.step == weights.step)
    return Done(state, weights)


def _commit_weights(
    job: Job, records: Records, exhibit: Exhibit, store: StoreOptions
) -> Weights | None:
    from castore_experiments.weights import encode

    if job.captured is None or job.save is None:
        return None
    data = encode(
        job.captured,
        step=job.save.step,
        exp_hash=job.state.hash,
        timestamp=job.save.saved,
        rng_state=job.instant.rng_state,
        loaders=job.instant.loaders,
        metadata=job.save.metadata,
    )
    path = weights_path(job.state.hash, job.save.step)
    with ThreadPoolExecutor(1) as beside, ExitStack() as staged:
        file = beside.submit(exhibit.stage_weights, path, data)
        staged.callback(_discard, file)
        weights = commit_weights(records, job.state, job.save, data, store, exhibit.at_hand)
        exhibit.show_weights(weights, data, file.result())
    if store.compression != "none":
        exhibit.keep_at_hand(weights, data)
    return weights


def _discard(file: Future[Staged | None]) -> None:
    """Take away what did not get its name, since the commit failed."""
    if file.exception() is None and (staged := file.result()) is not None:
        staged.close()


def retain(records: Records, exhibit: Exhibit, options: Options, hash: str) -> None:
    """Forget the weights of ``hash`` that the ``keep`` option lets go."""
    if options.keep is not None:
        forget_weights(records, exhibit, let_go(records, options.keep, hash))


def let_go(records: Records, keep: Keep, hash: str) -> list[Weights]:
    """The weights of ``hash`` that ``keep`` does not keep; never those of another program."""
    records.refresh()  # another process may have forgotten some
    found = {str(w.snapshot): w for w in records.weights(hash) if not records.is_imported(w)}
    saved = [Saved(id, w.step, metrics_of(records, w)) for id, w in found.items()]
    return [found[s.id] for s in to_forget(saved, keep, branch_points(records, hash))]


def forget_weights(records: Records, exhibit: Exhibit, gone: Sequence[Weights]) -> None:
    """Forget weights, and take their real files away."""
    for weights in gone:
        assert weights.snapshot is not None
        with suppress(SnapshotNotFoundError):  # another process was faster
            exhibit.will_go(weights.path, records.file_of(weights))
            records.repository.forget(weights.snapshot)
        records.drop(weights.snapshot)
    exhibit.withdraw()


def metrics_of(records: Records, weights: Weights) -> dict[str, float]:
    """The metrics that were saved with weights; none of weights that were forgotten meanwhile."""
    assert weights.snapshot is not None
    try:
        metrics = records.facts(weights.snapshot).get("metrics", {})
    except SnapshotNotFoundError:
        return {}
    return {str(k): float(v) for k, v in metrics.items()} if isinstance(metrics, Mapping) else {}


def branch_points(records: Records, hash: str) -> set[int]:
    """The steps of ``hash`` at which another hash left it."""
    states = (records.state(h) for h in records.hashes())
    return {s.step for s in states if s.parent == hash and s.step is not None}
