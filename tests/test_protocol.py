"""Each rule of "Writers, forget and prune" (docs/format.md), by a schedule made by hand.

Actors are real `Repository` objects over one `World`; a hook freezes one of them between two of
its calls while the others act.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from castore.backend import UnansweredError
from castore.check import check
from castore.commit import Options
from castore.errors import BackendError, ObjectNotFoundError
from castore.prune import PAUSE, Roots, announce, look, prune
from castore.publish import PRUNE, Patience, read_sweep
from castore.repository import Repository
from castore.snapshot import FENCE
from castore.source import Draft, MemoryFile
from castore.testing.model import ModelBackend, World

LENGTH = 100.0
PATIENCE = Patience(margin=3.0, overdue=5.0, poll=1.0)


def actor(world: World, **hooks: Callable[[str, str], None]) -> Repository:
    def sleep(seconds: float) -> None:
        world.clock += seconds

    patience = Patience(sleep, PATIENCE.margin, PATIENCE.overdue, PATIENCE.poll)
    return Repository(ModelBackend(world, **hooks), "0" * 32, patience)


def draft(**files: bytes) -> Draft:
    return Draft({name: MemoryFile(data) for name, data in files.items()})


def sweep(world: World, grace: float = 0.0) -> Repository:
    """A prune by somebody else, after everything has aged and the pause is over."""
    world.clock += 1000
    pruner = actor(world)
    prune(pruner, grace=grace, sweep=LENGTH)
    return pruner


def once(method: str, prefix: str, act: Callable[[], None]) -> Callable[[str, str], None]:
    """A hook that acts once, at the first call of ``method`` on a name with ``prefix``."""
    armed = [True]

    def hook(m: str, name: str) -> None:
        if armed[0] and m == method and name.startswith(prefix):
            armed[0] = False
            act()

    return hook


def lose(method: str, prefix: str) -> Callable[[str, str], None]:
    def act() -> None:
        raise UnansweredError("the answer was lost")

    return once(method, prefix, act)


def whole(world: World, snapshots: int) -> None:
    repository = actor(world)
    names = list(repository.snapshots())
    assert len(names) == snapshots
    assert list(check(repository, read_data=True)) == []


def test_a_reused_object_deleted_before_the_announcement_is_put_back() -> None:
    """Verify every object, one's own uploads included, after the sweep is known to be off."""
    world = World()
    old = actor(world)
    old.forget(old.commit(draft(a=b"x" * 1000)).name)
    writer = actor(world, before=once("create", "pending/", lambda: sweep(world) and None))
    writer.commit(draft(a=b"x" * 1000))
    whole(world, 1)


def test_own_uploads_are_verified_too() -> None:
    """Old by the time of the sweep and referenced by nothing yet: they go, and are put back."""
    world = World()
    writer = actor(world, before=once("create", "pending/", lambda: sweep(world) and None))
    writer.commit(draft(a=b"new" * 1000, b=b"other" * 1000))
    whole(world, 1)


def test_a_writer_frozen_before_its_create_is_fenced_and_starts_over() -> None:
    """It slept past the overdue limit between verify and create; its objects are gone."""
    world = World()
    writer = actor(world, before=once("create", "snapshots/", lambda: sweep(world) and None))
    done = writer.commit(draft(a=b"x" * 1000))
    fences = [
        n for n, (d, _, _) in world.names.items() if n.startswith("snapshots/") and d == FENCE
    ]
    assert len(fences) == 1 and done.name.path not in fences
    whole(world, 1)


def test_a_prune_waits_for_a_live_pending() -> None:
    """While the writer beats, the prune waits; what the writer commits stays."""
    world = World()
    old = actor(world)
    old.forget(old.commit(draft(a=b"x" * 1000)).name)
    world.clock += 1000
    writer = actor(world)
    seen = []

    def commit() -> None:
        seen.append(writer.commit(draft(a=b"x" * 1000)).name)

    # The pruner has listed, marked and is about to announce when the writer commits the victim.
    pruner = actor(world, before=once("replace", PRUNE, commit))
    prune(pruner, grace=0, sweep=LENGTH)
    assert seen
    whole(world, 1)


def test_a_writer_that_meets_a_sweep_withdraws_and_waits() -> None:
    world = World()
    old = actor(world)
    old.forget(old.commit(draft(a=b"x" * 1000)).name)
    world.clock += 1000
    during: list[bool] = []

    def commit() -> None:
        # The sweep is announced; this writer must not create a snapshot before it is closed.
        def before(method: str, name: str) -> None:
            if method == "create" and name.startswith("snapshots/"):
                during.append(read_sweep(ModelBackend(world)).on)

        actor(world, before=before).commit(draft(a=b"x" * 1000))

    pruner = actor(world, before=once("list", "pending", commit))
    prune(pruner, grace=0, sweep=LENGTH)
    assert during and not any(during)
    whole(world, 1)


def test_a_prune_that_sleeps_past_its_end_deletes_nothing_more() -> None:
    """Deletes expire; somebody else closes the sweep after end and margin, and commits."""
    world = World()
    old = actor(world)
    old.forget(old.commit(draft(a=b"x" * 1000)).name)
    world.clock += 1000

    def freeze() -> None:
        world.clock += LENGTH + PATIENCE.margin + 1
        actor(world).commit(draft(a=b"x" * 1000))

    pruner = actor(world, before=once("delete", "objects/", freeze))
    report = prune(pruner, grace=0, sweep=LENGTH)
    assert report.failed
    whole(world, 1)


def test_an_unanswered_delete_keeps_the_sweep_open_until_end_and_margin() -> None:
    world = World()
    old = actor(world)
    old.forget(old.commit(draft(a=b"x" * 1000)).name)
    world.clock += 1000
    start = world.clock
    pruner = actor(world, after=lose("delete", "objects/"))
    report = prune(pruner, grace=0, sweep=LENGTH)
    assert len(report.failed) == 1
    assert world.clock > start + LENGTH + PATIENCE.margin
    assert not read_sweep(pruner.backend).on


@pytest.mark.parametrize("acted", [True, False])
def test_a_lost_answer_to_the_create_is_settled_by_a_fence(acted: bool) -> None:
    """It acted: the document stands, done. It did not: the name is spent, and it starts over."""
    world = World()
    hook = lose("create", "snapshots/")
    writer = actor(world, after=hook) if acted else actor(world, before=hook)
    done = writer.commit(draft(a=b"x" * 1000))
    documents = [d for n, (d, _, _) in world.names.items() if n.startswith("snapshots/")]
    assert documents.count(FENCE) == (0 if acted else 1)
    assert world.names[done.name.path][0] != FENCE
    whole(world, 1)


def test_a_create_still_in_flight_meets_the_fence() -> None:
    """The first create arrives after the fence: it must be refused, or it would count twice."""
    world = World()
    sent: list[str] = []

    def drop(method: str, name: str) -> None:
        if method == "create" and name.startswith("snapshots/") and not sent:
            sent.append(name)
            raise UnansweredError("still in flight")

    writer = actor(world, before=drop)
    done = writer.commit(draft(a=b"x" * 1000))
    assert world.names[sent[0]][0] == FENCE and done.name.path != sent[0]
    whole(world, 1)


def test_a_snapshot_that_vanished_after_a_lost_answer_was_committed() -> None:
    """Committed, answer lost, forgotten by somebody else: not committed a second time."""
    world = World()

    def forgotten(method: str, name: str) -> None:
        if method == "create" and name.startswith("snapshots/") and len(seen) == 0:
            seen.append(name)
            raise UnansweredError("lost")

    seen: list[str] = []

    def before(method: str, name: str) -> None:
        if method == "get" and seen and name == seen[0] and name in world.names:
            del world.names[name]

    writer = actor(world, before=before, after=forgotten)
    assert writer.commit(draft(a=b"x" * 1000)).name.path == seen[0]
    assert not list(actor(world).snapshots())


def test_a_pending_whose_answer_was_lost_is_recognised() -> None:
    world = World()
    actor(world, after=lose("create", "pending/")).commit(draft(a=b"x"))
    assert not [n for n in world.names if n.startswith("pending/")]
    whole(world, 1)


def test_an_announcement_whose_answer_was_lost_is_recognised_by_its_random_id() -> None:
    world = World()
    pruner = actor(world, after=lose("replace", PRUNE))
    mine = announce(pruner, LENGTH)
    now = read_sweep(pruner.backend)
    assert now.on and now.id == mine.id and now.version == mine.version


def test_two_sweeps_never_overlap_and_a_dead_one_is_closed_after_its_margin() -> None:
    world = World()
    first = announce(actor(world), LENGTH)
    start = world.clock
    second = announce(actor(world), LENGTH)
    assert world.clock > start + LENGTH + PATIENCE.margin + PAUSE * PATIENCE.overdue
    assert second.id != first.id and read_sweep(actor(world).backend).id == second.id


def test_a_prune_that_fails_before_it_deletes_closes_its_sweep() -> None:
    """An outage in the middle must not hold up every writer until the announced end."""
    world = World()
    old = actor(world)
    old.forget(old.commit(draft(a=b"x" * 1000)).name)
    world.clock += 1000
    seen: list[str] = []

    def before(method: str, name: str) -> None:
        if method == "list" and name == "forgotten":
            seen.append(name)
            if read_sweep(ModelBackend(world)).on:
                raise BackendError("the network is gone")

    with pytest.raises(BackendError, match="network"):
        prune(actor(world, before=before), grace=0, sweep=LENGTH)
    assert len(seen) >= 2 and not read_sweep(ModelBackend(world)).on


def test_forget_between_the_two_lists_is_seen_in_one_of_them() -> None:
    """Snapshots are listed before forgotten: the other order loses a snapshot in between."""
    world = World()
    owner = actor(world)
    name = owner.commit(draft(a=b"x" * 1000)).name
    world.clock += 10
    pruner = actor(world, before=once("list", "forgotten", lambda: actor(world).forget(name)))
    plan = look(pruner, Roots(pruner), 5.0, None)
    assert plan.victims == [] and plan.expired == []


def test_forgotten_documents_are_roots_for_grace_and_a_second_forget_restarts_it() -> None:
    world = World()
    owner = actor(world)
    name = owner.commit(draft(a=b"x" * 1000)).name
    owner.forget(name)
    world.clock += 80
    data = world.names[name.forgotten][0]
    world.put(name.path, data)  # an unfinished first forget: the document is listed still
    owner.forget(name)
    world.clock += 80
    pruner = actor(world)
    assert look(pruner, Roots(pruner), 100.0, None).victims == []
    world.clock += 21
    plan = look(pruner, Roots(pruner), 100.0, None)
    assert len(plan.victims) == 2 and plan.expired == [name]


def test_forgotten_is_kept_while_the_snapshot_is_still_listed() -> None:
    world = World()
    owner = actor(world)
    name = owner.commit(draft(a=b"x" * 1000)).name
    data = world.names[name.path][0]
    owner.forget(name)
    world.put(name.path, data)
    sweep(world)
    assert name.forgotten in world.names
    whole(world, 1)


def test_unforget_is_a_commit_under_a_fresh_name_and_refuses_what_is_missing() -> None:
    world = World()
    owner = actor(world)
    name = owner.commit(draft(a=b"x" * 1000)).name
    owner.forget(name)
    fresh = owner.unforget(name)
    assert fresh.id == name.id and fresh.name < name.name
    owner.forget(fresh)
    victim = next(
        n for n in world.names if n.startswith("objects/") and len(world.names[n][0]) > 64
    )
    tree_and_blobs = {n for n in world.names if n.startswith("objects/")}
    for n in tree_and_blobs - {victim}:
        del world.names[n]
    with pytest.raises(ObjectNotFoundError):
        owner.unforget(fresh)
    assert not list(owner.snapshots())


def test_unforget_beside_a_sweep_waits_like_any_commit() -> None:
    world = World()
    owner = actor(world)
    name = owner.commit(draft(a=b"x" * 1000)).name
    owner.forget(name)
    other = owner.commit(draft(b=b"y" * 1000)).name
    owner.forget(other)
    announce(actor(world), LENGTH)
    start = world.clock
    owner.unforget(name)
    assert world.clock > start + LENGTH
    whole(world, 1)


def drifting(steps: int) -> list[bytes]:
    rng = np.random.default_rng(1)
    at = rng.standard_normal(40_000).astype("<f4")
    out = []
    for _ in range(steps):
        out.append(at.tobytes())
        at = (at + rng.standard_normal(at.size) * 1e-5).astype("<f4")
    return out


def chain_of(world: World, steps: int) -> tuple[Repository, list[bytes]]:
    contents = drifting(steps)
    owner = actor(world)
    for content in contents:
        owner.commit(draft(w=content), options=Options(workers=1))
    return owner, contents


def test_bases_of_what_stays_are_kept() -> None:
    world = World()
    owner, contents = chain_of(world, 4)
    names = list(owner.snapshots())
    for name in names[1:]:
        owner.forget(name)
    sweep(world)
    assert owner.read(names[0], "w") == contents[-1]
    whole(world, 1)


def test_bases_of_young_objects_are_kept_though_nothing_refers_to_them_yet() -> None:
    """A delta uploaded a moment ago by a writer that has not come to its pending."""
    world = World()
    owner, contents = chain_of(world, 2)
    for name in list(owner.snapshots()):
        owner.forget(name)
    world.clock += 1000
    late = drifting(3)[-1]

    def before(method: str, name: str) -> None:
        if method == "create" and name.startswith("pending/") and not done:
            done.append(1)
            world.clock += 1
            report = prune(actor(world), grace=5.0, sweep=LENGTH)
            deltas = [h for h in (o.header for o in look_now(world).values()) if h and h.base]
            stored = {n.rpartition("/")[2] for n in world.names if n.startswith("objects/")}
            assert all(h.base in stored for h in deltas), report

    done: list[int] = []
    # The newest snapshot still lists while the writer looks for bases.
    owner.unforget(next(iter(owner.forgotten())))
    writer = actor(world, before=before)
    writer.commit(draft(w=late), options=Options(workers=1))
    assert done
    assert writer.read("latest", "w") == late


def look_now(world: World) -> dict:
    from castore.reach import list_objects

    return list_objects(actor(world))


def test_deltas_go_before_bases_and_a_base_stays_when_its_delta_does() -> None:
    world = World()
    owner, _ = chain_of(world, 3)
    headers = {d: o.header for d, o in look_now(world).items()}
    for name in list(owner.snapshots()):
        owner.forget(name)
    world.clock += 1000
    deleted: list[str] = []
    deltas = [d for d, h in headers.items() if h and h.base]
    assert deltas, "the series must be delta-coded for this test to mean anything"
    deepest = max(deltas, key=lambda d: headers[d].depth if headers[d] else 0)

    def before(method: str, name: str) -> None:
        if method == "delete" and name.startswith("objects/"):
            digest = name.rpartition("/")[2]
            if digest == deepest:
                raise BackendError("refused")
            deleted.append(digest)

    report = prune(actor(world, before=before), grace=0, sweep=LENGTH)
    assert [n for n, _ in report.failed] == [f"objects/{deepest[:2]}/{deepest}"]
    at = headers[deepest]
    while at and at.base:
        assert at.base not in deleted
        at = headers[at.base]


def test_a_broken_chain_is_replaced_by_a_frame_without_a_base() -> None:
    """Present does not mean readable until its chain was seen: the writer holds the content."""
    world = World()
    owner, contents = chain_of(world, 2)
    headers = {d: o.header for d, o in look_now(world).items()}
    base = next(h.base for h in headers.values() if h and h.base)
    del world.names[f"objects/{base[:2]}/{base}"]
    for name in list(owner.snapshots()):
        owner.forget(name)
    fresh = actor(world).commit(draft(w=contents[1]))
    assert actor(world).read(fresh.name, "w") == contents[1]


def test_a_store_without_conditions_prunes_only_offline() -> None:
    world = World()
    owner = actor(world)
    owner.forget(owner.commit(draft(a=b"x" * 1000)).name)
    world.clock += 1000
    pruner = actor(world)
    pruner.backend.probe = lambda: False  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="--offline"):
        prune(pruner, grace=0)
    assert prune(pruner, grace=0, offline=True).objects == 2


@pytest.mark.parametrize("vanishes", [True, False])
def test_a_prune_that_meets_what_another_took_meanwhile_goes_on(vanishes: bool) -> None:
    """Frozen between a forgotten document and its tree, while the grace ends and another sweeps.

    The other's delete of the document may have had no answer: it stands, but its grace is over.
    """
    world = World()
    owner = actor(world)
    name = owner.commit(draft(a=b"x" * 1000)).name
    tree = owner.snapshot(name).tree
    owner.forget(name)
    data = world.names[name.forgotten]

    def other() -> None:
        sweep(world)
        if not vanishes:
            world.names[name.forgotten] = data

    hook = once("get", f"objects/{tree[:2]}/{tree}", other)
    prune(actor(world, before=hook), grace=5.0, sweep=LENGTH)
    assert not [n for n in world.names if n.startswith("objects/")]


def test_an_unforget_whose_last_answer_is_lost_is_done() -> None:
    """The snapshot stands: nothing may make its caller believe that it does not."""
    world = World()
    owner = actor(world)
    name = owner.commit(draft(a=b"x" * 1000)).name
    owner.forget(name)
    fresh = actor(world, after=lose("delete", "forgotten/")).unforget(name)
    assert list(actor(world).snapshots()) == [fresh] and not list(actor(world).forgotten())
    whole(world, 1)


@pytest.mark.parametrize("acted", [True, False])
def test_an_unanswered_replacement_of_a_broken_frame_is_sent_again(acted: bool) -> None:
    world = World()
    owner, contents = chain_of(world, 2)
    base = next(o.header.base for o in look_now(world).values() if o.header and o.header.base)
    del world.names[f"objects/{base[:2]}/{base}"]
    hook = lose("replace", "objects/")
    writer = actor(world, after=hook) if acted else actor(world, before=hook)
    fresh = writer.commit(draft(w=contents[1]))
    assert actor(world).read(fresh.name, "w") == contents[1]
