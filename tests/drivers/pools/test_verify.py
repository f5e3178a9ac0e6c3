"""Verification: every promise, broken one at a time, is named; sound layouts have no finding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from castore import LayoutError
from castore_pools import Cell, verify_zoo
from castore_pools.verify import Finding
from tests.drivers.pools.models import FROZEN, base_of, build, cell, evaluate

WHERE = cell("bertbase")
WORDS = FROZEN["bertbase"][0]


@pytest.fixture
def root(zoo: Path, tmp_path: Path) -> Path:
    """A copy of the BERT cell alone."""
    root = tmp_path / "zoo-root"
    for folder in (f"zoo/agnews/{WHERE.arch}", WHERE.pool_folder, WHERE.config_folder):
        shutil.copytree(zoo / folder, root / folder)
    bodies = json.loads((zoo / WHERE.registry_path).read_text())
    (root / WHERE.registry_path).parent.mkdir(parents=True)
    kept = [b for b in bodies if b["arch"] == WHERE.arch]
    (root / WHERE.registry_path).write_text(json.dumps(kept))
    return root


def broken(root: Path, **how: Any) -> list[tuple[str, str, str]]:
    found = [f for f in verify_zoo(root, **how) if f.broken]
    return [(f.path.rpartition("/")[2], f.check, f.detail) for f in found]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    fields = torch.load(path, weights_only=True)
    change(fields)
    torch.save(fields, path)


def edit_record(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = root / WHERE.registry_path
    (body,) = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps([body]))


def accuracy(state: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    assert base["config"]["arch"] == "bertbase"
    model = build("bertbase", 77)
    model.load_state_dict(state)
    return evaluate(model)[0]


def test_a_sound_layout(zoo: Path) -> None:
    findings = list(verify_zoo(zoo))
    assert {f.verdict for f in findings} == {"ok"}
    checks = {f.check for f in findings}
    assert checks >= {
        "base",
        "numbering",
        "counts",
        "statistics",
        "keys",
        "pin",
        "finite",
        "digest",
    }


def test_the_metric_is_recomputed_on_a_sample(root: Path) -> None:
    found = [f for f in verify_zoo(root, metric=accuracy, sample=2) if f.check == "metric"]
    assert [f.path.rpartition("/")[2] for f in found] == ["collect_000.pth", "collect_003.pth"]
    assert {f.verdict for f in found} == {"ok"}
    wrong = broken(root, metric=lambda s, b: 0.123, sample=9)
    assert [(p, c) for p, c, _ in wrong] == [(f"collect_00{i}.pth", "metric") for i in range(4)]


def test_holes_are_named(root: Path) -> None:
    """The number and numbering of files (holes named)."""
    (root / WHERE.pool_path(1)).unlink()
    (root / WHERE.pool_path(3)).unlink()
    ((path, check, detail),) = broken(root)
    assert (check, detail) == ("numbering", "2 of 4 files: collect_001.pth, collect_003.pth")


def test_a_changed_value(root: Path) -> None:
    """Digests of state and file; the rest still fits."""
    edit(root / WHERE.pool_path(2), lambda f: f["model_state_dict"]["classifier.bias"].add_(1))
    ((path, check, detail),) = broken(root)
    assert (path, check) == ("collect_002.pth", "digest")
    assert "digest: logged" in detail and "sha256: logged" in detail


def test_values_that_are_not_finite(root: Path) -> None:
    edit(
        root / WHERE.pool_path(0),
        lambda f: f["model_state_dict"]["classifier.bias"].fill_(float("nan")),
    )
    assert ("collect_000.pth", "finite", "not finite: classifier.bias") in broken(root)


def test_another_base(root: Path, tmp_path: Path) -> None:
    other = base_of(tmp_path, "bertbase", seed=9)
    shutil.copy(other, root / WHERE.base_path)
    found = [(p, d) for p, c, d in broken(root) if c == "pin"]
    assert len(found) == 4
    assert all(WORDS in d and "base:" in d for _, d in found)


def test_another_base_with_the_same_frozen_tensors(root: Path) -> None:
    """The digest of the whole base is pinned, too."""
    edit(root / WHERE.base_path, lambda f: f["model_state_dict"]["classifier.bias"].add_(1))
    details = [d for _, c, d in broken(root) if c == "pin"]
    assert len(details) == 4 and all(d.startswith("base:") for d in details)


def test_a_base_that_is_gone(root: Path) -> None:
    (root / WHERE.base_path).unlink()
    assert ("bertbase_010.pth", "base") in [(p, c) for p, c, _ in broken(root)]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda f: f["model_state_dict"].pop("classifier.bias"), "missing from both"),
        (lambda f: f["model_state_dict"].update(extra=torch.ones(1)), "lacks: extra"),
        (lambda f: f["model_state_dict"].update({"classifier.bias": torch.ones(9)}), "shapes"),
        (
            lambda f: f["model_state_dict"].update({"classifier.bias": torch.ones(3).half()}),
            "dtypes",
        ),
        (lambda f: f.update(frozen_keys=[]), "recorded"),
        (lambda f: f.pop("frozen_keys"), "frozen_keys"),
    ],
)
def test_keys_shapes_and_dtypes(root: Path, change: Any, word: str) -> None:
    edit(root / WHERE.pool_path(1), change)
    assert any((p, c) == ("collect_001.pth", "keys") and word in d for p, c, d in broken(root))


@pytest.mark.parametrize("name", ["collect_step", "train_step", "val_metric", "val_loss"])
def test_fields_against_their_log(root: Path, name: str) -> None:
    edit(root / WHERE.pool_path(1), lambda f: f.update({name: 7}))
    assert any(c == "fields" and f"{name} 7" in d for _, c, d in broken(root))


@pytest.mark.parametrize(
    ("change", "check", "word"),
    [
        (lambda b: b.update(total_params=1), "counts", "total_params 1, found"),
        (lambda b: b.update(frozen_params=5), "counts", "frozen_params 5, found 1024"),
        (lambda b: b.update(generated_params=5), "counts", "generated_params 5"),
        (lambda b: b["pool"].update(count=5), "numbering", "1 of 5 files: collect_004.pth"),
        (lambda b: b["pool"]["val_loss"].update(mean=9), "statistics", "val_loss"),
        (
            lambda b: b["training_info"]["assemble_check"].update(ok=False),
            "assemble_check",
            "failed",
        ),
        (lambda b: b["collect_config"].update(collect_lr=9), "collect_config", "collect_lr"),
        (lambda b: b.update(frozen_keys=[]), "keys", "recorded []"),
        (lambda b: b["checkpoints"][1].update(sha256="0"), "digest", "sha256: logged 0"),
    ],
)
def test_what_the_registry_says(root: Path, change: Any, check: str, word: str) -> None:
    edit_record(root, change)
    assert any(c == check and word in d for _, c, d in broken(root)), broken(root)


def test_configurations(root: Path) -> None:
    """Seed: config.json is the base training config, collect_config.json names collect_lr."""
    (root / WHERE.config_path).write_text('{"lr": 3}')
    (root / WHERE.collect_config_path).write_text('{"save_every": 2}')
    found = {c: d for _, c, d in broken(root)}
    assert found == {"config": "the base holds another", "collect_config": "without collect_lr"}


@pytest.mark.parametrize("name", ["config", "collect_config"])
@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_configurations_that_are_none(root: Path, name: str, data: bytes) -> None:
    (root / getattr(WHERE, f"{name}_path")).write_bytes(data)
    found = [f for f in verify_zoo(root) if f.verdict == "unreadable"]
    assert [(f.path, f.check) for f in found] == [(getattr(WHERE, f"{name}_path"), name)]


def test_a_registry_that_is_none(root: Path) -> None:
    (root / WHERE.registry_path).write_text("{")
    with pytest.raises(LayoutError, match="not JSON"):
        list(verify_zoo(root))


def test_a_cell_without_a_record(root: Path) -> None:
    (root / WHERE.registry_path).write_text("[]")
    assert [(c, d) for _, c, d in broken(root)] == [
        ("record", "no record of text_classification/bertbase__agnews/bertbase_010")
    ]


ODD = [None, 3, "x", [], {}, [1], {"count": "x"}, {"val_metric": 1}, [{"val_metric": "x"}], 1e999]


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize(
    "name",
    [
        *("pool", "checkpoints", "training_info", "collect_config", "frozen_keys", "pin"),
        *("total_params", "frozen_params", "generated_params", "task", "pool_path"),
    ],
)
def test_odd_records_are_findings(root: Path, name: str, value: Any) -> None:
    """Whatever stands in a record, verification ends and says so; ``ls`` lists it."""
    from typer.testing import CliRunner

    from castore.cli import app

    edit_record(root, lambda b: b.update({name: value}))
    assert list(verify_zoo(root))
    shown = CliRunner().invoke(app, ["pools", "ls", str(root)])
    assert shown.exit_code == 0, shown.output


def test_unpinned_files(root: Path) -> None:
    """Files without a pin are reported as unpinned; ``--require-pin`` refuses them."""
    edit_record(root, lambda b: (b.pop("pin"), b.pop("checkpoints")))
    for i in range(4):
        edit(root / WHERE.pool_path(i), lambda f: f.pop("pin"))
    findings = [f for f in verify_zoo(root) if f.check == "pin"]
    assert [f.verdict for f in findings] == ["not-checked"] * 4
    assert all(f.detail == f"unpinned: {WORDS}" for f in findings)
    assert broken(root) == []
    assert len(broken(root, require_pin=True)) == 4


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", "half", "pickle"])
def test_files_that_cannot_be_read(root: Path, tmp_path: Path, data: Any) -> None:
    """CC7, SE1: named as unreadable; the others are still looked at."""
    path = root / WHERE.pool_path(1)
    if data == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif data == "pickle":
        torch.save({"model_state_dict": {}, "x": tmp_path}, path)
    else:
        path.write_bytes(data)
    found = [f for f in verify_zoo(root) if f.broken]
    assert [(f.path, f.check, f.verdict) for f in found] == [
        (WHERE.pool_path(1), "readable", "unreadable")
    ]


def test_a_tie_that_was_broken_in_the_base(zoo: Path, tmp_path: Path) -> None:
    shutil.copytree(zoo, tmp_path / "z")
    path = tmp_path / "z" / cell("t5small").base_path

    def untie(fields: dict[str, Any]) -> None:
        state = fields["model_state_dict"]
        state[FROZEN["t5small"][1]] = state[FROZEN["t5small"][1]] + 1

    edit(path, untie)
    details = [d for _, c, d in broken(tmp_path / "z") if c == "pin"]
    assert len(details) == 4
    assert all("tied and different in the base: transformer.shared.weight" in d for d in details)


def test_a_base_alone(tmp_path: Path) -> None:
    """A base without a pool: it is read, and its values are finite."""
    path = base_of(tmp_path, "wordavg")
    assert {f.check for f in verify_zoo(tmp_path)} == {"base", "config", "finite"}
    edit(path, lambda f: f["model_state_dict"]["head.bias"].fill_(float("inf")))
    assert broken(tmp_path) == [("wordavg_010.pth", "finite", "not finite: head.bias")]


def test_the_layout_of_the_documents_own_script(tmp_path: Path) -> None:
    """Files as the public layout has them: a record without digests, ``n`` in collect_config."""
    where = Cell("text_classification", "bertbase", "agnews", "bertbase_010")
    model = build("bertbase")
    state = model.state_dict()
    base = tmp_path / where.base_path
    base.parent.mkdir(parents=True)
    torch.save({"model_state_dict": state, "config": {"lr": 1}, "val_metric": 0.5}, base)
    (tmp_path / where.pool_folder).mkdir(parents=True)
    for i in range(2):
        kept = {k: v for k, v in state.items() if k != WORDS}
        fields = {"frozen_keys": [WORDS], "frozen_source": "/x", "collect_step": i, "train_step": i}
        torch.save(
            {"model_state_dict": kept, **fields, "val_metric": 0.1, "val_loss": 1.0},
            tmp_path / where.pool_path(i),
        )
    (tmp_path / where.config_folder).mkdir(parents=True)
    (tmp_path / where.config_path).write_text('{"lr": 1}')
    settings = {"collect_lr": 1e-5, "save_every": 5, "n": 2, "optimizer": "AdamW"}
    (tmp_path / where.collect_config_path).write_text(json.dumps(settings))
    total = sum(v.numel() for v in state.values())
    body = {
        "ckpt_path": where.base_path,
        "training_info": {"assemble_check": {"ok": True, "val_metric": 0.1}},
        "total_params": total,
        "frozen_params": 1024,
        "generated_params": total - 1024,
    }
    for document in (
        {where.name: body},
        {"cells": {where.name: body}},
        {"records": [body]},
        [body],
    ):
        (tmp_path / where.registry_path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / where.registry_path).write_text(json.dumps(document))
        findings = list(verify_zoo(tmp_path))
        assert [f for f in findings if f.broken] == []
        assert {f.check for f in findings if f.verdict == "not-checked"} == {
            "pin",
            "digest",
            "statistics",
        }


def test_findings_know_what_is_broken() -> None:
    assert [Finding("p", "c", v).broken for v in ("ok", "not-checked", "missing", "mismatch")] == [
        False,
        False,
        True,
        True,
    ]
