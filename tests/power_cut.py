"""What a disk may hold after the power went: calls recorded, their effects lost or reordered.

A `Disk` follows the calls on one folder as POSIX promises them and no better: a file's bytes are
there for sure after `fsync` of the file, a name after `fsync` of its folder. Until then each name,
by itself, may be as it was at any moment since, in whatever order the calls came, and an unsynced
file may be empty, cut or whole.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest

State: TypeAlias = dict[str, bytes | None]
"""Relative path -> content; None for a folder."""


@dataclass(eq=False, slots=True)
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bool = True  # empty, as it was made

    def after_cut(self, rng: random.Random) -> bytes:
        data = bytes(self.content)
        return data if self.synced else data[: rng.choice([0, len(data) // 2, len(data)])]


@dataclass(eq=False, slots=True)
class _Folder:
    names: dict[str, list[_Node | None]] = field(default_factory=dict)
    """For each name all it stood for since the folder was last synced, the newest last."""

    def now(self, name: str) -> _Node | None:
        return self.names.get(name, [None])[-1]

    def put(self, name: str, node: _Node | None) -> None:
        self.names.setdefault(name, [None]).append(node)

    def sync(self) -> None:
        self.names = {n: [h[-1]] for n, h in self.names.items() if h[-1] is not None}


_Node: TypeAlias = _File | _Folder


class Disk:
    """The shadow of ``root``; ``cut`` is called after each call that changed something.

    ``calls`` counts those. Made while the folder is empty, or what is there counts as synced.
    """

    def __init__(self, root: Path, cut: Callable[[Disk], None] = lambda _: None):
        self.root, self.cut = Path(os.path.abspath(root)), cut
        self.top = _read(self.root)
        self.calls = 0
        self._fds: dict[int, _Node] = {}
        self._lock = threading.RLock()

    # -- what may be there after a cut

    def state(self, rng: random.Random, lost: float) -> State:
        """One possible state; each name that is not synced is an older one by chance ``lost``."""
        found: State = {}
        with self._lock:
            self._collect(self.top, "", rng, lost, found)
        return found

    def _collect(
        self, folder: _Folder, prefix: str, rng: random.Random, lost: float, found: State
    ) -> None:
        for name, history in sorted(folder.names.items()):
            older = len(history) > 1 and rng.random() < lost
            node = rng.choice(history[:-1]) if older else history[-1]
            if isinstance(node, _File):
                found[prefix + name] = node.after_cut(rng)
            elif node is not None:
                found[prefix + name] = None
                self._collect(node, f"{prefix}{name}/", rng, lost, found)

    # -- following the calls

    @contextmanager
    def watching(self) -> Iterator[Disk]:
        """Follow every call of this process on the folder."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "close", "write", "fsync", "link", "rename", "replace", "mkdir"):
                patch.setattr(os, name, self._wrap(name))
            for name in ("unlink", "remove", "rmdir"):
                patch.setattr(os, name, self._wrap(name, self._removed))
            yield self

    def _wrap(self, name: str, follow: Callable[..., bool] | None = None) -> Callable[..., Any]:
        real = getattr(os, name)
        noted = follow or getattr(self, f"_{name}")

        def call(*args: Any, **more: Any) -> Any:
            with self._lock:
                before = self._fds.pop(args[0], None) if name == "close" else None
                result = real(*args, **more)
                if before is None and noted(result, *args, **more):
                    self.calls += 1
                    self.cut(self)
            return result

        return call

    def _close(self, *_: Any) -> bool:
        return False

    def _open(self, fd: int, path: Any, flags: int, mode: int = 0, **more: Any) -> bool:
        assert more.get("dir_fd") is None or not self._at(path)
        at = self._at(path)
        if at is None:
            return False
        node: _Node | None
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            node = _File()
        else:
            node = self._find(at)
            if node is None:
                node = _File()
                self._parent(at).put(at[-1], node)
        self._fds[fd] = node
        return False

    def _write(self, count: int, fd: int, data: Any) -> bool:
        node = self._fds.get(fd)
        if isinstance(node, _File):
            node.content += bytes(memoryview(data).cast("B")[:count])
            node.synced = False
        return isinstance(node, _File)

    def _fsync(self, _: None, fd: int) -> bool:
        node = self._fds.get(fd)
        if isinstance(node, _File):
            node.synced = True
        elif node is not None:
            node.sync()
        return node is not None

    def _link(self, _: None, source: Any, target: Any, **more: Any) -> bool:
        at = self._at(target)
        if at is None:
            return False
        text = os.fspath(source)
        start = "/proc/self/fd/"
        if text.startswith(start):
            node: _Node | None = self._fds[int(text.removeprefix(start))]
        else:
            node = self._find(self._at(source))
        self._parent(at).put(at[-1], node)
        return True

    def _rename(self, _: None, source: Any, target: Any, **more: Any) -> bool:
        old, new = self._at(source), self._at(target)
        if old is None or new is None:
            return False
        node = self._find(old)
        self._parent(old).put(old[-1], None)
        self._parent(new).put(new[-1], node)
        return True

    _replace = _rename

    def _mkdir(self, _: None, path: Any, *args: Any, **more: Any) -> bool:
        at = self._at(path)
        if at:
            self._parent(at).put(at[-1], _Folder())
        return bool(at)

    def _removed(self, _: None, path: Any, **more: Any) -> bool:
        at = self._at(path)
        if at:
            self._parent(at).put(at[-1], None)
        return bool(at)

    def _at(self, path: Any) -> tuple[str, ...] | None:
        """The elements below the root, or None for a path elsewhere."""
        if isinstance(path, int):
            return None
        try:
            return Path(os.path.abspath(os.fspath(path))).relative_to(self.root).parts
        except ValueError:
            return None

    def _find(self, at: tuple[str, ...] | None) -> _Node | None:
        node: _Node | None = self.top
        for part in at or ():
            node = node.now(part) if isinstance(node, _Folder) else None
        return node

    def _parent(self, at: tuple[str, ...]) -> _Folder:
        found = self._find(at[:-1])
        assert isinstance(found, _Folder), at
        return found


def _read(folder: Path) -> _Folder:
    made = _Folder()
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir():
            made.names[path.name] = [_read(path)]
        else:
            made.names[path.name] = [_File(bytearray(path.read_bytes()))]
    return made


def lay_state(state: State, at: Path) -> Path:
    """Write a state to the empty place ``at``."""
    at.mkdir()
    for name, content in sorted(state.items()):
        if content is None:
            (at / name).mkdir()
        else:
            (at / name).write_bytes(content)
    return at
