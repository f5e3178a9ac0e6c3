"""What a second reader tried on the pools driver: each way that broke it once, pinned."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset
from typer.testing import CliRunner

from castore import BackendError, FormatError, IntegrityError, InvalidInputError, LayoutError
from castore.tensors import describe
from castore_pools import Cell, PoolCollector, PoolsDriver, assemble, find_base, open_checkpoint
from castore_pools.cli import app
from castore_pools.names import STATE
from castore_pools.output import encode_assembled, write_output
from castore_pools.places import open_place
from castore_pools.pool import open_pool
from castore_pools.registry import put_record
from castore_pools.verify import verify_zoo
from tests.drivers.pools.models import (
    FROZEN,
    base_of,
    batch,
    build,
    cell,
    evaluate,
    logits,
    train,
)

WORDS = cell("wordavg")


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


# -- tied copies


@pytest.mark.parametrize("how", ["pinned", "unpinned", "generated"])
def test_tied_copies_of_a_pool_file_that_differ(tmp_path: Path, how: str) -> None:
    """Refused: "tied copies that differ", also where the tie is not frozen (PT1)."""
    base = base_of(tmp_path, "t5small")
    model = build("t5small", 1)
    with PoolCollector(
        model, base, 1, 1e-3, count=1, frozen=["head.weight"], evaluate=evaluate
    ) as pool:
        train(pool, model)
    path = tmp_path / cell("t5small").pool_path(0)
    fields = loaded(path)
    state, key = fields["model_state_dict"], FROZEN["t5small"][1]
    assert len(assemble(base, path)) == len(state) + 1
    state[key] = state[key] + 1
    if how == "unpinned":
        del fields["pin"]
    torch.save(fields, path)
    with pytest.raises(IntegrityError, match=rf"{key} are tied and differ"):
        if how == "generated":
            assemble(base, state, frozen_keys=["head.weight"])
        else:
            assemble(base, path)


def test_plain_values_that_are_said_to_be_tied(tmp_path: Path) -> None:
    """Compared as they are; a tie is never taken on trust."""
    state = {"w": torch.ones(2), "a": "x", "b": "y"}
    torch.save({"model_state_dict": state}, tmp_path / "base.pth")
    pin = {"base": "", "frozen": {}, "dtype": "float32", "ties": [["a", "b"]]}
    fields = {"model_state_dict": {"w": torch.ones(2)}, "frozen_keys": ["a", "b"], "pin": pin}
    torch.save(fields, tmp_path / "pool.pth")
    with pytest.raises(IntegrityError, match="a and b are tied and differ"):
        assemble(tmp_path / "base.pth", tmp_path / "pool.pth")


def test_safetensors_of_views(tmp_path: Path) -> None:
    """PT1, CC3: tensors that show one another's memory are written each with its values."""
    w = torch.randn(4, 4)
    state = {"w": w, "tied": w, "t": w.t(), "flat": w.view(-1), "part": w[:2]}
    (tmp_path / "x.safetensors").write_bytes(encode_assembled(state, {}, "safetensors"))
    back = load_file(tmp_path / "x.safetensors")
    assert set(back) == {"w", "t", "flat", "part"}
    assert all(torch.equal(back[k], state[k]) for k in back)


def test_what_safetensors_cannot_hold() -> None:
    state = {"c": torch.ones(2, dtype=torch.complex128)}
    with pytest.raises(InvalidInputError, match="complex128"):
        encode_assembled(state, {}, "safetensors")


# -- files


def test_two_pickles_in_one_archive() -> None:
    """Refused: another reader might take the other one."""
    out = io.BytesIO()
    torch.save({"w": torch.ones(2)}, out)
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr("other/data.pkl", b"\x80\x02}.")
    data = out.getvalue()
    with pytest.raises(FormatError, match=r"2 members data\.pkl"):
        describe(lambda a, b: data[a:b], len(data))


def test_rows_are_checked_alike_before_and_after_reading(zoo: Path) -> None:
    pool = open_pool(zoo / WORDS.base_path, zoo / WORDS.pool_path(0))
    for _ in range(2):
        for start, stop in ((-1, 2), (5, 2)):
            with pytest.raises(LayoutError, match="no such rows"):
                pool.rows("words.weight", start, stop)
        pool.tensor("words.weight")


# -- registries edited by hand


@pytest.mark.parametrize("text", ["", "{bad", "5", "null", '"x"', "[1]", '{"records": [5]}'])
def test_a_registry_that_is_none_is_not_written_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / WORDS.registry_path
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(LayoutError, match=path.name):
        put_record(tmp_path, WORDS, {"ckpt_path": WORDS.base_path})
    assert path.read_text() == text


def test_words_about_a_whole_registry_are_kept(tmp_path: Path) -> None:
    path = tmp_path / WORDS.registry_path
    path.parent.mkdir(parents=True)
    path.write_text('{"version": 3}')
    for value in (1, 2):
        put_record(tmp_path, WORDS, {"ckpt_path": WORDS.base_path, "n": value})
    document = json.loads(path.read_text())
    assert document == {"version": 3, WORDS.name: {"ckpt_path": WORDS.base_path, "n": 2}}


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda b: b["checkpoints"][0].update(file=["a"]), "record"),
        (lambda b: b["checkpoints"][0].update(val_metric=10**400), "record"),
        (lambda b: b["checkpoints"][0].update(val_metric=float("nan")), "record"),
        (lambda b: b["pin"].update(dtype=[]), "record"),
        (lambda b: b["training_info"].update(val_metric=0.123), "training_info"),
        (lambda b: b["training_info"].update(config={}), "training_info"),
        (lambda b: b.update(pool_path="../../etc"), "training_info"),
    ],
)
def test_records_edited_by_hand(
    zoo: Path, tmp_path: Path, change: Callable[[Any], object], check: str
) -> None:
    """Findings, never another error."""
    root = tmp_path / "copy"
    shutil.copytree(zoo, root)
    path = root / WORDS.registry_path
    bodies = json.loads(path.read_text())
    change(next(b for b in bodies if b["arch"] == "wordavg"))
    path.write_text(json.dumps(bodies))
    assert [f.check for f in verify_zoo(root) if f.broken] == [check]


def test_a_damaged_base_is_a_finding(zoo: Path, tmp_path: Path) -> None:
    """Damage that shows only when a tensor is read, in a base with and without a pool."""
    for alone in (False, True):
        root = tmp_path / str(alone)
        shutil.copytree(zoo, root)
        base = root / WORDS.base_path
        with zipfile.ZipFile(base) as archive:
            at = next(i for i in archive.infolist() if "/data/" in i.filename).header_offset
        data = bytearray(base.read_bytes())
        data[at] ^= 1
        base.write_bytes(data)
        if alone:
            shutil.rmtree(root / "ckpt")
            shutil.rmtree(root / "metadata")
        found = [(f.check, f.verdict) for f in verify_zoo(root) if f.broken]
        assert found == [("base", "unreadable")]


def test_a_base_is_found_beside_files_that_are_none(zoo: Path, tmp_path: Path) -> None:
    """PT4: by digest, whatever else lies in the zoo."""
    root = tmp_path / "copy"
    shutil.copytree(zoo / "zoo", root / "zoo")
    (root / "zoo/agnews/aaa").mkdir()
    (root / "zoo/agnews/aaa/aaa.pth").write_bytes(b"junk")
    shutil.copy(zoo / WORDS.pool_path(0), tmp_path / "member.pth")
    assert find_base(root, open_checkpoint(tmp_path / "member.pth")) == WORDS.base_path


def test_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told as what it is, by reading, listing and writing."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(BackendError, match="cannot be opened"):
        open_checkpoint("s3://nobody/x.pth")
    with pytest.raises(BackendError, match="cannot be listed"):
        open_place("s3://nobody/zoo").paths()
    with pytest.raises(BackendError, match="cannot be written"):
        write_output("s3://nobody/out/x.pth", b"x")


# -- snapshots


def test_no_file_is_left_out(zoo: Path, tmp_path: Path) -> None:
    """Configurations and notes of cells that have no pool files yet, with and without a base."""
    expected = set()
    for name, with_base in (("m1", True), ("m2", False)):
        one = Cell("task", "arch", "data", name)
        made = [one.config_path, one.collect_config_path, f"{one.pool_folder}/notes.txt"]
        if with_base:
            made.append(one.base_path)
        for path in made:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(zoo / WORDS.base_path, tmp_path / path)
        (tmp_path / one.pool_folder / STATE).write_bytes(b"under way")
        expected |= set(made)
    stored = [p for draft in PoolsDriver().collect(tmp_path) for p in draft.entries]
    assert sorted(stored) == sorted(expected)


# -- the command


def test_assembling_local_files_needs_no_repository(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a pin that pins nothing is none."""
    monkeypatch.setenv("CASTORE_REPOSITORY", str(tmp_path / "gone"))
    fields = loaded(zoo / WORDS.pool_path(0))
    for pinned in (True, False):
        if not pinned:
            fields["pin"]["frozen"] = {}
        torch.save(fields, tmp_path / "m.pth")
        words = [str(zoo / WORDS.base_path), str(tmp_path / "m.pth"), str(tmp_path / "o.pth")]
        done = CliRunner().invoke(app, ["assemble", *words, "--json"], catch_exceptions=False)
        assert done.exit_code == 0
        assert json.loads(done.stdout.splitlines()[-1])["pinned"] is pinned


# -- interruptions


class Drawing(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows that draw random numbers when they are fetched, as augmentation does."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = batch(i, 1)
        return torch.where(torch.rand(ids.shape) < 0.2, 0, ids)[0], labels[0]


def _epochs(pool: PoolCollector, model: torch.nn.Module, stop: int | None) -> None:
    loader = DataLoader(Drawing(), 8, True, generator=torch.Generator().manual_seed(3))
    made = 0
    while not pool.done:
        for ids, labels in pool.remaining(loader):
            if made == stop:
                raise KeyboardInterrupt
            made += 1
            pool.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits(model, ids), labels).backward()  # type: ignore[no-untyped-call]
            pool.optimizer.step()
            pool.after_step()


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 6])
def test_loaders_that_draw_go_on_over_epochs(tmp_path: Path, stop: int) -> None:
    """ "An interrupted collection resumes at the next file with the same ... RNG state." """
    for name in ("whole", "cut"):
        base = base_of(tmp_path / name, "wordavg")
        for until in (stop, None) if name == "cut" else (None,):
            model = build("wordavg", 1)
            torch.manual_seed(5 if until == stop or name == "whole" else 99)
            with PoolCollector(model, base, 1, 1e-3, count=8, evaluate=evaluate) as pool:
                try:
                    _epochs(pool, model, until)
                except KeyboardInterrupt:
                    assert until is not None and pool.files == until
    assert _digests(tmp_path / "cut") == _digests(tmp_path / "whole")


def _digests(root: Path) -> list[Any]:
    (body,) = json.loads((root / WORDS.registry_path).read_text())
    return [[log[n] for n in ("digest", "val_metric", "val_loss")] for log in body["checkpoints"]]


_KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from castore_pools import PoolCollector
from tests.drivers.pools.models import build, evaluate, train
name, last, calls = sys.argv[2], int(sys.argv[3]), 0
true = getattr(os, name)
def call(*given):
    global calls
    calls += 1
    if calls == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return true(*given)
setattr(os, name, call)
model = build("wordavg", 1)
torch.manual_seed(5)
with PoolCollector(model, sys.argv[1], 1, 1e-3, count=4, evaluate=evaluate) as pool:
    train(pool, model)
"""


@pytest.mark.parametrize(("call", "last"), [("replace", 2), ("fsync", 8), ("replace", 13)])
def test_a_killed_collection_goes_on(tmp_path: Path, call: str, last: int) -> None:
    """SIGKILL between two writes: files, metrics and folders are those of a run in one go."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    base_of(whole, "wordavg")
    base = base_of(cut, "wordavg")
    words = [sys.executable, "-c", _KILLED, str(base), call, str(last)]
    assert subprocess.run(words, timeout=120).returncode == -9
    for root in (whole, cut):
        model = build("wordavg", 1)
        torch.manual_seed(5)
        again = PoolCollector(model, root / WORDS.base_path, 1, 1e-3, count=4, evaluate=evaluate)
        with again:
            train(again, model)
    assert _digests(cut) == _digests(whole)
    assert _names(cut) == _names(whole)
    assert not [f for f in verify_zoo(cut) if f.broken]


def _names(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
