"""``castore receipts``, the driver, and the audit script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from castore import LayoutError, Repository
from castore.driver import find_driver
from tests.drivers.receipts import runs
from tests.drivers.receipts.test_sign import key
from tests.helpers import flip

ROOT = Path(__file__).parents[3]


def castore(*words: str | Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "castore.cli", "receipts", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_verify_says_what_holds_and_what_that_does_not_prove(made: Path) -> None:
    """'A content hash detects changes, not scientific validity or authorship.'"""
    code, out, err = castore("verify", made)
    assert code == 0
    assert len(out.splitlines()) == 4
    assert "neither authorship" in err
    code, out, _ = castore("verify", made, made / ".castore", "--json")
    documents = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert len(documents) == 8
    assert documents[0]["links"]["checkpoint_sha256"]["verdict"] == "ok"


def test_verify_ends_with_3_where_a_link_does_not_hold(copied: Path) -> None:
    path = runs.folder(copied, 40) / "policy.safetensors"
    path.write_bytes(flip(path.read_bytes(), -1))
    code, out, _ = castore("verify", copied, copied / "none")
    assert code == 3
    assert "checkpoint_sha256: mismatch" in out
    assert "readable: unreadable" in out


def test_verify_takes_a_snapshots_name_and_trusted_keys(made: Path, tmp_path: Path) -> None:
    code, out, _ = castore("verify", "receipts@latest", "-r", made / ".castore")
    assert code == 0
    assert "final/evaluation_0001: ok" in out
    _, public = key(tmp_path, "lab")
    code, out, _ = castore("verify", made, "--trust", public)
    assert code == 3
    assert "signer: missing: unsigned" in out
    code, _, err = castore("verify", made, "--trust", tmp_path / "none")
    assert code == 13
    assert "cannot be read" in err


def test_a_hostile_receipt_cannot_steer_the_terminal(copied: Path) -> None:
    at = runs.folder(copied, 20)
    (at / "receipt.json").write_text(json.dumps({"step": 20, "\x1b[2J\u202e": 1}))
    code, out, _ = castore("verify", at)
    assert code == 3
    assert "\x1b" not in out
    assert "\u202e" not in out


def test_replay_and_expand(made: Path, tmp_path: Path) -> None:
    at = runs.folder(made, 40)
    code, out, err = castore("replay", at)
    assert code == 0, err
    assert "tolerance 0, on the receipt's platform" in err
    secret, public = key(tmp_path, "lab")
    wide = tmp_path / "wide"
    code, out, err = castore("expand", made, wide, "--step", "40", "--added", "2", "--sign", secret)
    assert code == 0, err
    assert f"{5 * 2 * 16} parameters added in all" in out
    assert castore("verify", wide, made, "--trust", public)[0] == 3, "the old ones are unsigned"
    assert castore("verify", wide, "--trust", public)[0] == 0
    code, out, _ = castore("replay", runs.folder(wide, 40), "--json")
    assert (code, json.loads(out)["verdict"]) == (0, "ok")


def test_replay_with_an_environment_of_ones_own_tells_from_where_it_differs(
    made: Path, tmp_path: Path
) -> None:
    (tmp_path / "heavy.py").write_text(
        "import gymnasium\n"
        "def make():\n"
        "    env = gymnasium.make('Pendulum-v1', max_episode_steps=20)\n"
        "    env.unwrapped.m = 1.1\n"
        "    return env\n"
    )
    words = ("replay", runs.folder(made, 40), "--environment", "heavy:make")
    code, out, _ = castore(*words, env={"PYTHONPATH": str(tmp_path)})
    assert code == 3
    assert "trace_101: mismatch: differs from step 1 on" in out
    assert castore(*words, "--tolerance", "100", env={"PYTHONPATH": str(tmp_path)})[0] == 0
    assert castore("replay", runs.folder(made, 40), "--environment", "no.such:thing")[0] == 1


def forged_environment(copied: Path, **change: Any) -> tuple[int, str, str]:
    at = runs.folder(copied, 20)
    runs.forge(at, lambda r: r["environment"].update(change))
    return castore("replay", at)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "antigravity:Fly-v0"},
        {"id": "Nowhere-v9"},
        {"id": None},
        {"arguments": {"xml_file": "/etc/passwd"}},
        {"wrappers": ["Other"]},
    ],
    ids=str,
)
def test_se1_se2_a_receipt_names_no_module_and_no_file_to_open(
    copied: Path, change: dict[str, Any]
) -> None:
    code, _, err = forged_environment(copied, **change)
    assert code == 1
    assert "environment" in err


# -- the driver


def test_the_driver_collects_what_it_writes(made: Path, tmp_path: Path) -> None:
    driver = find_driver("receipts")
    repository = Repository.init(tmp_path / "store")
    drafts = list(driver.collect(made))
    assert [d.key.rpartition(".")[0] for d in drafts] == ["receipt"] * 3 + ["final"]
    names = [repository.commit(d, namespace="again").name for d in drafts]
    assert not [d for n in names for d in driver.verify(repository, n)]
    driver.materialize(repository, names[1], tmp_path / "out")
    for file in ("policy.safetensors", "validation.npz", "receipt.json"):
        path = f"checkpoints/step_0000040/{file}"
        assert (tmp_path / "out" / path).read_bytes() == (made / path).read_bytes()


def test_the_driver_verifies_snapshots_of_the_callback(made: Path) -> None:
    driver = find_driver("receipts")
    repository = Repository.open(made / ".castore")
    assert not [d for n in repository.snapshots() for d in driver.verify(repository, n)]


def test_the_driver_tells_what_is_no_receipt(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("x")
    with pytest.raises(LayoutError, match="holds no receipt"):
        list(find_driver("receipts").collect(tmp_path / "other"))
    (runs.folder(copied, 20) / "receipt.json").write_text("{")
    with pytest.raises(LayoutError, match="cannot be read"):
        list(find_driver("receipts").collect(copied))


# -- the audit


def audit(*words: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/audit_receipts.py", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_the_audit_tells_many_places_in_one_report(
    made: Path, copied: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "returns.png"
    code, out = audit(made, made / ".castore", "--plot", picture)
    assert code == 0
    assert "8 audited, 0 with problems" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    path = runs.folder(copied, 20) / "validation.npz"
    path.write_bytes(flip(path.read_bytes(), 50))
    code, out = audit(copied, made, tmp_path / "none", "--json", "--plot", picture)
    documents = [json.loads(line) for line in out.splitlines()]
    assert code == 3
    assert [d["verdict"] for d in documents if d["verdict"] != "ok"] == ["mismatch", "unreadable"]
    assert documents[0]["links"]["validation_sha256"] == "mismatch"
    assert documents[0]["problems"][0]["link"] == "validation_sha256"
    assert audit(made, "--plot", tmp_path / "none/returns.png")[0] == 1
    assert audit(made, "--trust", picture) == (1, "")


def test_the_audit_of_a_mixed_tree_tells_all_of_it(made: Path, tmp_path: Path) -> None:
    """A run, a run that lies in its repository only, another program's, and what is no run."""
    tree = tmp_path / "tree"
    shutil.copytree(made / "checkpoints", tree / "shown/checkpoints")
    shutil.copytree(made / ".castore", tree / "hidden/.castore")
    huge = {"mean_return": 10**400}
    runs.foreign(tree / "theirs/checkpoints/step_0000020", runs.folder(made, 20), **huge)
    (tree / "notes").mkdir()
    (tree / "notes/x.txt").write_text("no receipt")
    code, out = audit(tree, "--json", "--plot", tmp_path / "returns.png")
    assert (code, len(out.splitlines())) == (0, 3 + 4 + 1)


def test_the_audit_reads_what_other_programs_wrote(made: Path, tmp_path: Path) -> None:
    runs.foreign(tmp_path / "run/checkpoints/step_0000020", runs.folder(made, 20))
    shutil.copytree(runs.folder(made, 40), tmp_path / "run/checkpoints/step_0000040")
    code, out = audit(tmp_path / "run")
    assert code == 3, "the parent of step 40 is not there any more"
    assert "foreign" in out
