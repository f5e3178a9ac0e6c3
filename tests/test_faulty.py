"""The backend that fails on purpose does so when and how it was told."""

from __future__ import annotations

import secrets

import pytest

from castore.backend import Backend, UnansweredError
from castore.backends import open_backend
from castore.errors import BackendError, ObjectNotFoundError
from castore.testing.faulty import Call, Crash, Fault, FaultyBackend


@pytest.fixture
def inner() -> Backend:
    backend = open_backend(f"memory://{secrets.token_hex(8)}")
    backend.create("a", b"data")
    return backend


def test_without_a_plan_it_changes_nothing_and_logs(inner: Backend) -> None:
    faulty = FaultyBackend(inner)
    assert faulty.get("a", 1, 3) == b"at"
    assert faulty.create_many([("a", b"data"), ("b", b"")])[0] is None
    assert [s.name for s in faulty.list("")] == ["a", "b"]
    assert faulty.calls == [
        Call("get", "a"),
        Call("create_many", "a"),
        Call("create_many", "b"),
        Call("list", ""),
    ]


def test_fails_at_the_chosen_calls_only(inner: Backend) -> None:
    faulty = FaultyBackend(inner, [Fault("fail", at=2, times=2, method="get", name="a")])
    outcomes = []
    for _ in range(4):
        try:
            outcomes.append(faulty.get("a"))
        except BackendError:
            outcomes.append(b"failed")
        with pytest.raises(ObjectNotFoundError):
            faulty.get("other")
    assert outcomes == [b"data", b"failed", b"failed", b"data"]


@pytest.mark.parametrize(
    ("kind", "error", "acted"),
    [
        ("fail", BackendError, False),
        ("crash", Crash, False),
        ("crash_after", Crash, True),
        ("lose", UnansweredError, True),
        ("lose_before", UnansweredError, False),
    ],
)
def test_acts_or_not(inner: Backend, kind: str, error: type[BaseException], acted: bool) -> None:
    faulty = FaultyBackend(inner, [Fault(kind, method="create")])  # type: ignore[arg-type]
    with pytest.raises(error):
        faulty.create("new", b"x")
    assert ("new" in [s.name for s in inner.list("")]) is acted


def test_damages_what_is_read(inner: Backend) -> None:
    faulty = FaultyBackend(inner, [Fault("truncate"), Fault("flip", at=2, times=2)])
    assert faulty.get("a") == b"dat"
    assert faulty.get("a") == b"dat" + bytes([ord("a") ^ 1])
    assert faulty.get_versioned("a")[0] == b"dat" + bytes([ord("a") ^ 1])


def test_a_crash_falls_between_two_items(inner: Backend) -> None:
    faulty = FaultyBackend(inner, [Fault("crash", at=2, method="create_many")])
    with pytest.raises(Crash):
        faulty.create_many([("x", b""), ("y", b"")])
    assert [s.name for s in inner.list("")] == ["a", "x"]


def test_a_lost_delete_is_an_outcome(inner: Backend) -> None:
    faulty = FaultyBackend(inner, [Fault("lose", method="delete_many")])
    outcomes = faulty.delete_many(["a", "b"])
    assert [type(o) for o in outcomes] == [UnansweredError, type(None)]
    assert list(inner.list("")) == []


def test_the_hook_runs_first(inner: Backend) -> None:
    faulty = FaultyBackend(inner, hook=lambda call: inner.delete(call.name))
    with pytest.raises(ObjectNotFoundError):
        faulty.get("a")
