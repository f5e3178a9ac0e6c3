"""Which experiment hash is current, and what of it still waits to be written. No I/O of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from castore_experiments.components import Content, Scheme, describe
from castore_experiments.layout import COMPONENTS
from castore_experiments.states import Digests, State
from castore_experiments.versions import Owner, hash_of


class Update(NamedTuple):
    """What `CheckpointManager.update_experiment_hash` found.

    ``hash`` is current now, ``is_new`` whether nothing was ever written under it, ``changed``
    which of ``hp``, ``model`` and ``data`` differ from before.
    """

    hash: str
    is_new: bool
    changed: set[str]


@dataclass(slots=True)
class Tracker:
    """The current state of one manager.

    ``written`` is the last state that is in the repository, ``state`` the current one, ``content``
    what a pending one is made of, ``step`` the training step that is known last.
    """

    rule: Scheme
    written: State | None = None
    state: State | None = None
    content: Content = field(default_factory=Content)
    previous: str | None = None
    step: int = 0

    @property
    def hash(self) -> str | None:
        return self.state.hash if self.state else None

    @property
    def digests(self) -> Digests:
        return self.state.digests if self.state else Digests()

    @property
    def pending(self) -> set[str]:
        """The components that differ from what was written last."""
        if self.state is None or self.state is self.written:
            return set()
        before = self.written.digests if self.written else Digests()
        return self.digests.changed(before)

    def resume(self, state: State, step: int) -> None:
        """Go on from a written state."""
        if self.state is not None and self.state.hash != state.hash:
            self.previous = self.state.hash
        self.state = self.written = state
        self.content, self.step = Content(), step

    def update(
        self,
        content: Content,
        look_up: Callable[[], tuple[Owner, Callable[[str], State | None]]],
        template: State,
        *,
        force: bool = False,
    ) -> Update:
        """Make the hash of ``content`` current.

        Parameters
        ----------
        content : Content
        look_up : callable
            Asked once something changed: who has which label (see `versions.label_of`), and the
            state written under a hash, or None.
        template : State
            Time, run and name for a new state.
        force : bool
            Count all three components as changed and the hash as new.
        """
        digests, init_step = self.rule.digests(
            content, self.digests, self._initialised(), self.step
        )
        changed: set[str] = {*COMPONENTS} if force else digests.changed(self.digests)
        if not changed and self.state is not None:
            return Update(self.state.hash, False, set())
        owner, known = look_up()
        hash = hash_of(digests, owner)
        before, self.previous = self.state, self.hash if self.hash != hash else self.previous
        found = known(hash)
        if self.written is not None and hash == self.written.hash:
            self.state = self.written
        elif found is not None:
            self.state = found
        else:
            self.state = self._new(template, hash, digests, init_step)
        if content.model is not None and self.state is not self.written:
            content = replace(content, architecture=describe(content.model, init_step))
        self.content = _merged(self.content, content, before, self.written)
        return Update(hash, force or found is None, changed)

    def _initialised(self) -> dict[str, int]:
        """The steps at which the current model and the one written last were initialised."""
        known = [s for s in (self.state, self.written) if s is not None]
        return {s.digests.model: s.init_step for s in known if s.digests.model}

    def _new(self, template: State, hash: str, digests: Digests, init_step: int) -> State:
        before = self.written.digests if self.written else Digests()
        return replace(
            template,
            hash=hash,
            digests=digests,
            init_step=init_step,
            parent=self.written.hash if self.written else None,
            step=self.step if self.written else None,
            changed=tuple(sorted(digests.changed(before))),
        )

    def saved(self) -> None:
        """What was pending is written."""
        self.written, self.content = self.state, Content()


def _merged(old: Content, new: Content, before: State | None, written: State | None) -> Content:
    """``new``, with components that are not at hand now as an unwritten update saw them."""
    if before is written:
        return new
    return Content(
        new.config if new.config is not None else old.config,
        new.model if new.model is not None else old.model,
        new.data if new.data is not None else old.data,
        new.architecture if new.model is not None else old.architecture,
    )
