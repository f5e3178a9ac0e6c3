"""The storage contract as a pytest class to inherit, one test a sentence.

    class TestMine(BackendTests):
        def make(self): return MyBackend(...)
        def raw_get(self, name): ...

``raw_get``, ``raw_put`` and ``raw_list`` go around the code under test, so that a backend that
lies to itself consistently is found out.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any, TypeVar

import pytest

from castore.backend import MAX_OBJECT, MISSING, Backend, ExpiredError
from castore.digest import Buffer
from castore.errors import AlreadyExistsError, InvalidInputError, ObjectNotFoundError

T = TypeVar("T")
NAME = "objects/ab/abcd"
ILLEGAL = ("", "/a", "a/", "a//b", "../a", "a/./b", "a/../../b", "a b", "a?b", "a*", "ü", "a\n")


class BackendTests:
    """Inherit, and give `make` and the three raw methods.

    Each test gets an empty place; every `make` of one test is about the same place.
    """

    races = True
    """Whether many threads may write at once (an emulator without locks cannot)."""
    across_processes = True
    """Whether other processes see the same bytes."""
    racers = 8

    def make(self) -> Backend:
        """A new backend on this test's place."""
        raise NotImplementedError

    def raw_get(self, name: str) -> bytes:
        """The stored bytes, around the backend."""
        raise NotImplementedError

    def raw_put(self, name: str, data: bytes) -> None:
        """Store or overwrite bytes, around the backend."""
        raise NotImplementedError

    def raw_list(self) -> list[str]:
        """Every stored name that a user could name, sorted, around the backend."""
        raise NotImplementedError

    @pytest.fixture
    def backend(self) -> Backend:
        made = self.make()
        made.prepare(shared=False)
        return made

    # -- reading

    def test_get_gives_what_was_created(self, backend: Backend) -> None:
        for i, data in enumerate([b"", b"x", bytes(range(256)) * 1000]):
            backend.create(f"a/{i}", data)
            assert backend.get(f"a/{i}") == data == self.raw_get(f"a/{i}")

    def test_get_sees_foreign_bytes(self, backend: Backend) -> None:
        self.raw_put(NAME, b"foreign")
        assert backend.get(NAME) == b"foreign"
        self.raw_put(NAME, b"other and longer")
        assert backend.get(NAME) == b"other and longer"
        assert backend.stat(NAME).size == 16

    def test_missing(self, backend: Backend) -> None:
        backend.create("a/b", b"1")
        for name in ("nothing", "a/nothing", "x/y/z", "a", "a/b/c"):
            for call in (backend.get, backend.get_versioned, backend.stat):
                with pytest.raises(ObjectNotFoundError, match=name):
                    call(name)

    def test_ranges(self, backend: Backend) -> None:
        data = bytes(range(100))
        backend.create(NAME, data)
        for start in (None, 0, 1, 50, 99, 100, 200):
            for stop in (None, 0, 1, 50, 64, 100, 1000):
                expected = data[start or 0 : stop]
                assert backend.get(NAME, start, stop) == expected, (start, stop)

    def test_ranges_of_nothing(self, backend: Backend) -> None:
        backend.create(NAME, b"")
        assert backend.get(NAME, 0, 64) == b""
        for bounds in ((0, 64), (5, 5), (None, 0)):
            with pytest.raises(ObjectNotFoundError):
                backend.get("missing", *bounds)

    def test_negative_bounds_are_refused(self, backend: Backend) -> None:
        backend.create(NAME, b"abc")
        for bounds in ((-1, None), (0, -1)):
            with pytest.raises(InvalidInputError):
                backend.get(NAME, *bounds)

    def test_versions_agree(self, backend: Backend) -> None:
        version = backend.create(NAME, b"1")
        data, read = backend.get_versioned(NAME)
        listed = next(iter(backend.list("objects")))
        assert data == b"1"
        assert version == read == backend.stat(NAME).version == listed.version != MISSING

    def test_stat(self, backend: Backend) -> None:
        before = backend.now()
        backend.create(NAME, b"12345")
        stat = backend.stat(NAME)
        assert (stat.name, stat.size) == (NAME, 5)
        assert before - 2 <= stat.modified <= backend.now() + 2
        assert next(iter(backend.list("objects"))) == stat

    # -- create

    def test_create_is_exclusive(self, backend: Backend) -> None:
        backend.create(NAME, b"first")
        for data in (b"second", b"first", b""):
            with pytest.raises(AlreadyExistsError, match="abcd"):
                backend.create(NAME, data)
        assert self.raw_get(NAME) == b"first"
        assert self.raw_list() == [NAME]

    def test_nothing_is_exclusive_too(self, backend: Backend) -> None:
        backend.create(NAME, b"")
        with pytest.raises(AlreadyExistsError):
            backend.create(NAME, b"")
        with pytest.raises(AlreadyExistsError):
            backend.create(NAME, b"x")
        assert self.raw_get(NAME) == b""

    def test_every_buffer(self, backend: Backend) -> None:
        view = memoryview(b"__view__")[2:6]
        backend.create("a", bytearray(b"array"))
        backend.create("b", view)
        backend.create_many([("c", view), ("d", bytearray(b""))])
        version = backend.replace("e", view, MISSING)
        backend.replace("e", bytearray(b"e2"), version)
        found = [self.raw_get(n) for n in "abcde"]
        assert found == [b"array", b"view", b"view", b"", b"e2"]

    def test_too_large_is_refused(self, backend: Backend) -> None:
        data = bytes(MAX_OBJECT + 1)
        calls: list[Callable[[], object]] = [
            lambda: backend.create(NAME, data),
            lambda: backend.create_many([(NAME, data)]),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError):
                call()
        assert self.raw_list() == []
        version = backend.replace(NAME, data, MISSING)  # a root's real file may be larger
        assert backend.stat(NAME).size == MAX_OBJECT + 1
        backend.replace(NAME, b"", version)

    def test_the_largest(self, backend: Backend) -> None:
        data = bytes(MAX_OBJECT - 3) + b"end"
        backend.create(NAME, data)
        assert backend.stat(NAME).size == MAX_OBJECT
        assert backend.get(NAME, MAX_OBJECT - 3) == b"end"
        assert backend.get(NAME) == data

    @pytest.mark.parametrize("name", ILLEGAL)
    def test_illegal_names_are_refused(self, backend: Backend, name: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: backend.get(name),
            lambda: backend.stat(name),
            lambda: backend.create(name, b""),
            lambda: backend.create_many([(name, b"")]),
            lambda: backend.replace(name, b"", MISSING),
            lambda: backend.delete(name),
            lambda: backend.delete_many([name]),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError):
                call()

    def test_create_many(self, backend: Backend) -> None:
        backend.create("objects/00/1", b"old")
        items = [(f"objects/{i % 7:02}/{i}", str(i).encode()) for i in range(100)]
        versions = backend.create_many([("objects/00/1", b"old"), *items])
        assert versions[0] is None
        assert versions[1:] == [backend.stat(name).version for name, _ in items]
        assert {n: self.raw_get(n) for n, _ in items} == dict(items)
        assert backend.create_many(items) == [None] * 100
        assert backend.create_many([]) == []
        backend.sync(name for name, _ in items)

    def test_write_many_joins_parts(self, backend: Backend) -> None:
        items: list[tuple[str, tuple[Buffer, ...]]] = [
            ("objects/00/1", (b"head", memoryview(b"payload"), bytearray(b""))),
            ("objects/00/2", (b"one",)),
            ("objects/01/3", ()),
        ]
        versions = backend.write_many(items)
        assert versions == [backend.stat(name).version for name, _ in items]
        assert [self.raw_get(n) for n, _ in items] == [b"headpayload", b"one", b""]
        backend.sync(name for name, _ in items)
        assert backend.write_many(items) == [None] * 3
        assert backend.create_many([("objects/00/2", b"one")]) == [None]
        assert backend.write_many([]) == []

    def test_write_many_counts_all_parts(self, backend: Backend) -> None:
        parts = (bytes(MAX_OBJECT), b"x")
        with pytest.raises(InvalidInputError):
            backend.write_many([(NAME, parts)])
        with pytest.raises(InvalidInputError):
            backend.write_many([("../x", (b"",))])
        assert self.raw_list() == []

    def test_create_many_of_one_name_twice(self, backend: Backend) -> None:
        versions = backend.create_many([(NAME, b"same"), (NAME, b"same")])
        assert sorted(v is None for v in versions) == [False, True]

    # -- replace

    def test_replace(self, backend: Backend) -> None:
        one = backend.replace("prune.json", b"1", MISSING)
        two = backend.replace("prune.json", b"2", one)
        assert one != two == backend.stat("prune.json").version
        assert self.raw_get("prune.json") == b"2"

    def test_replace_refuses_any_other_version(self, backend: Backend) -> None:
        with pytest.raises(AlreadyExistsError):
            backend.replace(NAME, b"x", backend.create("other", b"x"))
        one = backend.create(NAME, b"1")
        two = backend.replace(NAME, b"2", one)
        for version in (one, MISSING, two + "0", '"0123456789abcdef0123456789abcdef"'):
            with pytest.raises(AlreadyExistsError):
                backend.replace(NAME, b"3", version)
        assert self.raw_get(NAME) == b"2"
        backend.delete(NAME)
        with pytest.raises(AlreadyExistsError):
            backend.replace(NAME, b"3", two)

    def test_replace_sees_foreign_writes(self, backend: Backend) -> None:
        version = backend.create(NAME, b"mine")
        self.raw_put(NAME, b"foreign!")
        with pytest.raises(AlreadyExistsError):
            backend.replace(NAME, b"3", version)

    # -- list

    def test_list_is_sorted_and_paged(self, backend: Backend) -> None:
        names = [f"objects/{a}{b}/{a}{b}{i:02}" for a in "0af" for b in "19" for i in range(5)]
        backend.create_many([(n, b"") for n in reversed(names)])
        backend.create("objectsx", b"")
        names.sort()

        def listed(**how: Any) -> list[str]:
            return [s.name for s in backend.list("objects", **how)]

        assert listed() == names
        assert listed(limit=1) == names[:1]
        assert listed(limit=7) == names[:7]
        assert listed(limit=1000) == names
        for i in (0, 3, 4, 5, 28, 29):
            assert listed(after=names[i]) == names[i + 1 :]
            assert listed(after=names[i], limit=3) == names[i + 1 : i + 4]
        assert [s.name for s in backend.list("objects/01", after="objects/01/0102")] == names[3:5]

    def test_list_of_mixed_shapes_leaves_nothing_out(self, backend: Backend) -> None:
        names = sorted(["a/b/1", "a/b-c/1", "a/b.d/1", "a/b/c/2", "a/a", "a/z", "ab", "a-b", "b/x"])
        backend.create_many([(n, b"") for n in names])
        assert [s.name for s in backend.list("")] == names
        assert [s.name for s in backend.list("a")] == [n for n in names if n.startswith("a/")]

    def test_list_of_nothing(self, backend: Backend) -> None:
        assert list(backend.list("objects")) == []
        assert list(backend.list("")) == []
        backend.create("a", b"")
        assert list(backend.list("a")) == []

    def test_list_hides_tmp_unless_asked(self, backend: Backend) -> None:
        backend.create("tmp/x", b"")
        backend.create("y", b"")
        assert [s.name for s in backend.list("")] == ["y"]
        assert "tmp/x" in [s.name for s in backend.list("tmp")]

    def test_list_passes_over_a_page(self, backend: Backend) -> None:
        names = [f"s/n/{i:04}" for i in range(1003)]
        backend.create_many([(n, b"") for n in names])
        assert [s.name for s in backend.list("s/n")] == names
        assert [s.name for s in backend.list("s/n", limit=1001)] == names[:1001]

    def test_list_sees_foreign_names(self, backend: Backend) -> None:
        assert list(backend.list("a")) == []
        self.raw_put("a/1", b"")
        assert [s.name for s in backend.list("a")] == ["a/1"]

    def test_folders(self, backend: Backend) -> None:
        for name in ("s/b/1", "s/a/x/2", "s/a.b/4", "s/c-d/3", "s/file", "t/z"):
            backend.create(name, b"")
        assert backend.folders("s") == ["a", "a.b", "b", "c-d"]
        assert backend.folders("s/a") == ["x"]
        assert backend.folders("nothing") == []
        backend.delete("s/b/1")
        assert backend.folders("s") == ["a", "a.b", "c-d"]

    # -- delete

    def test_delete(self, backend: Backend) -> None:
        backend.create(NAME, b"")
        backend.delete(NAME)
        backend.delete(NAME)
        backend.delete("never/was/there")
        assert self.raw_list() == []
        backend.create(NAME, b"again")
        assert self.raw_get(NAME) == b"again"

    def test_delete_many(self, backend: Backend) -> None:
        names = [f"objects/{i:02}/x" for i in range(40)]
        backend.create_many([(n, b"x") for n in names])
        outcomes = backend.delete_many([*names[:30], "missing"], backend.now() + 60)
        assert outcomes == [None] * 31
        assert self.raw_list() == names[30:]
        assert backend.delete_many(names) == [None] * 40
        assert backend.delete_many([]) == []
        assert self.raw_list() == []

    def test_delete_after_its_end_is_refused(self, backend: Backend) -> None:
        backend.create(NAME, b"stays")
        past = backend.now() - 2
        with pytest.raises(ExpiredError):
            backend.delete(NAME, past)
        assert [type(o) for o in backend.delete_many([NAME, "x"], past)] == [ExpiredError] * 2
        assert self.raw_get(NAME) == b"stays"
        backend.delete(NAME, backend.now() + 60)
        assert self.raw_list() == []

    # -- the rest

    def test_now(self, backend: Backend) -> None:
        began, first = time.monotonic(), backend.now()
        time.sleep(1.1)
        passed = backend.now() - first
        assert 0.1 <= passed <= time.monotonic() - began + 2  # in seconds, whole ones on S3

    def test_probe_leaves_nothing(self, backend: Backend) -> None:
        assert backend.probe() is True
        assert self.raw_list() == []
        assert list(backend.list("tmp")) == []

    def test_two_backends_see_one_place(self, backend: Backend) -> None:
        other = self.make()
        assert list(other.list("a")) == []
        version = backend.create("a/1", b"1")
        assert other.get("a/1") == b"1"
        other.replace("a/1", b"22", version)
        assert backend.get("a/1") == b"22"
        with pytest.raises(AlreadyExistsError):
            backend.replace("a/1", b"3", version)
        other.delete("a/1")
        assert list(backend.list("a")) == []

    def test_prepare_twice(self, backend: Backend) -> None:
        backend.create(NAME, b"x")
        self.make().prepare(shared=False)
        assert backend.get(NAME) == b"x"

    def test_locks_can_be_taken(self, backend: Backend) -> None:
        with backend.lock(exclusive=False, timeout=5), backend.lock(exclusive=False, timeout=5):
            backend.create("a", b"")
        with backend.lock(exclusive=True, timeout=5):
            backend.create("b", b"")

    def test_pickle(self, backend: Backend) -> None:
        backend.create(NAME, b"x")
        copy = pickle.loads(pickle.dumps(backend))  # noqa: S301
        assert (copy.url, copy.kind) == (backend.url, backend.kind)
        if self.across_processes or backend.kind == "memory":
            assert copy.get(NAME) == b"x"

    # -- many at once

    def test_threads_use_one_backend(self, backend: Backend) -> None:
        def work(i: int) -> bytes:
            name = f"objects/{i % 4:02}/{i}"
            backend.create(name, str(i).encode())
            return backend.get(name) + str(backend.stat(name).size).encode()

        if not self.races:
            pytest.skip("no races on this store")
        with ThreadPoolExecutor(self.racers) as pool:
            found = list(pool.map(work, range(40)))
        assert found == [f"{i}{len(str(i))}".encode() for i in range(40)]

    def test_one_of_many_creates_wins(self, backend: Backend) -> None:
        if not self.races:
            pytest.skip("no races on this store")
        for n in range(3):
            name = f"race/{n}"
            outcomes = _at_once(self.racers, partial(_created, backend, name))
            winners = [i for i, won in enumerate(outcomes) if won]
            assert len(winners) == 1
            assert self.raw_get(name) == _content(winners[0])

    def test_compare_and_swap_loses_no_update(self, backend: Backend) -> None:
        if not self.races:
            pytest.skip("no races on this store")
        backend.create("counter", b"0")

        def count(_: int) -> int:
            lost = 0
            for _ in range(3):
                while not _increment(backend, "counter"):
                    lost += 1
            return lost

        _at_once(self.racers, count)
        assert self.raw_get("counter") == str(3 * self.racers).encode()

    def test_readers_never_see_half(self, backend: Backend) -> None:
        if not self.races:
            pytest.skip("no races on this store")
        whole = [bytes([65 + i]) * 300_000 for i in range(4)]
        version = backend.create("torn", whole[0])

        def read(i: int) -> bool:
            return i == 0 or all(backend.get("torn") in whole for _ in range(10))

        def write() -> None:
            current = version
            for i in range(12):
                current = backend.replace("torn", whole[i % 4], current)

        with ThreadPoolExecutor(4) as pool:
            writer = pool.submit(write)
            assert all(pool.map(read, range(4)))
            writer.result()

    @pytest.mark.parametrize("how", ["fork", "spawn"])
    def test_other_processes(self, backend: Backend, how: str) -> None:
        if not self.across_processes:
            pytest.skip("this store is a process's own")
        backend.create("from/parent", b"p")
        context: Any = multiprocessing.get_context(how)
        children = [context.Process(target=_child, args=(backend, i)) for i in range(2)]
        for child in children:
            child.start()
        backend.create("from/parent-2", b"p")
        codes = []
        for child in children:
            child.join(120)
            codes.append(child.exitcode)
            if child.is_alive():
                child.kill()
        assert codes == [0, 0]
        assert [backend.get(f"from/child-{i}") for i in range(2)] == [b"0", b"1"]


def _child(backend: Backend, i: int) -> None:
    assert backend.get("from/parent") == b"p"
    backend.create(f"from/child-{i}", str(i).encode())
    assert backend.create_many([(f"from/child-{i}", str(i).encode())]) == [None]


def _at_once(n: int, work: Callable[[int], T]) -> list[T]:
    """``work`` on ``n`` threads that set out together."""
    barrier = Barrier(n)

    def one(i: int) -> T:
        barrier.wait(60)
        return work(i)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))


def _content(i: int) -> bytes:
    return bytes([i]) * (10_000 + i)


def _created(backend: Backend, name: str, i: int) -> bool:
    try:
        backend.create(name, _content(i))
    except AlreadyExistsError:
        return False
    return True


def _increment(backend: Backend, name: str) -> bool:
    data, version = backend.get_versioned(name)
    try:
        backend.replace(name, str(int(data) + 1).encode(), version)
    except AlreadyExistsError:
        return False
    return True
