"""Files and folders made to stop, exhaust or mislead a verifier: each one is a verdict."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from castore import FormatError, LayoutError
from castore_receipts import documents, gates, verify_all, verify_receipt
from castore_receipts.arrays import read_safetensors
from castore_receipts.driver import ReceiptsDriver
from castore_receipts.record import sha256
from castore_receipts.traces import read_npz, write_npz
from tests.drivers.receipts import runs


def one_tensor(**entry: Any) -> bytes:
    whole = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **entry}
    header = json.dumps({"a": whole}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"shape": [(1 << 61) + 1] * 300_000}, "300000 dimensions, at most 64"),
        ({"shape": [1] * 65}, "65 dimensions, at most 64"),
        ({"dtype": []}, "malformed dtype"),
        ({"dtype": {}}, "malformed dtype"),
        ({"dtype": None}, "malformed dtype"),
    ],
)
def test_se6_a_header_that_lies_is_refused_at_once(entry: dict[str, Any], word: str) -> None:
    """A product of 300 000 dimensions would take hours; 64 is what NumPy and torch have."""
    with pytest.raises(FormatError, match=word):
        read_safetensors(one_tensor(**entry), "x")


def test_se6_as_many_dimensions_as_numpy_has_are_read() -> None:
    assert read_safetensors(one_tensor(shape=[1] * 64), "x").tensors["a"].numpy().ndim == 64


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_traces_packed_otherwise_than_numpy_does_are_refused(method: int) -> None:
    """An LZMA member allocates what its header asks for, and a damaged one is no `ValueError`."""
    inner, buffer = io.BytesIO(), io.BytesIO()
    np.save(inner, np.zeros((3, 5)))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("trace_101.npy", inner.getvalue())
    with pytest.raises(FormatError, match="only stored and deflated"):
        read_npz(buffer.getvalue(), "x")


def test_returns_of_no_trace_are_missing_and_not_divided(copied: Path) -> None:
    folder = runs.folder(copied, 40)
    packed = write_npz({})
    (folder / "validation.npz").write_bytes(packed)
    new = {"returns": {"101": None}, "validation_sha256": sha256(packed)}
    runs.forge(folder, lambda r: r.update(new))
    found = runs.problems(verify_receipt(folder))
    assert found["returns"] == found["traces"] == "missing"


WEIRD: list[Any] = [[], "x", None, 10**4000, {"101": None}]


def test_any_field_of_any_type_is_a_verdict(copied: Path) -> None:
    """Whatever a field holds, the verifier ends, and everything else is still looked at."""
    folder = runs.folder(copied, 40)
    original = (folder / "receipt.json").read_bytes()
    links = len(verify_receipt(folder).links)
    for field in json.loads(original):
        for value in WEIRD:
            body = {**json.loads(original), field: value}
            body |= {"receipt_sha256": documents.digest_of(body)}
            (folder / "receipt.json").write_bytes(documents.canonical(body))
            if field != "role":
                assert len(verify_receipt(folder).links) == links, (field, value)


def test_a_million_breaches_of_the_schema_are_not_all_told(copied: Path) -> None:
    folder = runs.folder(copied, 40)
    runs.forge(folder, lambda r: r.update(gates=[{}] * 200_000))
    found = verify_receipt(folder)
    assert found["schema"].verdict == "missing"
    assert len(found["schema"].detail) < 2_000


# -- folders


def move(copied: Path) -> None:
    os.rename(runs.folder(copied, 60), copied / "checkpoints/old")


def copy(copied: Path) -> None:
    shutil.copytree(runs.folder(copied, 60), copied / "checkpoints/step_0000099")


def copy_by_hand(copied: Path) -> None:
    shutil.copytree(runs.folder(copied, 60), copied / "checkpoints/step_0000060 (copy)")


def link(copied: Path) -> None:
    os.rename(runs.folder(copied, 60), copied / "elsewhere")
    os.symlink(copied / "elsewhere", runs.folder(copied, 60))


def link_all(copied: Path) -> None:
    os.rename(copied / "checkpoints", copied / "elsewhere")
    os.symlink(copied / "elsewhere", copied / "checkpoints")


@pytest.mark.parametrize(
    ("change", "place", "broken", "verdict"),
    [
        (move, "old", "place", "mismatch"),
        (copy, "step_0000099", "place", "mismatch"),
        (copy_by_hand, "step_0000060 (copy)", "receipt", "unreadable"),
        (link, "step_0000060", "receipt", "unreadable"),
        (link_all, "checkpoints", "receipt", "unreadable"),
    ],
)
def test_a_folder_that_is_not_where_it_was_written_is_never_skipped(
    copied: Path, change: Callable[[Path], None], place: str, broken: str, verdict: str
) -> None:
    """The newest folder too, which no other names as its parent."""
    shutil.rmtree(copied / "final")
    change(copied)
    found = {r.location.rpartition("/")[2]: r for r in verify_all([copied])}
    assert found[place][broken].verdict == verdict


def test_a_receipt_that_is_a_link_is_a_verdict(copied: Path) -> None:
    folder = runs.folder(copied, 40)
    os.rename(folder / "receipt.json", copied / "r.json")
    os.symlink(copied / "r.json", folder / "receipt.json")
    found = verify_receipt(folder)["receipt"]
    assert found.verdict == "unreadable"
    assert "symbolic link" in found.detail


def test_a_pipe_in_place_of_a_file_is_not_waited_for(copied: Path) -> None:
    path = runs.folder(copied, 40) / "policy.safetensors"
    path.unlink()
    os.mkfifo(path)
    found = verify_receipt(runs.folder(copied, 40))
    assert found["checkpoint_sha256"].verdict in ("unreadable", "missing", "mismatch")


def test_a_destination_without_folders_is_read_from_its_repository(
    made: Path, tmp_path: Path
) -> None:
    """``materialize=False``, alone and in a folder of runs beside one that has folders."""
    shutil.copytree(made / ".castore", tmp_path / "all/hidden/.castore")
    shutil.copytree(made / "checkpoints", tmp_path / "all/shown/checkpoints")
    shutil.copytree(made / ".castore", tmp_path / "all/store")
    alone = list(verify_all([tmp_path / "all/hidden"]))
    assert [r.receipt["step"] for r in alone] == [20, 40, 60, 60]
    assert all(r.sound and r["state"].verdict == "ok" for r in alone[:3])
    found = list(verify_all([tmp_path / "all"]))
    assert len(found) == 4 + 3 + 4
    assert all(r.sound for r in found)


def test_the_file_itself_may_be_named(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.folder(made, 40))
    assert verify_receipt("receipt.json")["place"].verdict == "ok"
    assert verify_receipt(".")["place"].verdict == "ok"


def test_what_is_no_folder_of_a_receipt_is_not_collected(made: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for root, word in ((tmp_path / "empty", "no receipts"), (made / ".castore", "castore copy")):
        with pytest.raises(LayoutError, match=word):
            list(ReceiptsDriver().collect(root))


@pytest.mark.parametrize("name", ["policy.safetensors", "validation.npz", "validation.zarr"])
def test_se2_a_link_is_not_collected(copied: Path, tmp_path: Path, name: str) -> None:
    """It would bring a file of this machine into a repository that others read."""
    secret = tmp_path / "secret"
    secret.mkdir() if name.endswith(".zarr") else secret.write_bytes(b"x")
    at = runs.folder(copied, 40) / name
    at.unlink(missing_ok=True)
    at.symlink_to(secret)
    with pytest.raises(LayoutError, match=f"{name} is a symbolic link"):
        list(ReceiptsDriver().collect(copied))


def test_a_gate_may_be_inherited_from_an_expansion_only() -> None:
    """Otherwise the word would excuse a gate from the number it speaks about."""
    gate = gates.Gate("walks", "mean_return", 5.0).decide({"mean_return": 9.0})
    held = {"mean_return": 1.0, "gates": [{**gate, "inherited": True}]}
    assert gates.defects({**held, "parent": {"relation": "previous"}}, None)
    assert not gates.defects({**held, "parent": {"relation": "expanded"}}, None)
