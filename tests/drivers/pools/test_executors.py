"""Pools verified by workers: the same findings, in the same order."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from castore import Repository
from castore.cli import app
from castore.errors import BackendError
from castore.workers import Processes
from castore_pools import import_zoo, verify_zoo
from castore_pools import verify as verify_module
from castore_pools.layout import survey
from castore_pools.places import FolderPlace, SnapshotPlace, UrlPlace
from castore_pools.verify import verify_place


def keys_of(state: Mapping[str, Any], fields: Mapping[str, Any]) -> float:
    """A metric that workers find by its name; never what was logged."""
    return float(len(state))


@pytest.fixture
def spoiled(zoo: Path, tmp_path: Path) -> Path:
    """A zoo with a cut pool file, a changed one, and a base that is gone."""
    root = tmp_path / "spoiled"
    shutil.copytree(zoo, root)
    pool = sorted(p for p in (root / "ckpt").rglob("*bertbase*/**/*.pth"))
    pool[0].write_bytes(pool[0].read_bytes()[:-100])
    shutil.copy(pool[2], pool[1])
    next((root / "zoo").rglob("t5small/*.pth")).unlink()
    return root


def test_findings_are_the_same_whoever_makes_them(
    zoo: Path, spoiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells are cut into jobs of a few files; the metric runs in the workers too."""
    monkeypatch.setattr(verify_module, "_FILES", 2)
    with ThreadPoolExecutor(2) as threads, Processes(1) as processes:
        for root in (zoo, spoiled):
            metric = keys_of if root == spoiled else None
            expected = list(verify_zoo(root, metric=metric))
            assert any(f.broken for f in expected) == (root == spoiled)
            for executor in (threads, processes):
                assert list(verify_zoo(root, metric=metric, executor=executor)) == expected


def test_pools_of_a_repository_by_workers(
    zoo: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "_FILES", 3)
    names = [str(made.name) for made in import_zoo(repository, zoo, "agnews")]
    place = SnapshotPlace(repository, names)
    expected = list(verify_place(place))
    with Processes(1) as processes:
        assert list(verify_place(place, executor=processes)) == expected


def test_a_worker_on_another_disk_is_told(zoo: Path, tmp_path: Path) -> None:
    shutil.copytree(zoo, tmp_path / "zoo")
    place = FolderPlace(tmp_path / "zoo")
    files = survey(place).cells[0]
    shutil.rmtree(tmp_path / "zoo")
    with pytest.raises(BackendError, match="local path must lead"):
        verify_module._job(place, files, None, 3, False, range(8))


def test_places_pickle_without_secrets() -> None:
    packed = pickle.dumps(UrlPlace("s3://bucket/zoo", {"key": "tell-no-one", "anon": False}))
    assert b"tell-no-one" not in packed
    assert pickle.loads(packed).where == "s3://bucket/zoo"


def test_the_command_takes_workers(spoiled: Path) -> None:
    words = ["pools", "verify", str(spoiled), "--json"]
    shown = [CliRunner().invoke(app, [*words, *more]) for more in ([], ["--workers", "1"])]
    assert [s.exit_code for s in shown] == [3, 3]
    first, second = ([json.loads(x) for x in s.stdout.splitlines()] for s in shown)
    assert first == second
