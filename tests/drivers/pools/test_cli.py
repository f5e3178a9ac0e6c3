"""The commands and the two scripts: what they print, write, and exit with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner, Result

from castore import Repository
from castore.cli import app
from castore_pools import assemble, import_zoo
from tests.drivers.pools.models import FROZEN, cell

ROOT = Path(__file__).parents[3]
WHERE = cell("t5small")


def castore(*words: str | Path, **env: str) -> Result:
    clean: dict[str, str | None] = {"CASTORE_REPOSITORY": None, "CASTORE_TRACEBACK": None, **env}
    return CliRunner(env=clean).invoke(app, [*map(str, words)], prog_name="castore")


def documents(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code in (0, 3), result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def script(name: str, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / name, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'drivers'}", **env},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_import_and_ls(url: str, zoo: Path) -> None:
    repository = Repository.init(url)
    made = documents(castore("pools", "import", zoo, "-r", url, "-n", "team", "--json"))
    assert [d["labels"]["part"] for d in made] == ["base", "pool"] * 3
    assert [d["snapshot"] for d in made] == [str(n) for n in repository.snapshots("team")][::-1]
    listed = documents(castore("pools", "ls", "-r", url, "--json"))
    assert [d["snapshot"] for d in listed] == [d["snapshot"] for d in made][::-1]
    text = castore("pools", "ls", "-r", url).stdout
    assert "t5small__agnews" in text and "pool" in text
    inside = castore("pools", "ls", f"castore://team/{made[1]['snapshot'][5:]}", "-r", url)
    assert "bertbase__agnews" in inside.stdout


def test_ls_of_a_folder(zoo: Path) -> None:
    rows = documents(castore("pools", "ls", zoo, "--json"))
    assert [(d["cell"], d["files"], d["pinned"]) for d in rows] == [
        ("bertbase__agnews", 4, True),
        ("t5small__agnews", 4, True),
        ("wordavg__agnews", 4, True),
    ]
    assert castore("pools", "ls", zoo).stdout.splitlines()[0].split()[:4] == [
        *("CELL", "TASK", "MODEL", "FILES")
    ]
    assert castore("pools", "ls").exit_code == 2


@pytest.mark.parametrize("format", ["pth", "safetensors"])
def test_assemble(zoo: Path, tmp_path: Path, format: str) -> None:
    """``castore pools assemble BASE POOL OUT [--format pth|safetensors]``."""
    base, pool, out = zoo / WHERE.base_path, zoo / WHERE.pool_path(1), tmp_path / f"x.{format}"
    done = castore("pools", "assemble", base, pool, out, "--format", format, "--require-pin")
    assert done.exit_code == 0, done.output
    expected = assemble(base, pool)
    if format == "pth":
        found = torch.load(out, weights_only=True)
        state = found["model_state_dict"]
        assert (found["collect_step"], found["frozen_keys"]) == (1, [])
        assert len({state[k].data_ptr() for k in FROZEN["t5small"]}) == 1
    else:
        state = safetensors.torch.load_file(out)
        with safetensors.safe_open(out, "pt") as opened:
            texts = opened.metadata()
        first, *others = FROZEN["t5small"]
        assert [texts[k] for k in others] == [first, first]  # PT1: ties recorded explicitly
        assert json.loads(texts["val_metric"]) >= 0
        state |= dict.fromkeys(others, state[first])
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[k], v) for k, v in expected.items())


def test_assemble_finds_the_base(zoo: Path, tmp_path: Path) -> None:
    """A BASE that ends in / is a layout: its registry or the digests tell the base."""
    loose = tmp_path / "loose.pth"
    shutil.copy(zoo / WHERE.pool_path(2), loose)
    done = castore("pools", "assemble", f"{zoo}/", loose, tmp_path / "out.pth", "--json")
    (document,) = documents(done)
    assert (document["base"], document["pinned"]) == (WHERE.base_path, True)


def test_assemble_refuses(zoo: Path, tmp_path: Path) -> None:
    other = cell("bertbase")
    done = castore(
        "pools", "assemble", zoo / other.base_path, zoo / WHERE.pool_path(0), tmp_path / "o.pth"
    )
    assert done.exit_code == 1 and "transformer.shared.weight" in done.stderr
    fields = torch.load(zoo / WHERE.pool_path(0), weights_only=True)
    torch.save({k: v for k, v in fields.items() if k != "pin"}, tmp_path / "p.pth")
    words = ["pools", "assemble", zoo / WHERE.base_path, tmp_path / "p.pth", tmp_path / "o.pth"]
    done = castore(*words, "--require-pin")
    assert done.exit_code == 11 and "unpinned" in done.stderr
    assert not (tmp_path / "o.pth").exists()
    done = castore(*words)
    assert done.exit_code == 0 and "unpinned" in done.stderr
    assert castore("pools", "assemble", *words[2:4], "castore://a/b/c").exit_code == 1


def test_assemble_over_a_repository(url: str, zoo: Path, tmp_path: Path) -> None:
    for made in import_zoo(Repository.init(url), zoo, "team"):
        if made.name.key.startswith("pool.t5small"):
            head = f"castore://team/{made.name.id}"
    words = [f"{head}/{WHERE.base_path}", f"{head}/{WHERE.pool_path(3)}", tmp_path / "o.pth"]
    assert castore("pools", "assemble", *words, "-r", url).exit_code == 0
    found = torch.load(tmp_path / "o.pth", weights_only=True)["model_state_dict"]
    expected = assemble(zoo / WHERE.base_path, zoo / WHERE.pool_path(3))
    assert all(torch.equal(found[k], v) for k, v in expected.items())
    done = castore("pools", "assemble", f"{head}/", words[1], tmp_path / "q.pth", "-r", url)
    assert done.exit_code == 0, done.output


def test_verify(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_metric.py").write_text("def zero(state, base): return 0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = castore("pools", "verify", zoo)
    assert (done.exit_code, done.stdout) == (0, "")
    done = castore("pools", "verify", zoo, "--metric", "my_metric:zero", "--sample", "1", "--json")
    assert done.exit_code == 3
    *findings, last = documents(done)
    assert [f["check"] for f in findings] == ["metric"] * 3
    assert last["broken"] == 3 and last["kept"] > 50
    assert castore("pools", "verify", zoo, "--metric", "nothing:here").exit_code == 2
    assert castore("pools", "verify", tmp_path).exit_code == 1


def test_stats(zoo: Path) -> None:
    found = documents(castore("pools", "stats", zoo, "--cell", "wordavg__agnews", "--json"))
    assert {d["cell"] for d in found} == {"text_classification/wordavg__agnews/wordavg_010"}
    assert all(d["files"] == 4 and d["std"] is not None for d in found)
    done = castore("pools", "stats", zoo, "--tensor", "head.bias", "--cell", "wordavg__agnews")
    assert done.stdout.splitlines()[2].split()[0] == "head.bias"
    assert castore("pools", "stats", zoo, "--cell", "no__such").exit_code == 2


def test_stats_of_a_snapshot(url: str, zoo: Path) -> None:
    *_, made = import_zoo(Repository.init(url), zoo, "team")
    done = castore("pools", "stats", f"castore://team/{made.name.id}", "-r", url, "--json")
    local = castore("pools", "stats", zoo, "--cell", "wordavg__agnews", "--json")
    assert documents(done) == documents(local)


def test_reduce(zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    for i in range(4):
        state = assemble(zoo / WHERE.base_path, zoo / WHERE.pool_path(i))
        torch.save({"model_state_dict": state}, tmp_path / "full" / f"collect_00{i}.pth")
    words = ["pools", "reduce", zoo / WHERE.base_path, tmp_path / "full", tmp_path / "out"]
    assert castore(*words, "--dry-run").exit_code == 0
    assert not (tmp_path / "out").exists()
    (document,) = documents(castore(*words, "--json"))
    assert set(document["keys"]) >= set(FROZEN["t5small"])
    assert document["after"] < document["before"]
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_every_command_has_an_example() -> None:
    for name in ("import", "ls", "assemble", "verify", "stats", "reduce"):
        shown = castore("pools", name, "--help").stdout
        assert f"castore pools {name}" in shown


def test_the_package_is_cheap_to_import() -> None:
    code = (
        "import sys, castore_pools, castore_pools.cli;"
        "print(*{n.split('.')[0] for n in sys.modules} & {'torch', 'numpy', 'fsspec', 'rich'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_every_public_name_resolves() -> None:
    import castore_pools

    assert all(getattr(castore_pools, n) for n in castore_pools.__all__)
    assert callable(castore_pools.assemble)
    with pytest.raises(AttributeError):
        _ = castore_pools.nothing


# -- scripts


def test_assemble_whole_cells(url: str, zoo: Path) -> None:
    """Reassembles whole cells to a folder or URL, in parallel."""
    words = [zoo, url, "--cell", "t5small__agnews", "--format", "safetensors", "--json"]
    done = script("assemble_pool.py", *words)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [d["status"] for d in told] == ["written"] * 4
    for i, d in enumerate(told):
        with fsspec.open(d["target"], "rb") as file:
            state = safetensors.torch.load(file.read())
        expected = assemble(zoo / WHERE.base_path, zoo / WHERE.pool_path(i))
        assert all(torch.equal(state[k], expected[k]) for k in state)
    again = script("assemble_pool.py", *words)
    assert [json.loads(x)["status"] for x in again.stdout.splitlines()] == ["there"] * 4
    forced = script("assemble_pool.py", *words, "--force")
    assert [json.loads(x)["status"] for x in forced.stdout.splitlines()] == ["written"] * 4


def test_assemble_tells_what_it_refuses(zoo: Path, tmp_path: Path) -> None:
    root = tmp_path / "z"
    shutil.copytree(zoo, root)
    (root / WHERE.pool_path(1)).write_bytes(b"broken")
    (root / cell("wordavg").base_path).unlink()
    done = script("assemble_pool.py", root, tmp_path / "out", "--jobs", "2")
    assert done.returncode == 3
    assert "collect_001.pth" in done.stderr and "wordavg_010.pth" in done.stderr
    assert len(list((tmp_path / "out").rglob("*.pth"))) == 7
    assert script("assemble_pool.py", tmp_path / "nothing", tmp_path / "out").returncode == 1


def test_audit_of_zoos(zoo: Path, tmp_path: Path) -> None:
    """Audits a zoo into one report (terminal, ``--json``)."""
    sound = script("audit_pools.py", zoo)
    assert sound.returncode == 0, sound.stdout
    assert "3 audited, 0 with problems" in sound.stdout
    root = tmp_path / "z"
    shutil.copytree(zoo, root)
    (root / WHERE.pool_path(1)).unlink()
    done = script("audit_pools.py", zoo, root, "--json")
    assert done.returncode == 3
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 6
    (bad,) = (d for d in told if d["verdict"] != "ok")
    assert bad["links"]["numbering"] == "missing" and bad["facts"]["files"] == 3
    assert "collect_001.pth" in script("audit_pools.py", root).stdout
    nothing = script("audit_pools.py", tmp_path / "nothing", zoo)
    assert nothing.returncode == 3 and "unreadable" in nothing.stdout
    assert "4 audited, 1 with problems" in nothing.stdout


def test_audit_of_bases_alone(zoo: Path, tmp_path: Path) -> None:
    """A base without a pool is a row of its own, and its damage an exit code."""
    base = tmp_path / "z" / WHERE.base_path
    base.parent.mkdir(parents=True)
    shutil.copy(zoo / WHERE.base_path, base)
    sound = script("audit_pools.py", tmp_path / "z")
    assert sound.returncode == 0 and WHERE.base_path in sound.stdout
    fields = torch.load(base, weights_only=True)
    fields["model_state_dict"]["head.bias"][0] = float("nan")
    torch.save(fields, base)
    (told,) = script("audit_pools.py", tmp_path / "z", "--json").stdout.splitlines()
    assert json.loads(told)["links"]["finite"] == "mismatch"


def test_audit_of_a_snapshot(url: str, zoo: Path) -> None:
    *_, made = import_zoo(Repository.init(url), zoo, "team")
    address = f"castore://team/{made.name.id}"
    done = script("audit_pools.py", address, CASTORE_REPOSITORY=url)
    assert done.returncode == 0, done.stdout
    assert "wordavg__agnews" in done.stdout
