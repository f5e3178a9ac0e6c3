"""Two machines on one root: what each does for a while, and the judgement of what came of it.

Each machine is a process of its own with its own clock. It saves, logs, edits and branches without
pause, and writes down every answer it got together with the moments before and after the call, by
a clock that both share. `judge` then holds the root to all of those answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castore_experiments import CheckpointManager
    from castore_experiments.records import Records

HERE = Path(__file__).parents[3]
AHEAD = 600.0
"""Seconds by which the second machine's clock is fast."""

SHARED = 3
"""Configurations that both machines come upon; all others are one machine's own."""


@dataclass(frozen=True)
class Saved:
    """An answered save: its hash, what fills the weights, where it is, and when (shared clock)."""

    hash: str
    step: int
    fill: float
    path: str
    begun: float
    ended: float


@dataclass
class Answers:
    """What one machine was answered. ``points``: hash, step and value of each logged point."""

    hashes: list[str] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    points: list[tuple[str, int, float]] = field(default_factory=list)
    branches: int = 0
    exports: int = 0
    seen: dict[str, list[int]] = field(default_factory=dict)

    @staticmethod
    def read(text: str) -> Answers:
        body = json.loads(text)
        body["saved"] = [Saved(**s) for s in body["saved"]]
        body["points"] = [(h, s, v) for h, s, v in body["points"]]
        return Answers(**body)

    def text(self) -> str:
        return json.dumps({**vars(self), "saved": [vars(s) for s in self.saved]})


# -- one machine


class Machine:
    """One process' work on a root.

    Parameters
    ----------
    manager : CheckpointManager
    me : int
        Which of the machines, from 0.
    count : int
        How many there are: steps are never shared, so that no save replaces another's file.
    """

    def __init__(self, manager: CheckpointManager, me: int, count: int):
        from tests.drivers.experiments.small import net

        self.manager, self.me, self.count = manager, me, count
        self.random, self.answers = random.Random(me), Answers()
        self.config: dict[str, Any] = {"lr": 0.0}
        manager.watch(model=net(), hyperparameters=self.config)
        self.net, self.n = net, 0

    def work(self, seconds: float) -> Answers:
        """Go on for ``seconds``, but at least until everything was done twice."""
        end = time.monotonic() + seconds
        while time.monotonic() < end or self.n < 12:
            self.n += 1
            if self.n % 3 == 1:
                self.edit()
            if self.n % 5 == 4:
                self.branch()
            if self.n % 40 == 6:
                self.export()
            self.save()
        return self.answers

    @property
    def step(self) -> int:
        return self.n * self.count + self.me

    def edit(self) -> None:
        """Another configuration; a third of them is met by all machines."""
        own = self.random.random() < 2 / 3
        self.config["lr"] = self.step + 0.5 if own else self.random.randrange(SHARED)
        now = self.random.random() < 0.5
        update = self.manager.update_experiment_hash(dump_immediately=now)
        if now:
            self.answers.hashes.append(update.hash)

    def branch(self) -> None:
        """Back to a state of anybody's, and on from there with another configuration."""
        hash = self.random.choice(self.manager.get_all_hashes())
        assert self.manager.load_state(hash, force=True)
        self.answers.branches += 1
        self.edit()

    def save(self) -> None:
        manager, fill = self.manager, float(self.step)
        hash = manager.get_current_experiment_hash() or ""
        for i in range(3):
            at = self.step * 3 + i
            manager.log("acc", fill + i / 4, at)
            self.answers.points.append((hash, at, fill + i / 4))
        begun = time.monotonic()
        wait = self.random.random() < 0.7
        saving = manager.save_model_checkpoint(self.net(fill=fill), step=self.step, wait=wait)
        path = saving if wait else saving.result()
        ended = time.monotonic()
        hash = manager.current_exp_hash or ""
        self.answers.saved.append(Saved(hash, self.step, fill, str(path), begun, ended))
        self.answers.hashes.append(hash)

    def export(self) -> None:
        """Everything as real files, in another place."""
        from castore_experiments.export import export
        from castore_experiments.records import Records

        place = self.manager._session.place
        assert place.repository is not None and place.namespace is not None
        with tempfile.TemporaryDirectory() as folder:
            records = Records(place.repository, place.namespace)
            assert export(records, place.files, folder, lambda _: None)
        self.answers.exports += 1

    def look(self) -> None:
        """What this machine sees, once all are done."""
        manager = self.manager
        self.answers.seen = {
            h: manager.get_checkpoint_info(h)["steps"] for h in manager.get_all_hashes()
        }


def run_machine(root: str, me: int, count: int, seconds: float, ahead: float) -> None:
    """The whole of one process; says ``done``, waits for a line, then prints its answers."""
    real = time.time
    time.time = lambda: real() + ahead
    from tests.drivers.experiments.small import opened

    manager = opened(root, checkpoint_manager={"materialize": "all"}, clock=time.time)
    machine = Machine(manager, me, count)
    print("ready", flush=True)
    sys.stdin.readline()
    machine.work(seconds)
    print("done", flush=True)
    sys.stdin.readline()
    machine.look()
    manager.close()
    print(machine.answers.text(), flush=True)


# -- all of them


def start(root: str) -> str:
    """A root with one hash, so that there is something to branch from; gives the hash."""
    from tests.drivers.experiments.small import started

    with started(root, materialize="all") as manager:
        return manager.current_exp_hash or ""


def run(root: str, seconds: float, ahead: tuple[float, ...] = (0.0, AHEAD)) -> list[Answers]:
    """Let one machine for each of ``ahead`` work on ``root`` at once; what each was answered."""
    command = [sys.executable, "-m", "tests.drivers.experiments.machines", root]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    count = str(len(ahead))
    machines = [
        subprocess.Popen(
            [*command, str(me), count, str(seconds), str(fast)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for me, fast in enumerate(ahead)
    ]
    with contextlib.ExitStack() as stack:
        for machine in machines:
            stack.callback(_end, machine)
        for word in ("ready", "done"):
            for machine in machines:
                _expect(machine, word)
            for machine in machines:
                assert machine.stdin is not None
                machine.stdin.write("go\n")
                machine.stdin.flush()
        return [Answers.read(_line(machine)) for machine in machines]


def _line(machine: subprocess.Popen[str]) -> str:
    assert machine.stdout is not None
    return machine.stdout.readline()


def _expect(machine: subprocess.Popen[str], word: str) -> None:
    line = _line(machine)
    assert line.strip() == word, f"expected {word!r}, found {line!r}: see standard error"


def _end(machine: subprocess.Popen[str]) -> None:
    for stream in (machine.stdin, machine.stdout):
        if stream is not None:
            stream.close()
    try:
        machine.wait(timeout=20)
    except subprocess.TimeoutExpired:
        machine.kill()
        machine.wait()


# -- what must be true afterwards


def newest(saved: list[Saved]) -> set[tuple[str, int]]:
    """The saves that no other one began after: one, or those that overlapped at the end."""
    last = max(s.begun for s in saved)
    return {(s.hash, s.step) for s in saved if s.ended >= last}


def judge(root: str, base: str, answers: list[Answers]) -> Iterator[str]:
    """Every broken promise, in words; nothing when both machines' work is whole.

    Opens the root as a third machine does, and saves nothing but curves that are there.
    """
    from castore.check import check
    from castore_experiments.audit import audit
    from castore_experiments.records import Records
    from tests.drivers.experiments.small import opened

    saved = [s for a in answers for s in a.saved]
    hashes = {base, *(h for a in answers for h in a.hashes)}
    with opened(root) as third:
        resumed = third._session.resume
        assert resumed is not None
        if (resumed.loaded.state.hash, resumed.loaded.step) not in newest(saved):
            yield f"resumed {resumed.loaded.state.hash} step {resumed.loaded.step}"
        records, files = third._session.place.archive, third._session.place.files
        assert isinstance(records, Records)
        if {*records.hashes()} != hashes:
            yield f"hashes: {len(hashes)} answered, {len(records.hashes())} there"
        yield from _seen(hashes, saved, answers)
        yield from _order(records, saved)
        for one in saved:
            yield from _weights(records, files, one)
        yield from _points(third, [p for a in answers for p in a.points])
        yield from _entries(files, hashes)
        third.flush_logger_to_disk()
        yield from (f"{path}: {text}" for path, text in audit(records, files))
        yield from map(str, check(records.repository, read_data=True))


def _seen(hashes: set[str], saved: list[Saved], answers: list[Answers]) -> Iterator[str]:
    for me, one in enumerate(answers):
        if one.seen.keys() != hashes:
            yield f"machine {me} sees {len(one.seen)} of {len(hashes)} hashes"
        for s in saved:
            if s.step not in one.seen.get(s.hash, ()):
                yield f"machine {me} does not see step {s.step} of {s.hash}"


def _order(records: Records, saved: list[Saved]) -> Iterator[str]:
    """Of two saves, one of which was done before the other began, the store knows the order."""
    times = {(w.hash, w.step): w.time for s in saved for w in records.weights(s.hash)}
    inverted = sum(
        times.get((a.hash, a.step), 0) >= times.get((b.hash, b.step), 0)
        for a in saved
        for b in saved
        if a.ended < b.begun
    )
    if inverted:
        yield f"{inverted} pairs of saves stand in the wrong order"


def _weights(records: Records, files: Any, saved: Saved) -> Iterator[str]:
    """The file under the path that was answered, and what the repository has for it."""
    import torch

    where = f"step {saved.step} of {saved.hash}"
    found = [w for w in records.weights(saved.hash) if w.step == saved.step]
    if len(found) != 1:
        yield f"{where}: {len(found)} snapshots"
        return
    expected = records.weight_sha256(found[0])
    real = files.get(saved.path.removeprefix(files.url).lstrip("/"))
    if hashlib.sha256(real).hexdigest() != expected:
        yield f"{where}: the real file is another"
    if hashlib.sha256(records.weight_file(found[0])).hexdigest() != expected:
        yield f"{where}: the repository gives another file"
    body = torch.load(io.BytesIO(real), weights_only=True)
    fill = body["model_state_dict"]["weight"][0, 0].item()
    if (body["exp_hash"], body["step"], fill) != (saved.hash, saved.step, saved.fill):
        yield f"{where}: holds step {body['step']} of {body['exp_hash']}, filled with {fill}"


def _points(third: CheckpointManager, points: list[tuple[str, int, float]]) -> Iterator[str]:
    """Every logged point, once, whatever run it belongs to."""
    curves = third._session.curves()
    curves.refresh()
    there = [
        (row["experiment_hash"], row["step"], row["metric_value"])
        for source in curves.sources
        for table in source.rows("signals", "acc", None)
        for row in table.to_pylist()
    ]
    if sorted(there) != sorted(points):
        lost, more = set(points) - set(there), set(there) - set(points)
        yield f"points: {len(points)} logged, {len(there)} there, {len(lost)} lost, {len(more)} new"


def _entries(files: Any, hashes: set[str]) -> Iterator[str]:
    """The manifest has exactly what there is; `audit` looks at what its entries say."""
    import yaml

    entries = yaml.safe_load(files.get("checkpoints/manifest.yaml"))["experiments"]
    if entries.keys() != hashes:
        yield f"manifest: {len(entries)} entries for {len(hashes)} hashes"


def counts(answers: list[Answers]) -> dict[str, int]:
    """What was done, for people."""
    return {
        "machines": len(answers),
        "hashes": len({h for a in answers for h in a.hashes}),
        "hashes that both wrote": len(set.intersection(*({*a.hashes} for a in answers))),
        "saves": sum(len(a.saved) for a in answers),
        "points": sum(len(a.points) for a in answers),
        "branches": sum(a.branches for a in answers),
        "exports": sum(a.exports for a in answers),
    }


if __name__ == "__main__":
    run_machine(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(float, sys.argv[4:6]))
