"""Run castore on one thread, each pure function computed once for equal arguments.

For schedulers that switch between actors inside backend calls: with `one_thread` every call of an
actor comes from that actor's own frame, and a commit costs microseconds instead of the start of a
dozen threads. What is called, and in which order for one blob, stays as it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from castore import (
    base_contents,
    bases,
    commit,
    copy,
    cut,
    frame,
    objects,
    prune,
    publish,
    reach,
    save,
    walk,
)
from castore import repository as repository_
from castore.digest import digest_of
from castore.encode import encode
from castore.frame import Parts
from castore.snapshot import Snapshot, name_of, parse_name
from castore.source import Draft
from castore.tree import Tree, build_tree
from castore.write import Budget, FrameWriter

_REMEMBERED = 20_000


class InlineExecutor:
    """`ThreadPoolExecutor` whose work is done when it is handed in."""

    def __init__(self, workers: int = 1):
        del workers

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as e:
            future.set_exception(e)
        return future

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return iter([function(item) for item in items])

    def shutdown(self) -> None:
        """Nothing runs on."""

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *rest: object) -> None:
        """Nothing runs on."""


class InlineWriter(FrameWriter):
    """`FrameWriter` that puts each frame at once."""

    def __init__(self, store: objects.ObjectStore):
        self._store = store
        self._lock = threading.Lock()
        self._budget = _NoBudget(0)
        self.failure: BaseException | None = None
        self.added = self.objects = 0

    def put(self, digest: str, parts: Parts) -> None:
        self._put([(digest, parts)], 0)

    def __enter__(self) -> InlineWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self.failure:
            raise self.failure


class _NoBudget(Budget):
    """`Budget` for one thread, which can wait for nobody."""

    def __init__(self, limit: int):
        del limit

    def take(self, n: int) -> None:
        """There is room."""

    def give(self, n: int) -> None:
        """There is room."""


class _Remembered:
    """A pure function's results by its arguments, as long as this object lives."""

    def __init__(self, function: Callable[..., Any], key: Callable[..., Any] | None = None):
        self._function, self._key = function, key
        self._results: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        key = self._key(*args) if self._key else args
        try:
            return self._results[key]
        except KeyError:
            if len(self._results) >= _REMEMBERED:
                self._results.clear()
            result = self._results[key] = self._function(*args)
            return result


def _encode_key(content: Any, width: int, base: Any, compression: str) -> Any:
    return content, width, base, compression


def _decode_key(data: Any, base: Any = None, name: str = "", out: object = None) -> Any:
    return data, base, name


def _precheck_key(draft: Draft, namespace: str) -> Any:
    assert not draft.labels and not draft.facts
    return tuple(draft.entries), namespace


def _snapshot_key(s: Snapshot) -> Any:
    assert not s.labels and not s.facts
    return s.tree, s.time, s.namespace, s.driver, s.key, s.parents, s.files, s.size


def _entries_key(entries: Any) -> Any:
    return tuple(entries.items())


def _tree_key(tree: Tree) -> Any:
    return tuple(tree.entries.items())


def _method(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    remembered = _Remembered(function, key)
    return lambda self: remembered(self)


def _cut_key(name: str, size: int, read: object) -> Any:
    """Files below the smallest tensor are cut by their size alone."""
    assert size < cut.SMALL
    return size


def _replacements() -> list[tuple[Any, str, Any]]:
    """Module or class, name, and what stands there on one thread."""
    threads = [(m, "ThreadPoolExecutor", InlineExecutor) for m in (commit, objects, reach, walk)]
    writers = [(m, "FrameWriter", InlineWriter) for m in (commit, copy)]
    budgets = [(m, "Budget", _NoBudget) for m in (commit, walk)]
    header, decode = _Remembered(frame.parse_header), frame.decode
    encoded, digest = _Remembered(encode, _encode_key), _Remembered(digest_of)
    named = _Remembered(parse_name)
    pure = [
        *((m, "parse_header", header) for m in (commit, copy, frame)),
        *((m, "encode", encoded) for m in (commit, copy, save)),
        *((m, "digest_of", digest) for m in (base_contents, commit, objects, save)),
        (frame, "packed", _Remembered(frame.packed)),
        (frame, "decode", _Remembered(lambda *args: bytes(decode(*args)), _decode_key)),
        (commit, "cut", _Remembered(cut.cut, _cut_key)),
        (bases, "natural_key", _Remembered(bases.natural_key)),
        (bases, "series_of", _Remembered(bases.series_of)),
        (Tree, "decode", staticmethod(_Remembered(Tree.decode))),
        (base_contents, "PIECE", cut.SMALL),  # what a worker sets aside for a base
        (Snapshot, "decode", staticmethod(_Remembered(Snapshot.decode))),
        (Snapshot, "encode", _method(Snapshot.encode, _snapshot_key)),
        (Tree, "encode", _method(Tree.encode, _tree_key)),
        (save, "build_tree", _Remembered(build_tree, _entries_key)),
        (repository_, "precheck", _Remembered(save.precheck, _precheck_key)),
        (publish, "name_of", _Remembered(name_of)),
        *((m, "parse_name", named) for m in (prune, reach, repository_)),
    ]
    return [*threads, *writers, *budgets, *pure]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within this context castore starts no thread and remembers what pure functions gave."""
    changed = _replacements()
    before = [(place, name, place.__dict__[name]) for place, name, _ in changed]
    try:
        for place, name, value in changed:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
