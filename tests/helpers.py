"""What the tests share: content that looks like checkpoints, folders, raw access to a store."""

from __future__ import annotations

import itertools
import json
import os
import signal
import stat as st
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from fsspec.implementations.memory import MemoryFileSystem

from castore import frame
from castore.check import CheckReport, Problem, check
from castore.objects import digest_of_name, object_name
from castore.publish import Patience
from castore.repository import Repository
from castore.snapshot import SnapshotName
from castore.source import Draft, MemoryFile, SourceEntry
from castore.tree import File, Folder, Link
from castore.usage import usage
from tests.faults import Clock

_numbers = itertools.count()
ODD_ROOTS = ["lr[1e-3]", "a?b", "50%", "x#y", "sp ace", "ünï", "st*r"]


_memory = f"test-{os.getpid()}-"
_of_test = ""


def memory_url() -> str:
    """A place in fsspec's memory that no other test uses; what earlier tests left there goes."""
    global _of_test
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test != _of_test:
        empty_memory()
        _of_test = test
    return f"memory://{_memory}{next(_numbers)}/store"


def empty_memory() -> None:
    """Take away all places of `memory_url`: fsspec searches through everything it holds."""
    for held in (MemoryFileSystem.store, MemoryFileSystem.pseudo_dirs):
        for name in [n for n in held if n.startswith(f"/{_memory}")]:
            held.pop(name) if isinstance(held, dict) else held.remove(name)


def new_url(kind: str, tmp_path: Path, name: str = "store") -> str:
    return memory_url() if kind == "memory" else str(tmp_path / name)


def new_repository(kind: str, tmp_path: Path, name: str = "store") -> Repository:
    return Repository.init(new_url(kind, tmp_path, name))


def with_backend(repository: Repository, backend: Any, **patience: Any) -> Repository:
    """The same repository seen through another (wrapped) backend."""
    return Repository(backend, repository.id, Patience(**patience))


def clocked(repository: Repository, ahead: float = 0.0) -> tuple[Repository, Clock]:
    """The same repository on a clock that ``sleep`` moves on."""
    clock = Clock(repository.backend, ahead)
    return with_backend(repository, clock, sleep=clock.sleep), clock


def age(repository: Repository) -> None:
    """Let what is stored get older than a grace of zero, by the store's clock (S3: in seconds)."""
    backend = repository.backend
    now = backend.now()
    while backend.now() <= now:
        time.sleep(0.05)


@contextmanager
def interrupted(function: FunctionType) -> Iterator[None]:
    """Ctrl-C comes once the main thread is in ``function``, or in what that one calls."""
    main, given_up = threading.main_thread().ident, threading.Event()
    assert main is not None

    def within() -> bool:
        frame = sys._current_frames().get(main)
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back
        return frame is not None

    def interrupt() -> None:
        while not given_up.wait(0.01):
            if within():
                signal.pthread_kill(main, signal.SIGINT)
                return

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind nohup
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        given_up.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


# -- content


def weights(n: int = 20_000, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Normally distributed float32, as weights are; 80 kB by default, so a blob of its own."""
    return np.random.default_rng(seed).standard_normal(n, dtype=np.float32)


def drift(
    array: np.ndarray[Any, np.dtype[np.float32]], seed: int, step: float = 1e-4
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """One training step later."""
    noise = np.random.default_rng(seed).standard_normal(len(array), dtype=np.float32)
    return (array * (1 + step * noise)).astype(np.float32)


def noise(n: int, seed: int = 0) -> bytes:
    """Bytes that nothing compresses."""
    return np.random.default_rng(seed).bytes(n)


def safetensors(
    tensors: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A safetensors file of float32 tensors, metadata in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, t in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(t.shape),
            "data_offsets": [at, at + t.nbytes],
        }
        at += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(t.tobytes() for t in tensors.values())


def series(n: int, size: int = 20_000) -> list[bytes]:
    """``n`` safetensors files of one tensor that drifts."""
    array, files = weights(size), []
    for i in range(n):
        files.append(safetensors({"w": array}))
        array = drift(array, i + 1)
    return files


def draft(content: Mapping[str, bytes | SourceEntry], **more: Any) -> Draft:
    """A draft from bytes."""
    entries = {p: MemoryFile(c) if isinstance(c, bytes) else c for p, c in content.items()}
    return Draft(entries, **more)


# -- folders


def lay(root: Path, content: Mapping[str, bytes | SourceEntry]) -> Path:
    """Write ``content`` below ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    for path, entry in content.items():
        full = root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, Folder):
            full.mkdir()
        elif isinstance(entry, Link):
            full.symlink_to(entry.target)
        elif isinstance(entry, bytes):
            full.write_bytes(entry)
        else:
            assert isinstance(entry, MemoryFile)
            full.write_bytes(entry.data)
            full.chmod(0o755 if entry.executable else 0o644)
    return root


def folder(root: Path) -> dict[str, bytes | SourceEntry]:
    """What `lay` would need to write what is at ``root``; no link is followed."""
    found: dict[str, bytes | SourceEntry] = {}
    for at, folders, files in os.walk(root):
        here = Path(at)
        for name in [*folders, *files]:
            path = here / name
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = Link(os.readlink(path))
            elif path.is_dir():
                if not os.listdir(path):
                    found[key] = Folder()
            elif path.stat().st_mode & st.S_IXUSR:
                found[key] = MemoryFile(path.read_bytes(), executable=True)
            else:
                found[key] = path.read_bytes()
    return found


def contents(repository: Repository, name: SnapshotName | str) -> dict[str, bytes | SourceEntry]:
    """What a snapshot holds, in the words of `lay`, by `Repository.read_file`."""
    found: dict[str, bytes | SourceEntry] = {}
    for path, entry in repository.tree(name).entries.items():
        if isinstance(entry, File):
            data = b"".join(repository.read_file(entry))
            found[path] = MemoryFile(data, executable=True) if entry.executable else data
        else:
            found[path] = entry
    return found


# -- frames in one piece


def encode_raw(content: bytes, width: int = 1) -> bytes:
    return b"".join(frame.raw(content, width))


def encode_packed(content: bytes, width: int) -> bytes:
    return b"".join(frame.packed(content, width))


def encode_delta(content: bytes, base: bytes, digest: str, depth: int, width: int) -> bytes:
    return b"".join(frame.delta(content, base, digest, depth, width))


# -- raw access


def raw(repository: Repository) -> dict[str, bytes]:
    """Every stored name and its bytes."""
    backend = repository.backend
    return {s.name: backend.get(s.name) for s in backend.list("")}


def headers(repository: Repository) -> dict[str, frame.Header]:
    """The header of every object."""
    found = {}
    for stat in repository.store.list():
        digest = digest_of_name(stat.name)
        header = repository.store.header(digest)
        assert header is not None
        found[digest] = header
    return found


def overwrite(repository: Repository, name: str, data: bytes) -> None:
    """Put other bytes under a stored name, as damage does; the version changes."""
    backend = repository.backend
    backend.delete(name)
    backend.create(name, data)


def flip(data: bytes, at: int, mask: int = 1) -> bytes:
    changed = bytearray(data)
    changed[at] ^= mask
    return bytes(changed)


def flip_object(repository: Repository, digest: str, at: int = -1) -> None:
    name = object_name(digest)
    overwrite(repository, name, flip(repository.backend.get(name), at))


def problems(repository: Repository, **how: Any) -> list[Problem]:
    how.setdefault("read_data", True)
    return list(check(repository, **how))


def checked(repository: Repository, **how: Any) -> tuple[list[Problem], CheckReport]:
    report = CheckReport()
    return problems(repository, report=report, **how), report


def blobs(repository: Repository, name: SnapshotName | str, path: str) -> list[str]:
    """The digests a file needs."""
    entry = repository.tree(name).entries[path]
    assert isinstance(entry, File)
    return entry.blobs()


def usage_adds_up(repository: Repository) -> None:
    """Whatever is stored is somebody's alone, shared, or nobody's."""
    found = usage(repository)
    sizes = {n: len(d) for n, d in raw(repository).items() if n.startswith("objects/")}
    assert (found.stored, found.objects) == (sum(sizes.values()), len(sizes))
    for shares in (found.namespaces, found.snapshots):
        assert sum(s.logical for s in shares) == found.logical
        assert all(s.unique <= s.stored for s in shares)
        used = found.stored - found.unreferenced
        assert sum(s.unique for s in shares) <= used <= sum(s.stored for s in shares)
