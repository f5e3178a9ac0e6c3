"""``traces="zarr"``: trajectories as a folder of zarr arrays, written, verified, forged."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jsonschema import Draft202012Validator

from castore import FormatError, InvalidInputError, Repository
from castore.zarr_view import SnapshotStore
from castore_receipts import ReceiptCallback, expand_receipt, verify_all, verify_receipt
from castore_receipts.claims import schema
from castore_receipts.driver import ReceiptsDriver
from castore_receipts.trace_folder import digest_of_folder, read_folder, write_folder
from castore_receipts.traces import read_npz
from castore_receipts.validation import FOLDER, RULE_FIELD
from tests.drivers.receipts import runs

ROOT = Path(__file__).parents[3]
TABLES = st.tuples(st.integers(0, 40), st.integers(0, 5)).flatmap(lambda s: arrays("f8", s))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Receipts of steps 20 and 40. Not to be changed."""
    root = tmp_path_factory.mktemp("zarr") / "run"
    runs.run(root, 40, traces="zarr").final_evaluation()
    return root


@pytest.fixture
def step(whole: Path, tmp_path: Path) -> Path:
    """One checkpoint's folder, to damage."""
    shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns(".castore"))
    return runs.folder(tmp_path / "run", 40)


# -- the format


@given(st.dictionaries(st.integers(-(10**6), 10**6), TABLES, max_size=3))
@settings(deadline=None, max_examples=40)
def test_a_folder_gives_back_its_traces(tables: dict[int, Any]) -> None:
    traces = {f"trace_{seed}": table for seed, table in tables.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("castore_receipts.trace_folder._CHUNK", 256)
        files = write_folder(traces)
        assert files == write_folder(dict(reversed(traces.items())))
        found = read_folder(files, "x")
    assert found.keys() == traces.keys()
    for name, table in traces.items():
        assert found[name].shape == table.shape
        assert found[name].tobytes() == table.tobytes(), "NaN and minus zero included"


def test_zarr_reads_it(tmp_path: Path) -> None:
    long = np.random.default_rng(0).standard_normal((9000, 30))
    traces = {"trace_1": long, "trace_-2": np.ones((3, 2)), "trace_3": np.zeros((0, 4))}
    files = write_folder(traces)
    assert len([f for f in files if f.startswith("trace_1/c/")]) == 3
    for path, data in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    group = zarr.open_group(tmp_path, mode="r")
    assert set(group.array_keys()) == set(traces)
    for name, trace in traces.items():
        np.testing.assert_array_equal(group[name][...], trace)


def test_the_rule_of_the_digest() -> None:
    """Written out, as another program would compute it."""
    import hashlib

    files = {"b/zarr.json": b"2", "a": b"1"}
    lines = "castore-folder/1\n"
    lines += (
        f"a\t{hashlib.sha256(b'1').hexdigest()}\nb/zarr.json\t{hashlib.sha256(b'2').hexdigest()}\n"
    )
    assert digest_of_folder(files) == hashlib.sha256(lines.encode()).hexdigest()


def spoiled(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, bytes]], None]:
    def spoil(files: dict[str, bytes]) -> None:
        document = json.loads(files["trace_1/zarr.json"])
        change(document)
        files["trace_1/zarr.json"] = json.dumps(document).encode()

    return spoil


SPOILS: dict[str, Callable[[dict[str, bytes]], Any]] = {
    "no chunk": lambda f: f.pop("trace_1/c/0/0"),
    "short chunk": lambda f: f.update({"trace_1/c/0/0": b"1"}),
    "long chunk": lambda f: f.update({"trace_1/c/0/0": f["trace_1/c/0/0"] + b"1"}),
    "one more": lambda f: f.update({"trace_1/c/1/0": b""}),
    "no group": lambda f: f.pop("zarr.json"),
    "another name": lambda f: f.update({"x/zarr.json": f["trace_1/zarr.json"]}),
    "no json": lambda f: f.update({"trace_1/zarr.json": b"{"}),
    "deep": lambda f: f.update({"trace_1/zarr.json": b"[" * 100_000}),
    "spaces": lambda f: f.update({"zarr.json": f["zarr.json"] + b" "}),
    "huge": spoiled(lambda d: d.update(shape=[1 << 39, 1 << 39])),
    "large": spoiled(lambda d: d.update(shape=[1 << 30, 1])),
    "negative": spoiled(lambda d: d.update(shape=[-1, 1])),
    "no number": spoiled(lambda d: d.update(shape=["4", 3])),
    "bool": spoiled(lambda d: d.update(shape=[True, 3])),
    "one axis": spoiled(lambda d: d.update(shape=[4])),
    "codec": spoiled(lambda d: d.update(codecs=[{"name": "zstd"}])),
    "fill": spoiled(lambda d: d.update(fill_value=1.0)),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_any_other_spelling_is_refused(spoil: Callable[[dict[str, bytes]], Any]) -> None:
    files = write_folder({"trace_1": np.ones((4, 3))})
    spoil(files)
    with pytest.raises(FormatError, match="where"):
        read_folder(files, "where")


@pytest.mark.parametrize("trace", [np.ones(3), np.array([["a"]]), np.array([[None]])])
def test_only_tables_of_numbers_are_written(trace: Any) -> None:
    with pytest.raises(InvalidInputError, match="trace_1"):
        write_folder({"trace_1": trace})


# -- runs


def test_a_run_with_folders_is_the_run_with_files(whole: Path, made: Path) -> None:
    """The same trajectories and returns as ``traces="npz"``, which stays the default."""
    at = runs.folder(whole, 40)
    assert sorted(os.listdir(at)) == ["policy.safetensors", "receipt.json", FOLDER]
    group = zarr.open_group(at / FOLDER, mode="r")
    packed = read_npz((runs.folder(made, 40) / "validation.npz").read_bytes(), "x")
    assert set(group.array_keys()) == set(packed) == {"trace_101", "trace_102"}
    for name, trace in packed.items():
        np.testing.assert_array_equal(group[name][...], trace)
    ours, theirs = runs.read(at), runs.read(runs.folder(made, 40))
    assert ours["returns"] == theirs["returns"]
    assert ours["policy_digest"] == theirs["policy_digest"]
    assert RULE_FIELD not in theirs
    assert list(Draft202012Validator(schema()).iter_errors(ours)) == []
    assert not Draft202012Validator(schema()).is_valid({**ours, RULE_FIELD: "other/1"})
    with pytest.raises(InvalidInputError, match="'npz' or 'zarr'"):
        runs.callback(whole, traces="parquet")


def test_everyone_verifies_it(whole: Path) -> None:
    """`verify_all` on folders and repository, the driver, the script that audits."""
    for place in (whole, whole / ".castore"):
        found = list(verify_all([place]))
        assert [r.receipt["role"] for r in found] == ["validation", "validation", "final"]
        assert all(r.sound for r in found)
        assert {n.name: n.verdict for n in found[0].links}["validation_sha256"] == "ok"
    repository = Repository.open(whole / ".castore")
    for name in repository.snapshots():
        assert list(ReceiptsDriver().verify(repository, name)) == []
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/audit_receipts.py", whole],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_history_reads_a_trajectory_from_its_snapshot(whole: Path) -> None:
    repository = Repository.open(whole / ".castore")
    name = next(n for n in repository.snapshots() if n.key == "receipt.step_0000020")
    path = f"checkpoints/step_0000020/{FOLDER}"
    store = SnapshotStore(repository, snapshot=name, path=path, read_only=True)
    trace = zarr.open_group(store, mode="r")["trace_101"]
    receipt = runs.read(runs.folder(whole, 20))
    assert math.fsum(trace[:, -1]) == receipt["returns"]["101"]


def test_a_folder_is_collected_and_laid_out_again(step: Path, tmp_path: Path) -> None:
    repository = Repository.init(tmp_path / "repository")
    driver = ReceiptsDriver()
    drafts = list(driver.collect(step.parents[1]))
    names = [repository.commit(d).name for d in drafts]
    for i, name in enumerate(names):
        assert list(driver.verify(repository, name)) == []
        driver.materialize(repository, name, tmp_path / f"out{i}")
    again = tmp_path / "out1" / "checkpoints" / step.name
    assert verify_receipt(again).sound
    assert (again / FOLDER / "zarr.json").is_file()


def test_a_chain_keeps_its_form(whole: Path, tmp_path: Path) -> None:
    """Resumed and expanded receipts store their traces as the old ones did."""
    model = runs.model()
    made = ReceiptCallback.resume(
        model, whole, 40, environment=runs.pendulum, into=tmp_path / "resumed"
    )
    model.learn(20, callback=made, reset_num_timesteps=False)
    assert (runs.folder(tmp_path / "resumed", 60) / FOLDER).is_dir()
    expand_receipt(whole, 40, tmp_path / "expanded", 2, environment=None)
    for place in ("resumed", "expanded"):
        assert all(r.sound for r in verify_all([tmp_path / place]))
        assert all(RULE_FIELD in r.receipt for r in verify_all([tmp_path / place]))


# -- tampering


def flipped(at: Path) -> None:
    data = bytearray(at.read_bytes())
    data[-1] ^= 0x80  # the sign of the last reward
    at.write_bytes(data)


def linked(at: Path) -> None:
    at.rename(at.with_name("elsewhere"))
    at.symlink_to(at.with_name("elsewhere"))


TAMPERING: dict[str, tuple[Callable[[Path], Any], dict[str, str]]] = {
    "a byte": (
        lambda f: flipped(f / "trace_101/c/0/0"),
        {"validation_sha256": "mismatch", "returns": "mismatch"},
    ),
    "a chunk lost": (
        lambda f: (f / "trace_101/c/0/0").unlink(),
        {"validation_sha256": "mismatch", "traces": "unreadable", "returns": "unreadable"},
    ),
    "a trace lost": (
        lambda f: shutil.rmtree(f / "trace_101"),
        {"validation_sha256": "mismatch", "traces": "missing", "returns": "mismatch"},
    ),
    "a file more": (
        lambda f: (f / "note").write_bytes(b"x"),
        {"validation_sha256": "mismatch", "traces": "unreadable", "returns": "unreadable"},
    ),
    "all lost": (
        shutil.rmtree,
        dict.fromkeys(("validation_sha256", "traces", "returns"), "missing"),
    ),
    "a link more": (
        lambda f: (f / "note").symlink_to("/etc/hosts"),
        dict.fromkeys(("validation_sha256", "traces", "returns"), "unreadable"),
    ),
    "a pipe more": (
        lambda f: os.mkfifo(f / "pipe"),
        dict.fromkeys(("validation_sha256", "traces", "returns"), "unreadable"),
    ),
    "a link within": (
        lambda f: linked(f / "trace_101"),
        dict.fromkeys(("validation_sha256", "traces", "returns"), "unreadable"),
    ),
    "a link": (linked, dict.fromkeys(("validation_sha256", "traces", "returns"), "unreadable")),
}


@pytest.mark.parametrize(("tamper", "expected"), TAMPERING.values(), ids=TAMPERING)
def test_every_change_is_told(step: Path, tamper: Any, expected: dict[str, str]) -> None:
    assert verify_receipt(step).sound
    tamper(step / FOLDER)
    assert runs.problems(verify_receipt(step)) == expected


def test_a_linked_file_is_not_followed(step: Path) -> None:
    linked(step / FOLDER / "trace_102/c/0/0")
    assert runs.problems(verify_receipt(step))["validation_sha256"] != "ok"


def test_a_forged_rule_does_not_pass(step: Path) -> None:
    """Sealed again by somebody who knows the layout: another rule, or none."""
    runs.forge(step, lambda r: r.update({RULE_FIELD: "castore-folder/2"}))
    found = runs.problems(verify_receipt(step))
    assert found["validation_sha256"] == found["traces"] == "unreadable"
    assert found["schema"] == "mismatch"
    runs.forge(step, lambda r: r.pop(RULE_FIELD))
    assert runs.problems(verify_receipt(step))["validation_sha256"] == "missing"
