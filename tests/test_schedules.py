"""Random schedules over castore's own commits, forgets, copies and prunes lose nothing.

`scripts/schedules.py` runs as many as one likes; these are the first of them. Field cases: GC1.
"""

from __future__ import annotations

import pytest

from castore.testing.inline import one_thread
from castore.testing.protocol import CROWD, FEW, Kind, Setting, run, run_many

CHUNK = 6_250
CHUNKS: list[tuple[Kind, Setting, int]] = [
    *(("s3", FEW, n) for n in range(8)),
    *(("local", FEW, n) for n in range(4)),
    *(("s3", CROWD, n) for n in range(2)),
    *(("local", CROWD, n) for n in range(2)),
]
"""100 000 schedules."""


def ids(value: object) -> str | None:
    return {CROWD: "crowd", FEW: "few"}[value] if isinstance(value, Setting) else None


@pytest.mark.parametrize(("kind", "setting", "chunk"), CHUNKS, ids=ids)
def test_no_schedule_loses_anything(kind: Kind, setting: Setting, chunk: int) -> None:
    """Listed means readable, answered means listed, and everybody comes to an end."""
    with one_thread():
        wrong, done = run_many(range(chunk * CHUNK, (chunk + 1) * CHUNK), kind, setting)
    assert [f"seed {o.seed}: {o.wrong}" for o in wrong] == []
    assert done["schedules"] == CHUNK
    acts = {"commits", "prunes", "deleted", "forgets", "unforgets", "copies", "killed"}
    assert all(done[act] > 20 for act in acts), done  # else it proves nothing
    assert kind == "local" or done["answers lost"] > 500


def test_a_schedule_can_be_played_again() -> None:
    with one_thread():
        first, again = (run(7, "s3", CROWD, trace=True) for _ in range(2))
    assert first.trace == again.trace != []
    assert first.done == again.done
