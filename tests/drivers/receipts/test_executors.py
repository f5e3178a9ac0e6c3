"""Receipts verified by workers: the same reports, in the same order."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from castore.cli import app
from castore.errors import BackendError
from castore.workers import Processes
from castore_receipts import verify as verify_module
from castore_receipts.sources import FolderSource, sources
from castore_receipts.subject import Family
from castore_receipts.verify import verify_all
from tests.drivers.receipts import runs
from tests.helpers import flip


def spoiled(root: Path) -> Path:
    policy = runs.folder(root, 40) / "policy.safetensors"
    policy.write_bytes(flip(policy.read_bytes(), -1))
    (runs.folder(root, 60) / "receipt.json").unlink()
    return root


def test_reports_are_the_same_whoever_makes_them(
    made: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run, its repository, a damaged run, and a place with nothing."""
    monkeypatch.setattr(verify_module, "_RECEIPTS", 2)
    places = [str(made), str(tmp_path / "none"), str(made / ".castore"), str(spoiled(copied))]
    expected = list(verify_all(places))
    assert {r.sound for r in expected} == {True, False}
    with ThreadPoolExecutor(2) as threads, Processes(1) as processes:
        for executor in (threads, processes):
            assert list(verify_all(places, executor=executor)) == expected


def test_a_worker_that_cannot_read_is_no_lost_receipt(copied: Path) -> None:
    found, _ = sources(copied)
    task = (found[0], Family(), True)
    [source] = {id(found[0]): found[0]}.values()
    assert isinstance(source, FolderSource)
    (copied / "checkpoints" / source.folder / "receipt.json").unlink()
    with pytest.raises(BackendError, match="could be read here"):
        verify_module._job(None, [task])
    assert verify_module._job(None, [(found[0], Family(), False)])[0].sound is False


def test_sources_pickle_without_secrets(place: tuple[str, dict[str, Any] | None]) -> None:
    url, options = place
    runs.run(url, 20, storage_options=options)
    [source], _ = sources(url, None, options)
    packed = pickle.dumps(source)
    for secret in (options or {}).get("key", ""), (options or {}).get("secret", ""):
        assert not secret or secret.encode() not in packed


def test_the_command_takes_workers(copied: Path) -> None:
    words = ["receipts", "verify", str(spoiled(copied)), "--json"]
    shown = [CliRunner().invoke(app, [*words, *more]) for more in ([], ["--workers", "1"])]
    assert [s.exit_code for s in shown] == [3, 3]
    first, second = ([json.loads(x) for x in s.stdout.splitlines()] for s in shown)
    assert first == second
