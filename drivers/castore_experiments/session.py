"""What a manager does between two calls of its user: opens, resumes, tracks, saves."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from castore import BackendError, InvalidInputError
from castore_experiments import answers, layout, ranks, rng
from castore_experiments.background import Background, Handle
from castore_experiments.canonical import KEPT_OUT
from castore_experiments.commits import Save, checked_step
from castore_experiments.components import Content, Watched, scheme
from castore_experiments.copying import Copier, architecture_of
from castore_experiments.curves import Journal, run_of
from castore_experiments.dump import Instant, with_model
from castore_experiments.exhibit import Exhibit
from castore_experiments.lossy import Lossy, lossy_of
from castore_experiments.manifest import stamp
from castore_experiments.options import Options, parse_options
from castore_experiments.place import Place, World
from castore_experiments.records import Records
from castore_experiments.resume import Loaded, Resume, Wanted, newest_readable, write_config
from castore_experiments.root import Pending, clear_pending, read_pending, write_pending
from castore_experiments.saving import Done, Job, carry_out
from castore_experiments.siblings import files_of, sources_at
from castore_experiments.states import Digests, State, Weights
from castore_experiments.tracker import Tracker, Update
from castore_experiments.unfit import refuse_unfit
from castore_experiments.versions import Owner, owner_in

if TYPE_CHECKING:
    from castore_experiments.architecture import Description
    from castore_experiments.signals import Curves

DEFAULT_ROOT = "root_experiment"


class Session:
    """The state of one `CheckpointManager`. Not for several threads at once.

    Parameters
    ----------
    given : str or None
        The root, where it is known already.
    options : Options
    world : World
    wanted : Wanted
        What resuming restores.
    """

    def __init__(self, given: str | None, options: Options, world: World, wanted: Wanted):
        self.given, self.options, self.world, self.wanted = given, options, world, wanted
        self.watched = Watched()
        self.background: Background[Done] = Background()
        self.closed = False
        self.fresh = True
        self.damaged = False
        self.resume: Resume | None = None
        self._place: Place | None = None
        self._exhibit: Exhibit | None = None
        self._copier = Copier()
        self._siblings: list[Any] | None = None
        self._lossy: Lossy | None = None
        self._settled = False

    # -- opening

    @property
    def place(self) -> Place:
        """The root, opened the first time that it is needed."""
        if self.closed:
            raise InvalidInputError("this CheckpointManager is closed: make another one")
        if self._place is None:
            self.given = DEFAULT_ROOT if self.given is None else self.given
            if not self.given:
                raise InvalidInputError("root_log_dir: an empty text names no folder: leave it out")
            self._place = Place(self.given, self.options, self.world)
            self.tracker = Tracker(scheme(self._place.scheme))
            self.journal = Journal(self._place.files, self.world.report, self.world.clock)
            # A session that is dropped without `close` keeps no threads; at exit it is closed.
            weakref.finalize(self, self.journal.drop).atexit = False
            try:
                self._resume_latest(self._place)
            except BaseException:
                self._place = None  # or the next call would go on as if nothing were to resume
                raise
        return self._place

    @property
    def is_open(self) -> bool:
        return self._place is not None

    def _resume_latest(self, place: Place) -> None:
        archive = place.archive
        latest = archive.latest() if archive is not None else None
        if archive is None or latest is None:
            return
        self.fresh = False
        self._tell_pending(place)
        weights = self.wanted.weights and self.options.load_weights
        wanted = replace(self.wanted, model=False, weights=weights, config=True, data=True)
        loaded, self.damaged = newest_readable(archive, latest, wanted, self.world.report)
        self.go_on(Resume(loaded, self.tracker.rule, False, self.world.report))
        if place.record is not None and ranks.writes() and not place.has_manifest():
            self._rebuild()

    def _tell_pending(self, place: Place) -> None:
        pending = read_pending(place.files) if place.record is not None else None
        if pending is not None:
            self.world.report(
                f"changes of {', '.join(pending.changed)} since {pending.since} (hash"
                f" {pending.hash}) were never written; going on from {pending.base}"
            )

    def _rebuild(self) -> None:
        """A deleted ``checkpoints/`` comes back; says how to start afresh."""
        try:
            records = self.records()
            count = self.exhibit(records).rebuild()
            self.journal.rebuild(records.repository, records.namespace)
        except BackendError as e:  # a root that is only to be read
            self.world.report(f"{layout.CHECKPOINTS} is gone and cannot be made again: {e}")
            return
        self.world.report(
            f"{self.place.files.url}/{layout.CHECKPOINTS} was gone: {count} experiments are shown"
            f" again; to start afresh, remove {layout.ROOT} too, or take another root"
        )

    def go_on(self, resume: Resume) -> None:
        """Make a loaded state the current one, and give its parts to what is watched."""
        loaded = resume.loaded
        self.tracker.resume(loaded.state, loaded.step)
        self._lossy = lossy_of(self.tracker.rule, loaded)
        archive = self._place.archive if self._place else None
        self.journal.fork(run_of(archive, loaded), loaded.step if loaded.weights else None)
        self.resume = resume
        self.resume.apply(self._given_to())

    def _given_to(self) -> Watched:
        """What is watched, without what resuming is not to restore; `branch` gives all it read."""
        if self.resume is None or self.resume.asked:
            return self.watched
        data = self.watched.data if self.wanted.data and self.options.load_data else None
        if self.options.load_weights:
            return replace(self.watched, data=data)
        return replace(self.watched, data=data, model=None, optimizer=None, scheduler=None)

    def branch(self, loaded: Loaded, curves: bool, strict: bool) -> None:
        """Go back to a loaded state; what was pending is dropped."""
        self.background.settle()
        resume = Resume(loaded, self.tracker.rule, strict, self.world.report, asked=True)
        refuse_unfit(resume, self.watched)
        if loaded.config is not None:
            write_config(self.watched, loaded.config, KEPT_OUT)
        self.go_on(resume)
        if not curves:
            self.journal.fork(None, None)
        if self.place.is_writable and ranks.writes():
            clear_pending(self.place.files)

    def trusts(self, allowed: bool) -> bool:
        """Whether pickled architectures may be run: by the caller's word, or its own config."""
        return allowed or self.options.dump_model_architecture

    # -- watching

    def watch(
        self,
        objects: Mapping[str, Any],
        dataloaders: Mapping[str, Any],
        root: str | os.PathLike[str] | None,
    ) -> None:
        """Follow what is not None; what was resumed is given to it."""
        config = objects.get("hyperparameters")
        self.given = answers.one_root(self.given, root, config)
        answers.refuse_stateless(objects)
        if config is not None:
            self._take_options(config)
        _ = self.place
        for name, value in objects.items():
            if value is not None:
                setattr(self.watched, name, value)
        for name, loader in dataloaders.items():
            from castore_experiments.loaders import watch_loader

            self.watched.loaders[str(name)] = watch_loader(str(name), loader)
        if self.resume is None:
            return
        old = self.resume.loaded.config
        if config is not None and old is not None and self._gives_config:
            write_config(self.watched, old, KEPT_OUT)
        self.resume.apply(self._given_to())

    @property
    def _gives_config(self) -> bool:
        return self.wanted.config and self.options.load_config

    def _take_options(self, config: Mapping[Any, Any]) -> None:
        options = parse_options(config.get("checkpoint_manager"), self.options)
        before, self.options = self.options, options
        if (options.repository, options.namespace) == (before.repository, before.namespace):
            return
        if self._place is None or self._place.expect(options):
            return
        if self.tracker.state is not None or self.journal.run is not None:
            self.options = before
            raise InvalidInputError(
                "checkpoint_manager.repository and .namespace say where a root is kept: watch the"
                " configuration first, or give them to the constructor"
            )
        self._place = None  # nothing is known of it yet: opened again as the options say

    # -- tracking

    def update(self, content: Content, force: bool) -> Update:
        """Make the hash of ``content`` current; see `Tracker.update`."""
        self.background.settle()
        name = (self.watched.hyperparameters or {}).get("experiment_name")
        template = State(
            "",
            Digests(),
            self.tracker.rule.name,
            run=self.journal.run,
            experiment_name=None if name is None else str(name),
            created=stamp(self.world.clock()),
        )
        if self._lossy is not None:
            content = self._lossy.without(content, self.tracker.digests)
        return self.tracker.update(content, self._look_up, template, force=force)

    def _look_up(self) -> tuple[Owner, Callable[[str], State | None]]:
        """Who has which label and which states there are, by now."""
        self.place.look_again()
        archive = self.place.archive
        if archive is None:
            return lambda *_: None, lambda _: None
        return owner_in(archive), lambda h: archive.state(h) if h in archive else None

    def remember_pending(self) -> None:
        """Keep a word of unwritten edits, for whoever opens the root after a crash."""
        state = self.tracker.state
        if state is None or not ranks.writes() or not self.options.enable_checkpoints:
            return
        self.records()
        files = self.place.files
        if not self.tracker.pending:
            clear_pending(files)
            return
        base = self.tracker.written.hash if self.tracker.written else None
        changed = tuple(sorted(self.tracker.pending))
        since = stamp(self.world.clock())
        write_pending(files, Pending(base, state.hash, changed, state.digests.facts(), since))

    # -- saving

    def records(self) -> Records:
        """The records to write to; the first call makes what the root lacks for that."""
        return self.place.writable()

    def exhibit(self, records: Records) -> Exhibit:
        """The root's files; one for as long as the records are the same."""
        if self._exhibit is None or self._exhibit.records is not records:
            self._exhibit = Exhibit(
                self.place.files,
                records,
                self.options.materialize,
                self.world.report,
                self.world.clock,
            )
        return self._exhibit

    def save(
        self,
        *,
        step: int | None,
        metrics: Mapping[str, float],
        metadata: Mapping[str, Any] | None,
        optimizer: bool,
        weights: bool,
        model: Any = None,
    ) -> Handle[Done]:
        """Copy what is to be saved, and write it behind the caller; `Handle.result` waits."""
        self.background.settle()
        records = self.records()
        tracker = self.tracker
        assert tracker.state is not None
        at = self._take_step(step)
        content = tracker.content if tracker.state is not tracker.written else None
        instant = Instant(
            stamp(self.world.clock()),
            rng.capture(),
            {name: loader.state() for name, loader in self.watched.loaders.items()},
        )
        if content is not None:
            instant = with_model(instant, content, self.options)
        job = Job(
            tracker.state,
            instant,
            content,
            self._copier.copy(
                self.watched, model, optimizer, self.options, tracker.state, self._architecture
            )
            if weights
            else None,
            Save(at, instant.saved, self.journal.run, metrics, deepcopy(metadata)),
            look=not self._settled,
        )
        if self.resume is not None:
            self.resume.begun = True
        exhibit, options = self.exhibit(records), self.options
        return self.background.run(lambda: self._carry_out(job, records, exhibit, options))

    def _take_step(self, step: int | None) -> int:
        at = self.tracker.step if step is None else checked_step(step)
        self.tracker.step = at
        return at

    def _carry_out(self, job: Job, records: Records, exhibit: Exhibit, options: Options) -> Done:
        done = carry_out(job, records, exhibit, options, lambda: self.publish_curves(records))
        self._settled = job.content is None
        self.tracker.state = self.tracker.written = done.state
        self.tracker.content = Content()
        clear_pending(self.place.files)
        return done

    def _architecture(self) -> Description | None:
        """Of the model that the current hash stands for; None where that is not known."""
        tracker = self.tracker
        if tracker.content.architecture is not None or tracker.state is None:
            return tracker.content.architecture
        return architecture_of(self.records(), tracker.state.hash, self.world.report)

    def elsewhere(self, step: int | None) -> Done:
        """What rank 0 is saving, for the other ranks of a distributed job."""
        state = self.tracker.state
        assert state is not None
        self._take_step(step)
        self.tracker.saved()
        path = layout.weights_path(state.hash, self.tracker.step)
        return Done(state, Weights(state.hash, self.tracker.step, path, 0))

    # -- curves

    def log(self, metric: str, value: Any, step: int | None, more: Mapping[str, Any]) -> None:
        """Take a point under the current hash."""
        _ = self.place
        if step is not None:
            self.tracker.step = answers.step_of(metric, step)
        if self.resume is not None:
            self.resume.begun = True
        if not ranks.writes():
            return
        records = self.place.archive if self.place.is_writable else self.records()
        assert isinstance(records, Records)
        at = self.tracker.step
        self.journal.log(
            records.repository,
            records.namespace,
            metric,
            value,
            at,
            **{"hash": self.tracker.hash, **more},
        )

    def curves(self) -> Curves:
        """What can be read of the curves of this root and its siblings."""
        if self._siblings is None:
            options, report = self.world.storage_options, self.world.report
            found = (sources_at(u, options, report) for u in self.place.discovery.siblings)
            self._siblings = [source for sources in found for source in sources]
        records = self.place.archive
        if isinstance(records, Records):
            return self.journal.curves(records.repository, records.namespace, self._siblings)
        from castore_experiments.signals import Curves

        return Curves([*files_of(self.place.files), *self._siblings])

    def publish_curves(self, records: Records) -> None:
        """Every row so far into the repository, and the database file after it."""
        self.journal.publish(records.repository, records.namespace)

    def close(self) -> None:
        """Finish what is under way; raises what failed. Closing twice is no error."""
        if self.closed:
            return
        try:
            self.background.settle()
            if self._place is not None and self.journal.run is not None:
                self.publish_curves(self.records())
        finally:
            if self._place is not None:
                self.journal.close()
            self.closed = True
