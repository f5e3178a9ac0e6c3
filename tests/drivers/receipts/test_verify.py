"""Every kind of tampering is caught, with the verdict that says what it is."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from castore import InvalidInputError, NotFoundError, Repository
from castore_receipts import claims, documents, verify_all, verify_receipt
from castore_receipts.claims import schema
from castore_receipts.gates import Gate
from castore_receipts.record import sha256
from castore_receipts.sources import FolderSource, sources
from castore_receipts.subject import Family, Subject
from castore_receipts.traces import read_npz, write_npz
from castore_receipts.verify import report
from tests.drivers.receipts import runs
from tests.helpers import flip, flip_object


def at(root: Path, step: int = 40) -> Path:
    return runs.folder(root, step)


def test_every_link_of_a_whole_run_holds(made: Path) -> None:
    for place in (made, made / ".castore"):
        found = list(verify_all([place]))
        assert [r.receipt["role"] for r in found] == ["validation"] * 3 + ["final"]
        for one in found:
            assert one.sound
            assert one.verdict == "ok"
            unchecked = {n.name for n in one.links if n.verdict == "not-checked"}
            state = {"state"} if place == made and one.receipt["role"] == "validation" else set()
            assert unchecked == {"signature", "signer"} | state


# -- one byte


def flips(size: int, count: int) -> list[int]:
    """The first and last bytes, and some between."""
    return sorted({0, 1, 7, 8, 9, size - 1, *np.linspace(10, size - 2, count, dtype=int).tolist()})


@pytest.mark.parametrize(
    ("file", "link"),
    [("policy.safetensors", "checkpoint_sha256"), ("validation.npz", "validation_sha256")],
)
def test_any_flipped_byte_of_weights_or_traces_is_a_mismatch(
    copied: Path, file: str, link: str
) -> None:
    path = at(copied) / file
    data = path.read_bytes()
    for i in flips(len(data), 40):
        path.write_bytes(flip(data, i, 0x10))
        found = verify_receipt(at(copied))
        assert found[link].verdict == "mismatch", i
        assert found["receipt"].verdict == "ok"
        other = {"checkpoint_sha256", "validation_sha256"} - {link}
        assert found[other.pop()].verdict == "ok", "everything is checked after a failure"


def test_any_flipped_byte_of_a_receipt_is_caught(copied: Path) -> None:
    """Each byte, three bits: a digit, a name, a brace, the mark that says whose it is."""
    source = sources(at(copied))[0][0]
    data = (at(copied) / "receipt.json").read_bytes()
    seen = set()
    for i in range(len(data)):
        for mask in (0x01, 0x20, 0x80):
            subject = _parsed(source, flip(data, i, mask))
            found = claims.receipt(subject)
            assert found.verdict in ("mismatch", "unreadable", "missing"), (i, mask)
            seen.add(found.verdict)
    assert seen == {"mismatch", "unreadable", "missing"}


def _parsed(source: Any, data: bytes) -> Subject:
    """What `Subject.read` would give if ``data`` were the receipt, only the receipt's links on."""

    class Other:
        name, folder, holds_state = source.name, "other", False

        def read(self, file: str) -> bytes:
            if file == "receipt.json":
                return data
            raise NotFoundError(file)

    return Subject.read(Other())


@pytest.mark.parametrize("keep", [0, 1, -1])
@pytest.mark.parametrize(
    ("file", "link", "verdict"),
    [
        ("policy.safetensors", "checkpoint_sha256", "mismatch"),
        ("policy.safetensors", "finite", "unreadable"),
        ("validation.npz", "validation_sha256", "mismatch"),
        ("validation.npz", "traces", "unreadable"),
        ("receipt.json", "receipt", "unreadable"),
    ],
)
def test_cc7_a_file_cut_short_is_told_by_name_and_size(
    copied: Path, file: str, link: str, verdict: str, keep: int
) -> None:
    path = at(copied) / file
    data = path.read_bytes()[:keep]
    path.write_bytes(data)
    found = verify_receipt(at(copied))
    if (file, keep) == ("receipt.json", -1):
        verdict = "mismatch"  # the newline at the end: still JSON, no longer canonical
    assert found[link].verdict == verdict
    if link.endswith("sha256"):
        assert f"{file} ({len(data)} bytes)" in found[link].detail
        assert "fetch" in found[link].detail


@pytest.mark.parametrize(
    ("file", "links"),
    [
        ("policy.safetensors", {"checkpoint_sha256", "finite", "policy_digest"}),
        ("validation.npz", {"validation_sha256", "traces", "returns"}),
        ("receipt.json", {"receipt"}),
    ],
)
def test_a_file_that_is_not_there_is_missing(copied: Path, file: str, links: set[str]) -> None:
    (at(copied) / file).unlink()
    found = runs.problems(verify_receipt(at(copied)))
    assert links <= found.keys()
    assert set(found.values()) == {"missing"}


def test_a_file_that_may_not_be_read_is_unreadable(copied: Path) -> None:
    (at(copied) / "policy.safetensors").unlink()
    (at(copied) / "policy.safetensors").symlink_to("/etc/hostname")
    found = verify_receipt(at(copied))
    assert found["checkpoint_sha256"].verdict == "unreadable"
    assert "symbolic link" in found["checkpoint_sha256"].detail


# -- exchanged


@pytest.mark.parametrize(
    ("file", "link"),
    [("policy.safetensors", "checkpoint_sha256"), ("validation.npz", "validation_sha256")],
)
def test_files_of_two_folders_exchanged_are_caught_in_both(
    copied: Path, file: str, link: str
) -> None:
    one, two = at(copied, 20) / file, at(copied, 60) / file
    os.rename(one, copied / "x")
    os.rename(two, one)
    os.rename(copied / "x", two)
    found = list(verify_all([copied]))
    assert [r[link].verdict for r in found[:3]] == ["mismatch", "ok", "mismatch"]


def test_exchanged_receipts_and_exchanged_folders_are_caught(copied: Path) -> None:
    one, two = (at(copied, s) / "receipt.json" for s in (20, 60))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    found = list(verify_all([copied]))
    for r in (found[0], found[2]):
        assert r["place"].verdict == r["checkpoint_sha256"].verdict == "mismatch"
    one.write_bytes(first)
    two.write_bytes(second)
    os.rename(at(copied, 20), copied / "x")
    os.rename(at(copied, 60), at(copied, 20))
    os.rename(copied / "x", at(copied, 60))
    found = list(verify_all([copied]))
    assert [r["place"].verdict for r in found[:3]] == ["mismatch", "ok", "mismatch"]
    assert "step 60 in folder 'step_0000020'" in found[0]["place"].detail


# -- traces


def retrace(folder: Path, change: Callable[[dict[str, Any]], Any], link: bool) -> None:
    """Change the traces; with ``link`` also the hash of the file, as an insider would."""
    path = folder / "validation.npz"
    arrays = {n: a.copy() for n, a in read_npz(path.read_bytes(), "x").items()}
    change(arrays)
    path.write_bytes(write_npz(arrays))
    if link:
        runs.forge(folder, lambda r: r.update(validation_sha256=sha256(path.read_bytes())))


TRACES: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, str]]] = {
    "deleted": (lambda a: a.pop("trace_101"), {"traces": "missing", "returns": "mismatch"}),
    "all deleted": (lambda a: a.clear(), {"traces": "missing", "returns": "mismatch"}),
    "added": (
        lambda a: a.update(trace_5=a["trace_101"]),
        {"traces": "mismatch", "returns": "mismatch"},
    ),
    "renamed": (
        lambda a: a.update(trace_7=a.pop("trace_101")),
        {"traces": "missing", "returns": "mismatch"},
    ),
    "cut": (
        lambda a: a.update(trace_101=a["trace_101"][:-1]),
        {"traces": "mismatch", "returns": "mismatch"},
    ),
    "not finite": (lambda a: a["trace_102"].__setitem__((3, 1), np.nan), {"traces": "mismatch"}),
    "a reward": (lambda a: a["trace_102"].__setitem__((3, 4), 0.5), {"returns": "mismatch"}),
    "something else": (lambda a: a.update(other=np.zeros(2)), {"traces": "mismatch"}),
}


@pytest.mark.parametrize(("change", "expected"), TRACES.values(), ids=TRACES)
def test_a_changed_trace_is_caught_by_its_hash_and_by_what_it_says(
    copied: Path, change: Any, expected: dict[str, str]
) -> None:
    retrace(at(copied), change, link=False)
    found = runs.problems(verify_receipt(at(copied)))
    assert found["validation_sha256"] == "mismatch"
    assert found.items() >= expected.items()


@pytest.mark.parametrize(("change", "expected"), TRACES.values(), ids=TRACES)
def test_a_changed_trace_is_caught_even_where_the_hash_was_forged(
    copied: Path, change: Any, expected: dict[str, str]
) -> None:
    retrace(at(copied), change, link=True)
    found = runs.problems(verify_receipt(at(copied)))
    assert "validation_sha256" not in found
    assert found.keys() == expected.keys()


def test_rc3_a_trace_with_a_pickle_is_unreadable_and_not_run(copied: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        inner = io.BytesIO()
        np.lib.format.write_array(inner, np.array([{"a": 1}], dtype=object))
        archive.writestr("trace_101.npy", inner.getvalue())
    (at(copied) / "validation.npz").write_bytes(buffer.getvalue())
    found = verify_receipt(at(copied))
    assert found["traces"].verdict == "unreadable"
    assert "never" in found["traces"].detail


# -- numbers


NUMBERS = ["step", "updates", "seconds", "mean_return", "policy_array_bytes", "parameter_bytes"]


@pytest.mark.parametrize("name", [*NUMBERS, "process_peak_bytes"])
def test_an_edited_number_is_caught_without_signatures(copied: Path, name: str) -> None:
    receipt = runs.read(at(copied))
    receipt[name] += 1
    (at(copied) / "receipt.json").write_bytes(documents.encode(receipt))
    found = verify_receipt(at(copied))["receipt"]
    assert found.verdict == "mismatch"
    assert "edited" in found.detail


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "mean return": (lambda r: r.update(mean_return=0.0), "returns", "mismatch"),
    "one return": (lambda r: r["returns"].update({"101": 0.0}), "returns", "mismatch"),
    "array bytes": (lambda r: r.update(policy_array_bytes=1), "policy_array_bytes", "mismatch"),
    "policy digest": (lambda r: r.update(policy_digest="0" * 64), "policy_digest", "mismatch"),
    "unknown rule": (lambda r: r.update(policy_digest_rule="x"), "policy_digest", "mismatch"),
    "an array that is not there": (
        lambda r: r["adapter"]["arrays"].append("x"),
        "policy_digest",
        "missing",
    ),
    "step": (lambda r: r.update(step=41), "place", "mismatch"),
    "budget for completed": (
        lambda r: r["budget"]["completed"].update(environment_steps=1000),
        "budget",
        "mismatch",
    ),
    "world model": (lambda r: r.update(world_model_immutable=False), "world_model", "mismatch"),
    "watched": (lambda r: r["watched"].update(after="0" * 64), "world_model", "mismatch"),
    "normaliser": (lambda r: r["adapter"].update(normalizer=True), "normalizer", "mismatch"),
    "parent's step": (lambda r: r["parent"].update(step=10), "parent", "mismatch"),
    "parent's digest": (
        lambda r: r["parent"].update(receipt_sha256="0" * 64),
        "parent",
        "missing",
    ),
    "fewer updates than the parent": (
        lambda r: (r.update(updates=-1), r["budget"]["completed"].update(updates=-1)),
        "budget",
        "mismatch",
    ),
    "a gate more": (
        lambda r: r.update(gates=[Gate("walks", "step", 1.0).decide(r)]),
        "gates",
        "mismatch",
    ),
    "bytes": (lambda r: r.update(checkpoint_bytes=1), "checkpoint_sha256", "mismatch"),
    "tensors": (lambda r: r.update(tensors=1), "finite", "mismatch"),
    "no state": (lambda r: r.pop("state"), "state", "missing"),
    "a word for a number": (lambda r: r.update(seconds="9"), "schema", "mismatch"),
    "a field gone": (lambda r: r.pop("batch_size"), "schema", "missing"),
}


@pytest.mark.parametrize(("change", "link", "verdict"), FORGED.values(), ids=FORGED)
def test_a_number_forged_with_a_fitting_digest_is_caught_where_something_links_it(
    copied: Path, change: Any, link: str, verdict: str
) -> None:
    runs.forge(at(copied), change)
    found = {r.receipt["step"]: r for r in verify_all([copied]) if "/check" in r.location}
    forged = next(r for r in found.values() if r.location.endswith("step_0000040"))
    assert forged["receipt"].verdict == "ok"
    assert forged[link].verdict == verdict
    child = found[60]
    assert child["parent"].verdict == "missing", "the next receipt names the one before by digest"


# -- roles


ROLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "final seed validated too": lambda r: r["seeds"]["final"].append(101),
    "validation seed called final": lambda r: r["seeds"].update(
        validation=[102], final=[101, 900], consumed={"102": 2}
    ),
    "feedback not counted": lambda r: r["seeds"].update(consumed={"101": 0, "102": 2}),
    "counted less than before": lambda r: r["seeds"].update(consumed={"101": 1, "102": 2}),
    "count left out": lambda r: r["seeds"].update(consumed={}),
    "no roles": lambda r: r.update(seeds={"validation": "101"}),
}


@pytest.mark.parametrize("change", ROLES.values(), ids=ROLES)
def test_a_seed_whose_role_is_used_again_is_caught(copied: Path, change: Any) -> None:
    runs.forge(at(copied), change)
    found = next(r for r in verify_all([copied]) if r.location.endswith("step_0000040"))
    assert found["receipt"].verdict == "ok"
    assert found["seeds"].verdict == "mismatch"


def test_a_final_evaluation_on_validation_seeds_is_caught(copied: Path) -> None:
    final = copied / "final/evaluation_0001"

    path = final / "evaluation.npz"
    traces = read_npz(path.read_bytes(), "x")
    path.write_bytes(write_npz({"trace_101": traces["trace_900"]}))

    def change(receipt: dict[str, Any]) -> None:
        """Everything fits, but for 101 having been a validation seed."""
        receipt["seeds"] |= {"validation": [102], "final": [101], "consumed": {"102": 3}}
        for name in ("returns", "traces"):
            receipt[name] = {"101": receipt[name]["900"]}
        receipt["evaluation_sha256"] = sha256(path.read_bytes())

    runs.forge(final, change)
    found = next(r for r in verify_all([copied]) if "/final/" in r.location)
    assert runs.problems(found) == {"seeds": "mismatch"}


def test_a_final_evaluation_of_another_policy_is_caught(copied: Path) -> None:
    final = copied / "final/evaluation_0001"
    runs.forge(final, lambda r: r.update(policy_digest="1" * 64))
    found = next(r for r in verify_all([copied]) if "/final/" in r.location)
    assert found["parent"].verdict == "mismatch"


# -- chains


def test_a_receipt_taken_out_of_the_chain_is_missing(copied: Path) -> None:
    shutil.rmtree(at(copied))
    found = list(verify_all([copied]))
    assert found[1]["parent"].verdict == "missing"
    assert verify_receipt(at(copied, 60))["parent"].verdict == "not-checked", "one folder alone"


def test_a_folder_without_receipt_is_told(copied: Path) -> None:
    (at(copied) / "receipt.json").unlink()
    found = list(verify_all([copied]))
    assert found[1]["receipt"].verdict == "missing"
    assert found[1]["finite"].verdict == "ok", "what is there is checked"


# -- se2, se6


@pytest.mark.parametrize(
    "path",
    ["../../x", "/etc/passwd", "%2e%2e/x", "..\\x", "C:x", "a\0b", "s3://other/x", "file:///x"],
)
def test_se2_no_field_of_a_receipt_leads_the_verifier_anywhere(
    copied: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every text in the receipt is the path, forged with a fitting digest; the names read stay."""

    def poisoned(value: Any) -> Any:
        if isinstance(value, dict):
            return {k if k in keep else path: poisoned(v) for k, v in value.items()}
        return [poisoned(v) for v in value] if isinstance(value, list) else path

    keep = set(runs.read(at(copied))) | {"sha256", "validation", "final", "consumed", "arrays"}
    read: list[str] = []
    real = FolderSource.read
    monkeypatch.setattr(FolderSource, "read", lambda s, f: read.append(f) or real(s, f))
    runs.forge(at(copied), lambda r: r.update(poisoned(r)))
    found = verify_receipt(at(copied))
    assert not found.sound
    assert set(read) <= {"receipt.json", "policy.safetensors", "validation.npz"} | {
        "normalizer.safetensors"
    }


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3),
    max_leaves=8,
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None
)
@given(st.data())
def test_a_receipt_with_any_value_anywhere_gets_verdicts_and_no_crash(
    made: Path, data: st.DataObject
) -> None:
    receipt = json.loads((at(made) / "receipt.json").read_bytes())
    spots = [(receipt, k) for k in receipt]
    for value in list(receipt.values()):
        if isinstance(value, dict):
            spots += [(value, k) for k in value]
    holder, key = data.draw(st.sampled_from(spots))
    holder[key] = data.draw(VALUES)
    if data.draw(st.booleans()):
        receipt.pop("kind")
        receipt.pop("format")
        receipt.pop("receipt_sha256", None)
    try:
        raw = documents.canonical(receipt)
        documents.parse(raw, "x")
    except ValueError:
        return
    source = sources(at(made))[0][0]
    subject = Subject(source, Family([receipt], True), None, raw, receipt)
    for link in report(subject).links:
        assert link.verdict in ("ok", "mismatch", "missing", "unreadable", "not-checked")


# -- schema, places


def test_our_receipts_follow_the_shipped_schema(made: Path) -> None:
    Draft202012Validator.check_schema(schema())
    validator = Draft202012Validator(schema())
    for path in made.rglob("receipt.json"):
        if ".castore" not in path.parts:
            assert not list(validator.iter_errors(json.loads(path.read_bytes())))
    own = schema()["$defs"]["own"]["properties"]
    written = set(runs.read(at(made))) | set(runs.read(made / "final/evaluation_0001"))
    assert written <= own.keys(), "every field we write is described"


def test_a_newer_format_is_refused_by_name(copied: Path) -> None:
    receipt = runs.read(at(copied)) | {"format": 2}
    (at(copied) / "receipt.json").write_bytes(documents.encode(receipt))
    found = verify_receipt(at(copied))["receipt"]
    assert found.verdict == "unreadable"
    assert "upgrade" in found.detail


def test_nothing_there_is_an_error_and_among_many_a_report(tmp_path: Path, made: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError):
        verify_receipt(tmp_path / "empty")
    with pytest.raises(InvalidInputError, match="4 receipts"):
        verify_receipt(made)
    found = list(verify_all([tmp_path / "empty", tmp_path / "none", at(made)]))
    assert [r.verdict for r in found] == ["missing", "unreadable", "ok"]


def test_a_snapshot_is_verified_with_its_state(made: Path) -> None:
    repository = Repository.open(made / ".castore")
    name = str(next(n for n in repository.snapshots() if n.key == "receipt.step_0000040"))
    found = verify_receipt(name, repository=repository)
    assert found["state"].verdict == "ok"
    assert found.sound


def test_damage_in_the_repository_is_told_as_unreadable_and_the_rest_is_checked(
    made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path / "run")
    repository = Repository.open(tmp_path / "run/.castore")
    names = {n.key: n for n in repository.snapshots()}
    file = repository.tree(names["receipt.step_0000040"]).entries[
        "checkpoints/step_0000040/validation.npz"
    ]
    flip_object(repository, file.blobs()[0])  # type: ignore[union-attr]
    flip_object(repository, repository.snapshot(names["receipt.step_0000020"]).tree)
    found = list(verify_all([tmp_path / "run/.castore"]))
    assert found[0]["receipt"].verdict == "unreadable"
    assert not found[1].sound
    assert found[1]["validation_sha256"].verdict in ("unreadable", "ok")
    assert found[3].sound


def test_a_folder_of_runs_and_a_receipts_own_path_are_locations_too(
    made: Path, tmp_path: Path
) -> None:
    for name in ("a", "lr[1e-3]"):
        shutil.copytree(made, tmp_path / name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/x.txt").write_text("x")
    assert [r.sound for r in verify_all([tmp_path])] == [True] * 8
    assert verify_receipt(at(made) / "receipt.json").sound


class Evil:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("file", ["policy.safetensors", "validation.npz", "receipt.json"])
@pytest.mark.parametrize("torch_zip", [False, True])
def test_se1_a_pickle_in_any_file_is_never_run(
    copied: Path, tmp_path: Path, file: str, torch_zip: bool
) -> None:
    path, mark = at(copied) / file, tmp_path / "ran"
    if torch_zip:
        torch.save({"a": Evil(mark)}, path)
    else:
        path.write_bytes(pickle.dumps({"a": Evil(mark)}))
    assert not verify_receipt(at(copied)).sound
    assert not mark.exists()
