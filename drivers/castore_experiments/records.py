"""What a namespace holds of an experiment: its states and weight checkpoints, from snapshots.

A *state* is the snapshot ``<hash>.state``: the configuration, data and architecture files of one
experiment hash. *Weights* are snapshots ``<hash>.step.<N>`` of one weight file each. Weights are
written before the state of a new hash, so a hash exists once its state does, and is then whole.
Which is newest is decided by the store's order of snapshots, never by a step or a file's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from castore import File, FormatError, Repository, SnapshotName, SnapshotNotFoundError, Tree
from castore_experiments.layout import weights_path

MISSING = ""
"""The digest of a component that there is none of; its label is ``00000000``."""

COMPONENTS = ("hp", "model", "data")

_TREES = 64  # trees kept in memory

_KEY = re.compile(r"([0-9a-f]{24})\.(?:(state)|step\.(0|[1-9][0-9]{0,18}))")


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of the three components of a state: 64 hex characters, or `MISSING`.

    A root that the public tool wrote tells no more than the first 8 characters: those stand for
    every digest that begins with them.
    """

    hp: str = MISSING
    model: str = MISSING
    data: str = MISSING

    def changed(self, other: Digests) -> set[str]:
        """The components, of ``hp``, ``model`` and ``data``, in which the two differ."""
        return {n for n in COMPONENTS if not same(getattr(self, n), getattr(other, n))}

    def facts(self) -> dict[str, str]:
        """As the facts of snapshots hold them."""
        return {n: getattr(self, n) for n in COMPONENTS}


def same(a: str, b: str) -> bool:
    """Whether two digests stand for one content, as far as the shorter tells."""
    return a == b or (a != MISSING != b and 8 in (len(a), len(b)) and a[:8] == b[:8])


@dataclass(frozen=True, slots=True)
class State:
    """The facts of one experiment hash.

    ``init_step`` is the step its model was initialised at; ``parent`` and ``step`` say which hash
    it descends from and at which step; ``run`` is the run that made it; ``created`` (local ISO
    time) when. ``scheme`` names the rule its digests follow.
    """

    hash: str
    digests: Digests
    scheme: str
    init_step: int = 0
    parent: str | None = None
    step: int | None = None
    run: str | None = None
    changed: tuple[str, ...] = ()
    experiment_name: str | None = None
    created: str = ""

    def facts(self) -> dict[str, Any]:
        """What the snapshot keeps; `state_of` reads it."""
        return {
            "hash": self.hash,
            "digests": self.digests.facts(),
            "scheme": self.scheme,
            "init_step": self.init_step,
            "parent": self.parent,
            "step": self.step,
            "run": self.run,
            "changed": list(self.changed),
            "experiment_name": self.experiment_name,
            "created": self.created,
        }


def state_of(facts: Mapping[str, Any], where: str) -> State:
    """The state that a snapshot's facts tell; `FormatError` if they do not."""
    try:
        digests = Digests(*(str(facts["digests"][n]) for n in COMPONENTS))
        return State(
            str(facts["hash"]),
            digests,
            str(facts["scheme"]),
            int(facts["init_step"]),
            facts["parent"],
            facts["step"],
            facts["run"],
            tuple(facts["changed"]),
            facts["experiment_name"],
            str(facts["created"]),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(f"{where}: not the facts of a state: {e!r}") from e


@dataclass(frozen=True, slots=True)
class Weights:
    """One saved weight file: the same step may be saved several times.

    ``path`` is relative to ``checkpoints/``; ``time`` says when it was saved, microseconds since
    the epoch; ``snapshot`` is None for a file that is in no repository.
    """

    hash: str
    step: int
    path: str
    time: int
    snapshot: SnapshotName | None = None


class Archive(Protocol):
    """What a root holds, read from its repository or, before that is made, from its files."""

    def refresh(self) -> None:
        """Look again: what others wrote or forgot meanwhile."""

    def hashes(self) -> list[str]:
        """Every hash that has a state, the most recently used first."""

    def latest(self) -> str | None:
        """The hash that was current at the last write."""

    def state(self, hash: str) -> State:
        """The facts of a hash; `SnapshotNotFoundError` if there is no such hash."""

    def with_label(self, component: str, label: str) -> Iterator[str]:
        """The hashes whose segment ``component`` is ``label``, the first written first."""

    def weights(self, hash: str) -> Sequence[Weights]:
        """The weight files of a hash, last saved first."""

    def document(self, hash: str, path: str) -> bytes | None:
        """One other file of a hash, relative to ``checkpoints/``, verified; None if it has none."""

    def weight_file(self, weights: Weights) -> bytes:
        """The bytes of a weight file, verified."""

    def __contains__(self, hash: str) -> bool: ...


def weights_facts(
    state: State,
    step: int,
    saved: str,
    metrics: Mapping[str, float],
    run: str | None,
    imported: bool = False,
) -> dict[str, Any]:
    """What the snapshot of a weight file keeps: whose it is, and the metrics saved with it.

    A metric that is not finite is kept as text, since JSON has no number for it.
    """
    facts = {
        "hash": state.hash,
        "step": step,
        "digests": state.digests.facts(),
        "metrics": {k: v if math.isfinite(v) else str(v) for k, v in metrics.items()},
        "run": run,
        "saved": saved,
    }
    return {**facts, "imported": True} if imported else facts


def pick(found: Sequence[Weights], target_step: int | None) -> Weights | None:
    """The last saved of ``found`` (last saved first), or that nearest to ``target_step``.

    Ties go to the higher step; of a step that was saved several times, the last save.
    """
    if not found or target_step is None:
        return found[0] if found else None
    nearest = min({w.step for w in found}, key=lambda s: (abs(s - target_step), -s))
    return next(w for w in found if w.step == nearest)


def state_key(hash: str) -> str:
    """The key of a state's snapshot."""
    return f"{hash}.state"


def weights_key(hash: str, step: int) -> str:
    """The key of a weight file's snapshot."""
    return f"{hash}.step.{step}"


@dataclass(slots=True)
class _Held:
    states: list[SnapshotName] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)


class Records:
    """An index over one namespace; what it says is as of the last `refresh` or `add`."""

    def __init__(self, repository: Repository, namespace: str):
        self.repository, self.namespace = repository, namespace
        self._held: dict[str, _Held] = {}
        self._order: list[SnapshotName] = []
        self._states: dict[SnapshotName, State] = {}
        self._facts: dict[SnapshotName, Mapping[str, Any]] = {}
        self._trees: dict[SnapshotName, Tree] = {}

    # -- what there is

    def refresh(self) -> None:
        """List the namespace again: what others wrote or forgot meanwhile."""
        self._held, self._order = {}, []
        for name in self.repository.snapshots(self.namespace):
            self._take(name, newest=False)

    def add(self, name: SnapshotName, tree: Tree | None = None) -> None:
        """Take in a snapshot that was just committed, with its tree where that is at hand."""
        self._take(name, newest=True)
        if tree is not None:
            self._keep(name, tree)

    def drop(self, name: SnapshotName) -> None:
        """Take out a snapshot that was just forgotten."""
        self._order.remove(name)
        for held in self._held.values():
            held.states = [s for s in held.states if s != name]
            held.weights = [w for w in held.weights if w.snapshot != name]

    def _take(self, name: SnapshotName, newest: bool) -> None:
        match = _KEY.fullmatch(name.key)
        if match is None:
            return
        held = self._held.setdefault(match[1], _Held())
        place = 0 if newest else None
        self._order.insert(0 if newest else len(self._order), name)
        if match[2]:
            held.states.insert(len(held.states) if place is None else 0, name)
        else:
            step = int(match[3])
            weights = Weights(match[1], step, weights_path(match[1], step), name.time, name)
            held.weights.insert(len(held.weights) if place is None else 0, weights)

    def hashes(self) -> list[str]:
        """Every hash that has a state, the most recently used first."""
        seen = dict.fromkeys(n.key[:24] for n in self._order)
        return [h for h in seen if self._held[h].states]

    def latest(self) -> str | None:
        """The hash that was current at the last write."""
        return next(iter(self.hashes()), None)

    def created(self, hash: str) -> int:
        """When the hash's first state was written, microseconds."""
        return self._state_name(hash).time

    def last_used(self, hash: str) -> int:
        """When something was last written under the hash, microseconds."""
        held = self._held[hash]
        return max([n.time for n in held.states] + [w.time for w in held.weights])

    def __contains__(self, hash: str) -> bool:
        return hash in self._held and bool(self._held[hash].states)

    # -- states

    def _state_name(self, hash: str) -> SnapshotName:
        held = self._held.get(hash)
        if held is None or not held.states:
            raise SnapshotNotFoundError(
                f"there is no experiment {hash} in namespace {self.namespace!r} of"
                f" {self.repository.url}"
            )
        return held.states[-1]

    def state(self, hash: str) -> State:
        """The facts of a hash; of several states under one hash, the earliest owns it.

        Raises
        ------
        SnapshotNotFoundError
            No such hash.
        """
        return self._read_state(self._state_name(hash))

    def claims(self, hash: str) -> list[State]:
        """Every state written under one hash, the earliest first: more than one after a clash."""
        held = self._held.get(hash, _Held())
        return [self._read_state(n) for n in reversed(held.states)]

    def _read_state(self, name: SnapshotName) -> State:
        if name not in self._states:
            self._states[name] = state_of(self.facts(name), str(name))
        return self._states[name]

    def with_label(self, component: str, label: str) -> Iterator[str]:
        """The hashes whose segment ``component`` is ``label``, the first written first."""
        at = {"hp": 0, "model": 8, "data": 16}[component]
        found = (h for h, held in self._held.items() if held.states and h[at : at + 8] == label)
        return iter(sorted(found, key=self.created))

    def with_folder(self, path: str) -> Iterator[str]:
        """The hashes whose state may hold the document ``path``, by its segment's label."""
        folder, label = path.split("/")[:2]
        component = {"HP": "hp", "models": "model", "data": "data"}[folder]
        return self.with_label(component, label)

    # -- weights

    def weights(self, hash: str) -> list[Weights]:
        """The weight files of a hash, last saved first."""
        owners = self.claims(hash)
        if len({s.digests for s in owners}) <= 1:
            return list(self._held.get(hash, _Held()).weights)
        return self.weights_of(owners[0])

    def weights_of(self, state: State) -> list[Weights]:
        """The weight files of one content, last saved first; another may have its label."""
        held = self._held.get(state.hash, _Held()).weights
        return [w for w in held if w.snapshot and not self._digests(w).changed(state.digests)]

    def _digests(self, weights: Weights) -> Digests:
        assert weights.snapshot is not None
        found = self.facts(weights.snapshot)["digests"]
        return Digests(*(str(found[n]) for n in COMPONENTS))

    def states_of(self, state: State) -> list[SnapshotName]:
        """The snapshots of one content's state, the newest first."""
        held = self._held.get(state.hash, _Held()).states
        return [n for n in held if self._read_state(n).digests == state.digests]

    def all_weights(self, hash: str) -> list[Weights]:
        """The weight files of a hash that has no state yet, too; last saved first."""
        return list(self._held.get(hash, _Held()).weights)

    def file_of(self, weights: Weights) -> File:
        """A weight file as its tree tells, without reading it."""
        assert weights.snapshot is not None
        return self.files(weights.snapshot)[weights.path]

    def weight_sha256(self, weights: Weights) -> str:
        """SHA-256 of a weight file, without reading it."""
        return self.file_of(weights).sha256

    def touch(self, hash: str) -> None:
        """Make ``hash`` the latest: its state's document is committed once more."""
        name = self._whole_name(hash)
        self.add(self.repository.republish(self.repository.snapshot(name)))

    def facts(self, snapshot: SnapshotName) -> Mapping[str, Any]:
        """The facts of a snapshot, read once."""
        if snapshot not in self._facts:
            self._facts[snapshot] = self.repository.snapshot(snapshot).facts
        return self._facts[snapshot]

    # -- content

    def document(self, hash: str, path: str) -> bytes | None:
        """One file of a hash's state, verified."""
        file = self.state_files(hash).get(path)
        return None if file is None else b"".join(self.repository.read_file(file))

    def state_files(self, hash: str) -> dict[str, File]:
        """The files of a hash's state, to stand in another snapshot."""
        return self.files(self._whole_name(hash))

    def _whole_name(self, hash: str) -> SnapshotName:
        """The owner's newest state: an import may bring files that it first had to leave out."""
        first = self._state_name(hash)
        states = self._held[hash].states
        mine = self.state(hash).digests if len(states) > 1 else None
        return next((n for n in states if self._read_state(n).digests == mine), first)

    def files(self, snapshot: SnapshotName) -> dict[str, File]:
        """The files of a snapshot, to stand in another one."""
        if snapshot not in self._trees:
            self._keep(snapshot, self.repository.tree(snapshot))
        return dict(self._trees[snapshot].files())

    def _keep(self, snapshot: SnapshotName, tree: Tree) -> None:
        self._trees[snapshot] = tree
        if len(self._trees) > _TREES:
            del self._trees[next(iter(self._trees))]

    def weight_file(self, weights: Weights) -> bytes:
        """The bytes of a weight file, verified.

        Raises
        ------
        FormatError
            It is of another content, whose writer ended before that got a label of its own.
        """
        assert weights.snapshot is not None
        if weights.hash in self and self._digests(weights).changed(
            self.state(weights.hash).digests
        ):
            raise FormatError(
                f"{weights.path} in {weights.snapshot} is of another content with the label of"
                f" {weights.hash}"
            )
        return self.repository.read(weights.snapshot, weights.path)
