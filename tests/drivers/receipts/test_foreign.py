"""Folders that other programs wrote after the same document."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from castore import Repository
from castore.driver import find_driver
from castore_receipts import verify_all, verify_receipt
from tests.drivers.receipts import runs


def archive(root: Path, step: int, seeds: tuple[int, ...] = (7, 8)) -> Path:
    """A folder as the document's own lines write it, with its field names and no other."""
    folder = root / "checkpoints" / f"step_{step:07d}"
    folder.mkdir(parents=True, exist_ok=False)
    torch.manual_seed(step)
    tensors = {"actor.mu.weight": torch.randn(4, 3), "critic.qf0.0.bias": torch.randn(4)}
    save_file(tensors, str(folder / "policy.safetensors"))
    lengths = (5, 7)
    np.savez_compressed(
        folder / "validation.npz",
        **{f"trace_{s}": np.ones((n, 6), np.float32) for s, n in zip(seeds, lengths, strict=True)},
    )
    result: dict[str, Any] = {"mean_return": 12.5, "episode_lengths": list(lengths)}
    sha = hashlib.sha256((folder / "policy.safetensors").read_bytes()).hexdigest()
    result.update(
        {
            "step": step,
            "updates": step - 1,
            "seconds": time.perf_counter(),
            "policy_array_bytes": 48,
            "policy_digest": "blake2:77ab",
            "checkpoint_sha256": sha,
            "world_model_immutable": True,
            "mps_driver_bytes": 0,
        }
    )
    (folder / "receipt.json").write_text(json.dumps(result, indent=1))
    return folder


def test_a_foreign_folder_is_read_and_only_what_is_linked_is_judged(tmp_path: Path) -> None:
    """'a foreign policy_digest or adapter size whose rule is not known is not-checked, never
    mismatch'"""
    found = verify_receipt(archive(tmp_path, 100))
    assert found.foreign
    assert found.sound
    verdicts = {link.name: link.verdict for link in found.links}
    ok = {name for name, verdict in verdicts.items() if verdict == "ok"}
    assert ok == {"schema", "place", "checkpoint_sha256", "finite", "traces"}
    assert set(verdicts.values()) == {"ok", "not-checked"}
    assert found.unknown == ["episode_lengths"]
    assert found.receipt["episode_lengths"] == [5, 7], "unknown fields are kept"


def test_a_foreign_run_is_read_as_a_whole(tmp_path: Path) -> None:
    for step in (100, 200, 12_345_678):
        archive(tmp_path, step)
    found = list(verify_all([tmp_path]))
    assert [r.receipt["step"] for r in found] == [100, 200, 12_345_678]
    assert all(r.sound for r in found)


def test_foreign_tampering_is_caught_where_a_hash_links(tmp_path: Path) -> None:
    folder = archive(tmp_path, 100)
    path = folder / "policy.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert runs.problems(verify_receipt(folder)) == {"checkpoint_sha256": "mismatch"}
    path.write_bytes(data)
    (folder / "validation.npz").unlink()
    assert runs.problems(verify_receipt(folder)) == {"traces": "missing"}


@pytest.mark.parametrize(
    ("change", "link", "verdict"),
    [
        ({"checkpoint_sha256": None}, "checkpoint_sha256", "missing"),
        ({"checkpoint_sha256": "abc"}, "checkpoint_sha256", "mismatch"),
        ({"world_model_immutable": False}, "world_model", "mismatch"),
        ({"step": 99}, "place", "mismatch"),
        ({"step": "../../x"}, "place", "mismatch"),
        ({"validation_sha256": "0" * 64}, "validation_sha256", "mismatch"),
        ({"mean_return": "high"}, "schema", "mismatch"),
        ({"updates": None}, "schema", "missing"),
    ],
    ids=str,
)
def test_what_a_foreign_receipt_says_wrongly_is_told(
    tmp_path: Path, change: dict[str, Any], link: str, verdict: str
) -> None:
    folder = archive(tmp_path, 100)
    receipt = {**json.loads((folder / "receipt.json").read_text()), **change}
    receipt = {k: v for k, v in receipt.items() if v is not None}
    (folder / "receipt.json").write_text(json.dumps(receipt))
    assert verify_receipt(folder)[link].verdict == verdict


def test_rc2_a_foreign_receipt_with_nan_is_unreadable_and_says_where(tmp_path: Path) -> None:
    folder = archive(tmp_path, 100)
    text = (folder / "receipt.json").read_text().replace("12.5", "NaN")
    (folder / "receipt.json").write_text(text)
    found = verify_receipt(folder)
    assert found["receipt"].verdict == "unreadable"
    assert "'mean_return'" in found["receipt"].detail
    assert found["finite"].verdict == "ok"


def test_a_nonfinite_tensor_in_a_foreign_file_is_named(tmp_path: Path) -> None:
    folder = archive(tmp_path, 100)
    save_file({"actor.w": torch.tensor([0.0, float("inf")])}, str(folder / "policy.safetensors"))
    found = verify_receipt(folder)["finite"]
    assert found.verdict == "mismatch"
    assert "actor.w: 1 not finite, the first at [1]: inf" in found.detail


def test_our_folder_without_optional_fields_reads_as_foreign(made: Path, tmp_path: Path) -> None:
    found = verify_receipt(runs.foreign(tmp_path / "step_0000040", runs.folder(made, 40)))
    assert found.foreign
    assert found.sound


def test_foreign_folders_are_collected_into_a_repository_and_verified_there(tmp_path: Path) -> None:
    for step in (100, 200):
        archive(tmp_path / "old", step)
    repository = Repository.init(tmp_path / "store")
    driver = find_driver("receipts")
    names = [repository.commit(d, namespace="old").name for d in driver.collect(tmp_path / "old")]
    assert [n.key for n in names] == ["receipt.step_0000100", "receipt.step_0000200"]
    assert not [d for n in names for d in driver.verify(repository, n)]
    assert [r.sound for r in verify_all([tmp_path / "store"])] == [True, True]
