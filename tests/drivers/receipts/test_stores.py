"""The same run on a local disk, in memory and on a real S3 server."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from castore import AlreadyExistsError, Repository
from castore.backends import open_backend
from castore_receipts import verify_all, verify_receipt
from castore_receipts.resuming import resume
from tests.drivers.receipts import runs


def test_a_run_is_written_verified_resumed_and_never_overwritten(place: Any) -> None:
    url, options = place
    made = runs.run(url, 40, storage_options=options, replay_buffer=True)
    made.final_evaluation()
    found = list(verify_all([url], storage_options=options))
    assert [r.receipt["role"] for r in found] == ["validation", "validation", "final"]
    assert all(r.sound for r in found)
    store = list(verify_all([f"{url}/.castore"], storage_options=options))
    assert [r["state"].verdict for r in store if r.receipt["role"] == "validation"] == ["ok", "ok"]
    with pytest.raises(AlreadyExistsError):
        runs.run(url, 20, storage_options=options)
    model = runs.model(9)
    again = resume(
        model, url, 40, storage_options=options, log=io.StringIO(), environment=runs.pendulum
    )
    model.learn(20, callback=again, reset_num_timesteps=False)
    whole = runs.model()
    whole.learn(60)
    assert runs.equal(whole, model)
    assert [r["parent"].verdict for r in verify_all([url], storage_options=options)] == ["ok"] * 4


def test_damage_is_told_alike(place: Any) -> None:
    url, options = place
    runs.run(url, 20, storage_options=options)
    backend = open_backend(url, options)
    name = "checkpoints/step_0000020/validation.npz"
    backend.delete(name)
    one = f"{url}/checkpoints/step_0000020"
    found = verify_receipt(one, storage_options=options)
    assert found["validation_sha256"].verdict == "missing"
    backend.create(name, b"else")
    found = verify_receipt(one, storage_options=options)
    assert found["validation_sha256"].verdict == "mismatch"
    assert found["traces"].verdict == "unreadable"


def test_receipt_comes_last_and_what_a_crash_left_is_finished(place: Any) -> None:
    url, options = place
    made = runs.run(url, 20, storage_options=options)
    backend = open_backend(url, options)
    names = [f"checkpoints/step_0000020/{n}" for n in ("policy.safetensors", "receipt.json")]
    content = [backend.get(n) for n in names]
    for name in names:
        backend.delete(name)
    made.destination.complete()
    assert [backend.get(n) for n in names] == content
    backend.delete(names[1])
    backend.delete(names[0])
    backend.create(names[0], b"somebody else's")
    with pytest.raises(AlreadyExistsError, match="never overwritten"):
        made.destination.complete()
    assert names[1] not in {s.name for s in backend.list("checkpoints")}, "no receipt beside it"


def test_a_final_evaluation_that_a_crash_left_is_finished_and_not_run_again(place: Any) -> None:
    url, options = place
    made = runs.run(url, 20, storage_options=options)
    made.final_evaluation()
    backend = open_backend(url, options)
    name = "final/evaluation_0001/receipt.json"
    content = backend.get(name)
    backend.delete(name)
    with pytest.raises(AlreadyExistsError, match="again=True"):
        made.final_evaluation()
    assert backend.get(name) == content


def test_an_outage_is_unreadable_and_never_missing(tmp_path: Path) -> None:
    options = {
        "key": "a",
        "secret": "b",
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"},
        "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 1},
    }
    found = list(verify_all(["s3://none/run"], storage_options=options))
    assert [r.verdict for r in found] == ["unreadable"]


def test_a_repository_elsewhere_may_be_named(tmp_path: Path) -> None:
    made = runs.run(tmp_path / "run", 20, repository=tmp_path / "store", namespace="cheetah")
    assert made.destination.namespace == "cheetah"
    assert Repository.open(tmp_path / "store").namespaces() == ["cheetah"]
    model = runs.model(2)
    again = runs.resumed(
        model, tmp_path / "run", 20, repository=tmp_path / "store", namespace="cheetah"
    )
    model.learn(20, callback=again, reset_num_timesteps=False)
    assert len(list(verify_all([tmp_path / "store"]))) == 2
