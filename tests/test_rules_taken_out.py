"""Each rule of "Writers, forget and prune" is needed: without it a schedule loses data.

And the same schedules lose nothing with it. A rule that random schedules miss for long has one
made by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest

from castore.backend import UnansweredError
from castore.check import check
from castore.errors import CastoreError
from castore.prune import announce, prune
from castore.publish import PRUNE, Sweep, close_sweep
from castore.testing.inline import one_thread
from castore.testing.model import World
from castore.testing.protocol import Kind, Setting, run
from tests.rules import RULES, without
from tests.test_protocol import LENGTH, actor, draft

LOSSES = ("is unreadable", "is not listed", "gone within its grace")
SEEDS = 4_000


def a_few(
    lost: float = 0.0, kill: float = 0.0, grace: float = 0.0, users: int = 0, writers: int = 1
) -> Setting:
    """One prune beside one writer or user."""
    counts = (writers,), (users,), (0,), (1,)
    return Setting(*counts, grace=(grace,), lost=(lost,), kill=(kill,), pool=(2, 3))


WHERE: dict[str, tuple[Kind, Setting]] = {
    "every object is verified": ("s3", a_few()),
    "own uploads are verified too": ("s3", a_few()),
    "bases are verified": ("s3", a_few()),
    "a base is less deep than its delta": (
        "local",
        Setting((3,), (0,), (0,), (0,), lost=(0.0,), kill=(0.0,), pool=(3, 4)),
    ),
    "bases closed over what stays": ("local", a_few()),
    "snapshots listed again": ("local", a_few()),
    "objects listed again": ("s3", Setting((2,), (0,), (0,), (1,), (0.0,), (0.0,), (0.0,), (2, 3))),
    "remembered before deleted": ("local", a_few(kill=0.03, grace=12.0, users=1, writers=0)),
    "fences": ("s3", a_few()),
    "a fence is looked at": ("s3", a_few()),
    "a single create without retry": ("s3", a_few(lost=0.25, users=1)),
    "deletes expire": ("s3", a_few()),
    "margin after an unanswered delete": ("s3", a_few(lost=0.25)),
    "unforget is a commit": ("s3", a_few(users=1, writers=0)),
    "pending before prune.json": ("s3", a_few()),
    "prune waits for pending": ("s3", a_few()),
    "the shared lock": ("local", a_few()),
}


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with one_thread():
        yield


def first_loss(kind: Kind, setting: Setting, seeds: range) -> int | None:
    """The first seed whose schedule loses data."""
    for seed in seeds:
        if any(loss in wrong for wrong in run(seed, kind, setting).wrong for loss in LOSSES):
            return seed
    return None


@pytest.mark.parametrize("rule", WHERE)
def test_without_a_rule_data_is_lost_and_with_it_none(rule: str) -> None:
    kind, setting = WHERE[rule]
    with without(rule):
        seed = first_loss(kind, setting, range(SEEDS))
    assert seed is not None, f"{SEEDS} schedules lost nothing without {rule!r}"
    for same in range(max(0, seed - 100), seed + 1):
        assert run(same, kind, setting).wrong == []


def forgotten_in_the_gaps(kept: bool) -> bool:
    """A snapshot is forgotten between a prune's two lists, brought back, and forgotten in the
    next such gap.

    Gives whether what was forgotten a moment ago can be brought back.
    """
    world, names = World(), []
    owner = actor(world)
    names.append(owner.commit(draft(a=b"x" * 1000)).name)
    del world.names[owner.commit(draft(b=b"garbage" * 100)).name.path]
    world.clock += 1000
    gap = ["snapshots", "forgotten"] if kept else ["forgotten", "snapshots"]
    lists: list[str] = []

    def before(method: str, name: str) -> None:
        if method == "list":
            lists.append(name)
            if lists[-2:] == gap:
                names.append(actor(world).forget(names[-1]))
        elif name == PRUNE and len(names) == 2:
            names.append(actor(world).unforget(names[-1]))

    prune(actor(world, before=before), grace=50.0, sweep=LENGTH)
    assert len(names) == 4
    return readable(world, lambda: actor(world).unforget(names[-1]))


def two_sweeps_at_once(kept: bool) -> bool:
    """A prune's announcement is lost, just when another prune has announced its own.

    The other ends, somebody commits, and the first goes on to delete.
    """
    world, others = World(), list[Sweep]()
    owner = actor(world)
    owner.forget(owner.commit(draft(a=b"x" * 1000)).name)
    world.clock += 1000

    def before(method: str, name: str) -> None:
        if (method, name) == ("replace", PRUNE) and not others:
            others.append(announce(actor(world), LENGTH))
            raise UnansweredError("never arrived")
        if method == "delete" and name.startswith("objects/") and len(others) == 1:
            others.append(others[0])
            close_sweep(actor(world).backend, others[0])
            actor(world).commit(draft(a=b"x" * 1000))

    prune(actor(world, before=before), grace=0.0, sweep=LENGTH)
    assert len(others) == 2, kept
    return readable(world, lambda: None)


def readable(world: World, act: Callable[[], object]) -> bool:
    """Whether ``act`` succeeds and every snapshot is whole after it."""
    try:
        act()
    except CastoreError:
        return False
    return list(check(actor(world), read_data=True)) == []


BY_HAND: dict[str, Callable[[bool], bool]] = {
    "snapshots before forgotten": forgotten_in_the_gaps,
    "the random id": two_sweeps_at_once,
}


@pytest.mark.parametrize("rule", BY_HAND)
@pytest.mark.parametrize("kept", [True, False])
def test_a_schedule_made_by_hand_loses_only_without_the_rule(rule: str, kept: bool) -> None:
    out: AbstractContextManager[None] = nullcontext() if kept else without(rule)
    with out:
        assert BY_HAND[rule](kept) == kept


def test_every_rule_has_its_schedule() -> None:
    assert RULES.keys() == WHERE.keys() | BY_HAND.keys()
