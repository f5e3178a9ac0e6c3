"""Bytes from anyone, to every reader: a value or one of castore's errors, within stated bounds.

`tests.fuzz.contract` states the bounds, `tests.fuzz.targets` the readers. What a long run with
atheris (``python -m tests.fuzz.run``) kept is replayed here, and valid files are mangled anew.
"""

from __future__ import annotations

import functools
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from tests.fuzz import contract
from tests.fuzz.run import CORPUS
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

REGRESSIONS = CORPUS.parent / "regressions"
targets = pytest.mark.parametrize("target", TARGETS)


@functools.cache
def guard() -> contract.Guard:
    """One for the process: a hook cannot be taken back."""
    return contract.Guard()


def kept(folder: Path, target: str) -> list[bytes]:
    return [p.read_bytes() for p in sorted((folder / target).iterdir())]


@targets
def test_what_fuzzing_reached_keeps_the_contract(target: str) -> None:
    for data in [*seeds(target), *kept(CORPUS, target)]:
        contract.run_measured(TARGETS[target], data, guard())


@pytest.mark.parametrize("path", sorted(REGRESSIONS.rglob("*-*")), ids=lambda p: p.name)
def test_what_broke_a_reader_once_does_no_more(path: Path) -> None:
    contract.run_measured(TARGETS[path.parent.name], path.read_bytes(), guard())


def test_the_corpus_is_whole_and_small() -> None:
    assert {p.name for p in CORPUS.iterdir()} == set(TARGETS)
    sizes = [p.stat().st_size for d in (CORPUS, REGRESSIONS) for p in d.rglob("*") if p.is_file()]
    assert sum(sizes) < 300_000


HUGE = [b"\xff" * 4, b"\xff" * 8, b"\0\0\0\x7f", b"\0\0\0\x80", b"9" * 19, b"-1", b"1e999", b"NaN"]


@some.composite
def mangled(draw: some.DrawFn, target: str) -> bytes:
    """A valid file after some flips, cuts, numbers made huge, and splices with another one."""
    pool = [*seeds(target), *kept(CORPUS, target)]
    data = bytearray(draw(some.sampled_from(pool)))
    for _ in range(draw(some.integers(1, 4))):
        at = draw(some.integers(0, max(0, len(data) - 1)))
        how = draw(some.sampled_from(["flip", "cut", "huge", "splice", "repeat", "drop"]))
        if how == "flip" and data:
            data[at] ^= draw(some.integers(1, 255))
        elif how == "cut":
            del data[at:]
        elif how == "huge":
            number = draw(some.sampled_from(HUGE))
            data[at : at + len(number)] = number
        elif how == "splice":
            other = draw(some.sampled_from(pool))
            data[at:] = other[draw(some.integers(0, len(other))) :]
        elif how == "repeat":
            data[at:at] = data[at : at + 40] * draw(some.integers(1, 20))
        else:
            del data[at : at + draw(some.integers(1, 40))]
    return bytes(data)


@targets
def test_mangled_files_keep_the_contract(target: str) -> None:
    @settings(
        max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(mangled(target))
    def check(data: bytes) -> None:
        contract.run(TARGETS[target], data, guard())

    check()


# -- the contract itself


class Caught:
    """Unpickled, it looks up a function."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.getcwd, ()


@pytest.mark.parametrize(
    "breach",
    [
        lambda data: Path("/tmp/never-made").write_bytes(data),
        lambda data: os.mkdir("/tmp/never-made"),
        lambda data: pickle.loads(data),
        lambda data: os.system("true"),
    ],
    ids=["write", "folder", "unpickle", "program"],
)
def test_a_breach_is_seen(breach: contract.Callable[[bytes], None]) -> None:
    with pytest.raises(contract.BrokenContractError):
        contract.run(breach, pickle.dumps(Caught()), guard())
    assert not Path("/tmp/never-made").exists()


def test_too_much_memory_is_seen() -> None:
    with pytest.raises(contract.BrokenContractError, match="bytes allocated"):
        contract.run_measured(lambda data: bytes(2 * contract.ROOM) and None, b"", guard())


def test_any_other_error_is_seen() -> None:
    with pytest.raises(KeyError):
        contract.run(lambda data: {}[data], b"", guard())
