"""A manager that saves every second under random faults, with a prune every minute, for long.

    python benchmarks/soak.py URL --minutes 60 --rate 0.05 [--work DIR] [--seed 0]

URL is a fresh root, local or on S3; ``seaweedfs`` starts a server of its own in DIR, behind a proxy
that breaks requests with the given rate: refused, slowed, cut, reset, forbidden, answers lost, late
(but for answers that never come: only time would be tested). For any other URL each call that
repository or root make of their storage fails instead: refused, late, answer lost before or after
acting, bytes turned or cut; reads with the square of the rate, since a save reads up to a hundred
times and a local store is asked once.

Saves that were answered as done are read back each minute before the prune, and those that
retention keeps once more at the end; then everything is checked, without faults.

DIR gets ``samples.csv`` (every 10 s: seconds, RSS in MB, file handles, threads, saves, faults),
``errors.txt`` (each kind of error, how often, and the first of each) and ``summary.txt``, which is
printed, too.
"""

from __future__ import annotations

import argparse
import csv
import faulthandler
import gc
import hashlib
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from chance import WIRE, Dice, storage_faults

from castore import CastoreError, Repository
from castore.check import CheckReport, check
from castore.prune import prune
from castore.publish import Patience
from castore.testing.proxy import FaultProxy, Request
from castore.testing.proxy import Kind as WireKind
from castore.testing.s3server import S3Server
from castore_experiments import CheckpointManager
from castore_experiments.audit import audit
from castore_experiments.files import open_files
from castore_experiments.records import Records
from castore_experiments.resume import Wanted, load

POINTS = 5
"""Points of a curve before each save."""

PATIENCE = Patience(margin=5.0, overdue=10.0)
"""Shorter than the default, so that a prune a minute leaves time for saves on S3."""

GRACE, SWEEP = 20.0, 15.0
KEEP = {"last": 100, "every": 10}
TRIES = 8
"""How often a save that failed is asked for again: a local store is not retried by anything else,
and a save makes some 30 calls."""

EDIT = 250
"""Saves between two edits of the configuration."""

# -- what is trained


@dataclass(frozen=True)
class Saved:
    """One save that was answered as done."""

    hash: str
    step: int
    digest: str


def digest_of(state: dict[str, Any]) -> str:
    """SHA-256 of all tensors in the order of their names."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(state[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class Training:
    """About 1 MB of weights that drift, and a configuration that is edited from time to time."""

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(500, 400), torch.nn.Linear(400, 150))
        self.config: dict[str, Any] = {"lr": 1e-3, "edit": 0}

    def drift(self) -> None:
        with torch.no_grad():
            for p in self.net.parameters():
                p.mul_(1 + 1e-4 * torch.randn_like(p))


@dataclass
class Tally:
    """What happened."""

    saved: list[Saved] = field(default_factory=list)
    read: set[Saved] = field(default_factory=set)
    points: list[tuple[str, int, float]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    attempts: int = 0
    prunes: int = 0
    deleted: int = 0
    checked: str = ""


class Soak:
    """One run.

    Parameters
    ----------
    url : str
    dice : Dice
    wire : bool
        Whether the faults happen on the wire, so that storage itself is as it is.
    seconds, every : float
        How long, and from one save to the next.
    """

    def __init__(self, url: str, dice: Dice, wire: bool, seconds: float, every: float):
        self.url, self.dice, self.wire, self.every = url, dice, wire, every
        self.end = time.monotonic() + seconds
        self.tally, self.training = Tally(), Training(dice.seed)
        self._pruning: threading.Thread | None = None

    def attempt(self, what: str, act: Callable[[], Any]) -> Any:
        """Run it; a `CastoreError` is counted, any other error is a problem."""
        try:
            return act()
        except CastoreError as e:
            kind = f"{what}: {type(e).__name__}"
            self.tally.errors[kind] += 1
            self.tally.examples.setdefault(kind, traceback.format_exc())
        except Exception as e:
            self.tally.problems.append(f"{what}: {type(e).__name__}: {e}")
            print(traceback.format_exc(), file=sys.stderr)
        return None

    def run(self, rate: float) -> None:
        with nullcontext() if self.wire else storage_faults(self.dice):
            manager = CheckpointManager(
                self.url, checkpoint_manager={"keep": KEEP}, report=lambda _: None
            )
            manager.watch(model=self.training.net, hyperparameters=self.training.config)
            self.step(manager, 0)
        records = manager._session.records()
        records.repository.patience = PATIENCE
        self.namespace, self.repository = records.namespace, records.repository
        self.dice.rate = rate
        self.train(manager)
        self.dice.rate = 0.0
        if self._pruning is not None:
            self._pruning.join()
        self.step(manager, self.tally.attempts)
        self.attempt("close", manager.close)
        self.attempt("last prune", self.prune)

    def train(self, manager: CheckpointManager) -> None:
        next_save, next_prune = time.monotonic(), time.monotonic() + 60
        while time.monotonic() < self.end:
            time.sleep(max(0.0, next_save - time.monotonic()))
            next_save = max(next_save + self.every, time.monotonic())
            self.step(manager, self.tally.attempts)
            if time.monotonic() > next_prune:
                next_prune = time.monotonic() + 60
                self.read_back([s for s in self.tally.saved if s not in self.tally.read])
                self.start_prune()

    def step(self, manager: CheckpointManager, step: int) -> None:
        """Train, log and save once; what was answered as done is remembered."""
        self.training.drift()
        self.tally.attempts += 1
        if step and step % EDIT == 0:
            self.training.config["edit"] += 1
            self.attempt("edit", manager.update_experiment_hash)
        for i in range(POINTS):
            self.log(manager, step * POINTS + i)
        digest = digest_of(self.training.net.state_dict())
        for _ in range(TRIES):
            done = self.attempt("save", lambda: manager.save_model_checkpoint(step=step))
            if done is not None:
                self.tally.saved.append(Saved(manager.current_exp_hash or "", step, digest))
                return

    def log(self, manager: CheckpointManager, at: int) -> None:
        hash = manager.current_exp_hash

        def take() -> bool:
            manager.log("loss", float(at), at)
            return True

        if self.attempt("log", take) and hash:
            self.tally.points.append((hash, at, float(at)))

    def start_prune(self) -> None:
        if self._pruning is None or not self._pruning.is_alive():
            self._pruning = threading.Thread(target=lambda: self.attempt("prune", self.prune))
            self._pruning.start()

    def prune(self) -> None:
        report = prune(self.repository, grace=GRACE, sweep=SWEEP)
        self.tally.prunes += 1
        self.tally.deleted += report.objects

    # -- looking

    def clean(self) -> Records:
        """The records as a process sees them that knows of no faults."""
        records = Records(Repository.open(self._repository_url), self.namespace)
        records.refresh()
        return records

    @property
    def _repository_url(self) -> str:
        return f"{self.url}/.castore"

    def read_back(self, wanted: list[Saved]) -> None:
        """Every one of these saves must be there with its digest; no faults meanwhile."""
        rate, self.dice.rate = self.dice.rate, 0.0
        records = self.clean()
        for saved in wanted:
            self.read_one(records, saved)
            self.tally.read.add(saved)
        self.dice.rate = rate

    def read_one(self, records: Records, saved: Saved) -> None:
        where = f"step {saved.step} of {saved.hash}"
        try:
            found = load(records, saved.hash, Wanted(False, True, False, False, saved.step))
        except CastoreError as e:
            self.tally.problems.append(f"{where}: {e}")
            return
        if found.file is None or found.weights is None or found.weights.step != saved.step:
            self.tally.problems.append(f"{where} was answered as done and is not there")
        elif digest_of(dict(found.file.model_state or {})) != saved.digest:
            self.tally.problems.append(f"{where} has other weights")

    def look_at_all(self) -> None:
        """The end: what must be there still, all curves, all bytes, all promises of the layout."""
        records, files = self.clean(), open_files(self.url)
        self.read_back([s for s in self.tally.saved if s.step % KEEP["every"] == 0])
        self.read_back([s for s in self.tally.saved if s not in self.tally.read])
        self.compare_points()
        report = CheckReport()
        found = check(records.repository, read_data=True, layout=True, report=report)
        self.tally.problems += [f"check: {p}" for p in found]
        self.tally.problems += [f"audit: {p}: {text}" for p, text in audit(records, files)]
        self.tally.checked = (
            f"{report.snapshots} snapshots, {report.objects} objects, {report.bytes_read} bytes"
        )

    def compare_points(self) -> None:
        with CheckpointManager(self.url, report=lambda _: None) as manager:
            for hash in manager.get_all_hashes():
                rows = manager.signals("loss", hash)
                there = list(zip(rows["step"], rows["metric_value"], strict=True))
                mine = [(s, v) for h, s, v in self.tally.points if h == hash]
                if lost := len(set(mine) - set(there)):
                    self.tally.problems.append(f"{lost} points of {hash} are lost")
                if len(there) != len(set(there)):
                    self.tally.problems.append(f"points of {hash} stand twice")


# -- figures


class Sampler(threading.Thread):
    """Writes a line of figures each ten seconds."""

    def __init__(self, path: Path, soak: Soak):
        super().__init__(daemon=True)
        self._path, self._soak, self._stop_ = path, soak, threading.Event()
        self.rows: list[tuple[float, int, int]] = []

    def run(self) -> None:
        start, tally = time.monotonic(), self._soak.tally
        with self._path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["seconds", "rss_mb", "handles", "threads", "saves", "faults"])
            while not self._stop_.wait(10):
                rss, handles = resident(), len(os.listdir("/proc/self/fd"))
                self.rows.append((rss, handles, threading.active_count()))
                faults = self._soak.dice.thrown.total()
                seconds = round(time.monotonic() - start)
                threads = threading.active_count()
                writer.writerow([seconds, f"{rss:.1f}", handles, threads, len(tally.saved), faults])
                file.flush()

    def end(self) -> None:
        self._stop_.set()
        self.join()


def resident() -> float:
    """MB, from /proc (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise SystemExit("no VmRSS in /proc/self/status")


def summary(soak: Soak, sampler: Sampler, seconds: float) -> str:
    """The figures of a run as a table."""
    tally, rows = soak.tally, sampler.rows or [(0.0, 0, 0)]
    rss, handles, threads = zip(*rows, strict=True)
    tenth = max(1, len(rss) // 10)
    early, late = statistics.median(rss[:tenth]), statistics.median(rss[-tenth:])
    lines = {
        "root": soak.url,
        "seconds": f"{seconds:.0f}",
        "saves tried / answered as done": f"{tally.attempts} / {len(tally.saved)}",
        "saves read back by digest": len(tally.read),
        "points of curves taken": len(tally.points),
        "faults injected": soak.dice.thrown.total(),
        "errors raised": tally.errors.total(),
        "prunes that ended / objects deleted": f"{tally.prunes} / {tally.deleted}",
        "RSS MB first / median / last": " / ".join(
            f"{x:.0f}" for x in (rss[0], statistics.median(rss), rss[-1])
        ),
        "RSS MB first tenth / last tenth": f"{early:.0f} / {late:.0f}",
        "handles first / most / last": f"{handles[0]} / {max(handles)} / {handles[-1]}",
        "threads first / most / last": f"{threads[0]} / {max(threads)} / {threads[-1]}",
        "checked at the end": tally.checked,
        "problems": len(tally.problems),
    }
    table = "\n".join(f"{name:38} {value}" for name, value in lines.items())
    return "\n".join([table, *(f"  {p}" for p in tally.problems)])


def write_errors(path: Path, soak: Soak) -> None:
    lines = [f"{n:8} raised    {what}" for what, n in soak.tally.errors.most_common()]
    lines += [f"{n:8} injected  {what}" for what, n in soak.dice.thrown.most_common()]
    examples = [f"\nfirst {what}\n{text}" for what, text in soak.tally.examples.items()]
    path.write_text("\n".join([*lines, *examples]) + "\n")


def soaked(url: str, dice: Dice, wire: bool, work: Path, arguments: argparse.Namespace) -> int:
    """Run it all; the number of problems."""
    seconds, start = arguments.minutes * 60, time.monotonic()
    soak = Soak(url, dice, wire, seconds, arguments.every)
    sampler = Sampler(work / "samples.csv", soak)
    sampler.start()
    soak.run(arguments.rate)
    sampler.end()
    gc.collect()
    soak.attempt("look", soak.look_at_all)
    if not soak.tally.checked:
        soak.tally.problems.append("the final look did not come to its end")
    text = summary(soak, sampler, time.monotonic() - start)
    (work / "summary.txt").write_text(text + "\n")
    write_errors(work / "errors.txt", soak)
    print(text)
    return len(soak.tally.problems)


def main() -> None:
    parser = argparse.ArgumentParser(description="saves under random faults, for long")
    parser.add_argument("url", help="a fresh root, or 'seaweedfs'")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--every", type=float, default=1.0, help="seconds from save to save")
    parser.add_argument("--work", type=Path, default=Path("/tmp/castore-soak"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XDG_STATE_HOME", str(arguments.work / "state"))
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    dice = Dice(arguments.seed)
    if arguments.url != "seaweedfs":
        sys.exit(min(1, soaked(arguments.url, dice, False, arguments.work, arguments)))
    with (
        S3Server(dir=arguments.work / "server", bucket="soak") as server,
        FaultProxy(server.ports[0]) as proxy,
    ):

        def plan(request: Request) -> WireKind | None:
            proxy.log.clear()  # it would count as a leak
            return dice.throw(request.method, WIRE)

        proxy.plan = plan
        endpoints = dict.fromkeys(("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"), proxy.url)
        os.environ.update({**server.env(), **endpoints})
        sys.exit(min(1, soaked("s3://soak/root", dice, True, arguments.work, arguments)))


if __name__ == "__main__":
    main()
