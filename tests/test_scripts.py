"""The scripts beside the package: the audit of many repositories, and that shell scripts parse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from castore import MemoryFile, Repository
from castore.source import Draft

ROOT = Path(__file__).parent.parent


def make(path: Path) -> Repository:
    repository = Repository.init(path)
    repository.commit(Draft({"a.bin": MemoryFile(os.urandom(100_000))}), namespace="me")
    return repository


def audit(*words: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/audit_repository.py", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_audit_of_sound_repositories(tmp_path: Path) -> None:
    make(tmp_path / "one")
    make(tmp_path / "two")
    code, shown = audit(tmp_path / "one", tmp_path / "two", "--read-data")
    assert code == 0, shown
    assert shown.count("  sound ") == 2


def test_audit_tells_problems_and_goes_on_past_what_cannot_be_opened(tmp_path: Path) -> None:
    make(tmp_path / "good")
    make(tmp_path / "bad")
    objects = [p for p in (tmp_path / "bad/objects").rglob("*") if p.is_file()]
    victim = max(objects, key=lambda p: p.stat().st_size)
    victim.unlink()
    code, shown = audit(tmp_path / "none", tmp_path / "bad", tmp_path / "good", "--json")
    none, bad, good = map(json.loads, shown.splitlines())
    assert code == 3
    assert (none["status"], bad["status"], good["status"]) == ("failed", "damaged", "sound")
    assert bad["problems"][0]["kind"] == "missing"
    assert bad["problems"][0]["object"] == victim.name
    assert bad["problems"][0]["needed_by"][0][1] == "a.bin"


WITHOUT_YAML = """
import sys
sys.modules["yaml"] = None
{what}
"""


def without_yaml(what: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT_YAML.format(what=what)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_a_missing_extra_is_named_and_the_others_get_their_turn(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    draft = Draft({"a": MemoryFile(b"1")}, driver="experiments")
    Repository.init(one).commit(draft)
    make(two)
    words = [str(Path("scripts/audit_repository.py").absolute()), str(one), str(two)]
    done = without_yaml(
        f"import runpy; sys.argv = {words!r}; sys.path.insert(0, 'scripts')\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    assert "castore[experiments]" in done.stdout and f"{two}" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr and done.returncode == 3
    done = without_yaml(
        f"sys.argv = ['castore', 'experiments', 'runs', {str(one)!r}]\n"
        "from castore.cli import main\nmain()"
    )
    assert "castore[experiments]" in done.stderr and "internal" not in done.stderr, done.stderr
    done = without_yaml("from castore_experiments import CheckpointManager")
    assert "pip install 'castore[experiments]'" in done.stderr


def test_a_stored_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    make(tmp_path / "one")
    planted = tmp_path / "one" / "objects" / "ab"
    planted.mkdir(exist_ok=True)
    (planted / "\x1b[31mRED").write_bytes(b"x")
    code, out = audit(tmp_path / "one")
    assert code == 3 and "RED" in out and "\x1b" not in out


def test_audit_exits_with_the_code_of_what_stopped_it(tmp_path: Path) -> None:
    make(tmp_path / "good")
    assert audit(tmp_path / "none", tmp_path / "good")[0] == 10


@pytest.mark.parametrize(
    "name", ["scripts/lib.sh", "scripts/quickstart.sh", "scripts/test.sh", ".ci/run"]
)
def test_shell_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", ROOT / name], check=True)
