"""What a namespace holds of an experiment: its states and weight checkpoints, from snapshots.

A *state* is the snapshot ``<hash>.state``: the configuration, data and architecture files of one
experiment hash. *Weights* are snapshots ``<hash>.step.<N>`` of one weight file each. Weights are
written before the state of a new hash, so a hash exists once its state does, and is then whole.
Which is newest is decided by the store's order of snapshots, never by a step or a file's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from castore import (
    CorruptObjectError,
    File,
    FormatError,
    ObjectNotFoundError,
    Repository,
    SnapshotName,
    SnapshotNotFoundError,
    Tree,
)
from castore_experiments.layout import COMPONENTS, component_of, weights_path
from castore_experiments.states import Digests, State, Weights, state_of

_TREES = 64  # trees kept in memory

_KEY = re.compile(r"([0-9a-f]{24})\.(?:(state)|step\.(0|[1-9][0-9]{0,18}))")


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
        self._weights: dict[SnapshotName, Weights] = {}
        self._states: dict[SnapshotName, State] = {}
        self._facts: dict[SnapshotName, Mapping[str, Any]] = {}
        self._trees: dict[SnapshotName, Tree] = {}

    # -- what there is

    def refresh(self) -> None:
        """List the namespace again: what others wrote or forgot meanwhile.

        Where the list cannot be read all stays as it was.
        """
        names = list(self.repository.snapshots(self.namespace))
        self._held, self._order, kept = {}, [], self._weights
        self._weights = {n: kept[n] for n in names if n in kept}
        for name in names:
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
            held.weights.insert(
                len(held.weights) if place is None else 0, self._weights_named(name)
            )

    def _weights_named(self, name: SnapshotName) -> Weights:
        """What a name says, kept from one list to the next."""
        found = self._weights.get(name)
        if found is None:
            hash, step = name.key[:24], int(name.key.rpartition(".")[2])
            found = Weights(hash, step, weights_path(hash, step), name.time, name)
            self._weights[name] = found
        return found

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
        at = 8 * COMPONENTS.index(component)
        found = (h for h, held in self._held.items() if held.states and h[at : at + 8] == label)
        return iter(sorted(found, key=self.created))

    def with_folder(self, path: str) -> Iterator[str]:
        """The hashes whose state may hold the document ``path``, by its segment's label."""
        component = component_of(path)
        return iter(()) if component is None else self.with_label(component, path.split("/")[1])

    # -- weights

    def weights(self, hash: str) -> list[Weights]:
        """The weight files of a hash, last saved first."""
        held = self._held.get(hash, _Held())
        if len(held.states) <= 1:  # no document need be read
            return list(held.weights)
        owners = self.claims(hash)
        if len({s.digests for s in owners}) == 1:
            return list(held.weights)
        return self.weights_of(owners[0])

    def written_twice(self) -> list[str]:
        """The hashes with more than one snapshot of a state: used again, or of two contents."""
        return [h for h, held in self._held.items() if len(held.states) > 1]

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

    def is_imported(self, weights: Weights) -> bool:
        """Whether another program wrote the file."""
        assert weights.snapshot is not None
        try:
            return bool(self.facts(weights.snapshot).get("imported"))
        except SnapshotNotFoundError:  # forgotten meanwhile
            return False

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
        with _of(hash, path):
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
        with _of(weights.hash, f"step {weights.step} ({weights.path})"):
            return self.repository.read(weights.snapshot, weights.path)


@contextmanager
def _of(hash: str, what: str) -> Iterator[None]:
    """Damage within tells which part of which experiment it is, and what to do."""
    advice = "'castore check' tells what else needs it, 'castore check --repair-from' mends it"
    try:
        yield
    except CorruptObjectError as e:
        text = f"experiment {hash}, {what}: {e}; {advice} from a copy"
        named = {"name": e.name, "expected": e.expected, "actual": e.actual}
        raise CorruptObjectError(text, **named) from e
    except ObjectNotFoundError as e:
        raise ObjectNotFoundError(f"experiment {hash}, {what}: {e}; {advice} from a copy") from e
