"""An expanded checkpoint as a receipt whose parent is the old one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from castore import InvalidInputError, ReceiptMismatchError
from castore_receipts import destination, normalize, record, seeds, sign, validation
from castore_receipts.arrays import Tensor, write_safetensors
from castore_receipts.compare import verify_expansion
from castore_receipts.destination import Destination, Folder
from castore_receipts.documents import encode, plain, seal
from castore_receipts.episodes import Environment, Evaluation, evaluate, make
from castore_receipts.expand import expand_normalizer, expand_tensors, expand_training, widths
from castore_receipts.links import Report
from castore_receipts.policy import array_policy
from castore_receipts.provenance import environment_of, machine, versions
from castore_receipts.rebuild import with_zeros
from castore_receipts.record import Parent
from castore_receipts.resuming import verified
from castore_receipts.subject import Subject

__all__ = ["expand_receipt", "verify_expansion"]


def expand_receipt(
    source: str | os.PathLike[str],
    step: int,
    into: str | os.PathLike[str],
    added: int = 6,
    *,
    environment: Environment | None = None,
    moments: str = "map",
    repository: str | os.PathLike[str] | None = None,
    storage_options: dict[str, Any] | None = None,
    sign_with: str | os.PathLike[str] | None = None,
) -> tuple[dict[str, Any], Report]:
    """Expand the receipt of ``step`` and publish it in the destination ``into``.

    The old receipt is verified first, the expansion after. The expanded policy is validated on
    the same seeds in ``environment``; by default in the old one, with the added sensors at zero.
    Gates are inherited as they were decided: a failed one stays failed. Needs no torch.

    Returns
    -------
    dict, Report
        The new receipt, and what `verify_expansion` found.

    Raises
    ------
    ReceiptMismatchError
        A link of the old receipt does not hold, or the expansion changed the function.
    AlreadyExistsError
        ``into`` holds a receipt of this step.
    """
    old_place = Destination.open(source, repository, None, storage_options, make=False)
    name = old_place.snapshot_of(step)
    place = Destination.open(into, repository, None, storage_options)
    path = destination.checkpoint_folder(step)
    place.refuse_taken(path)
    old = verified(old_place, name)
    was = old.tensors()
    tensors = expand_tensors(was, added)
    found = verify_expansion(was, tensors)
    if not found.sound:
        raise ReceiptMismatchError(f"the expansion changed the function: {found.problems}")
    files, hidden, body = _contents(old, tensors, added, moments, environment)
    body["expansion"] = _told(found, added, moments, widths(was).observation)
    receipt = seal(plain(body, "receipt"))
    if sign_with is not None:
        receipt = sign.sign(receipt, sign.load_private(sign_with))
    files[destination.RECEIPT] = encode(receipt)
    facts = {k: receipt[k] for k in ("step", "mean_return", "receipt_sha256", "role")}
    same = place.repository.id == old_place.repository.id
    folder = Folder(path, destination.checkpoint_key(step), files, hidden, facts)
    place.publish(folder, name if same else None, True)
    return receipt, found


def _told(found: Report, added: int, moments: str, before: int) -> dict[str, Any]:
    return {
        "added": added,
        "observation": {"before": before, "after": before + added},
        "moments": moments,
        "grown": found.receipt["added"],
        "parameters": {"before": found.receipt["before"], "after": found.receipt["after"]},
        "preserved": "at the instant of expansion only",
    }


def _contents(
    old: Subject,
    tensors: Mapping[str, Tensor],
    added: int,
    moments: str,
    environment: Environment | None,
) -> tuple[dict[str, bytes], dict[str, bytes], dict[str, Any]]:
    """The new folder's files, the state kept beside them, and the receipt's body."""
    began = time.perf_counter()
    said = old.receipt
    files = {destination.POLICY: write_safetensors(tensors)}
    if said["normalizer"] is not None:
        statistics = expand_normalizer(old.file(destination.NORMALIZER), added)
        files[destination.NORMALIZER] = statistics
    scaled = normalize.frozen(files.get(destination.NORMALIZER), "statistics")
    adapter = array_policy(tensors, said["adapter"], scaled)
    roles = seeds.read(said["seeds"]).used()
    evaluation, shown = _validated(said, adapter, roles, added, environment)
    packed, digests = validation.pack(evaluation.traces(), validation.form_of(said))
    files |= packed
    hidden = {}
    if destination.TRAINING in said["state"]:
        w = widths(old.tensors())
        state = expand_training(old.file(destination.TRAINING), w, added, moments)
        hidden[destination.TRAINING] = state
    parameters = sum(t.nbytes for n, t in tensors.items())
    inputs = {**said["input_shapes"], "observation": [widths(tensors).observation]}
    body = {
        **{k: v for k, v in said.items() if k not in ("receipt_sha256", "signature")},
        **record.policy_fields(adapter, files[destination.POLICY], tensors),
        **record.evaluation_fields(evaluation, digests),
        "seeds": roles.record(),
        "environment": shown,
        "versions": versions(),
        "machine": machine(),
        "input_shapes": inputs,
        "parameter_bytes": parameters,
        "seconds": said["seconds"] + time.perf_counter() - began,
        "normalizer": _filed(files.get(destination.NORMALIZER)),
        "state": record.files(hidden),
        "not_contained": record.not_contained(said["normalizer"] is not None, [*hidden], False),
        "gates": [{**gate, "inherited": True} for gate in said["gates"]],
        "parent": Parent("expanded", said["step"], said["receipt_sha256"]).record(),
    }
    return files, hidden, body


def _filed(data: bytes | None) -> dict[str, Any] | None:
    return None if data is None else {"sha256": record.sha256(data), "bytes": len(data)}


def _validated(
    said: Mapping[str, Any],
    adapter: Any,
    roles: seeds.SeedRoles,
    added: int,
    environment: Environment | None,
) -> tuple[Evaluation, dict[str, Any]]:
    env = make(environment if environment is not None else with_zeros(said, added))
    shape = (said["input_shapes"]["observation"][0] + added,)
    try:
        if env.observation_space.shape != shape:
            raise InvalidInputError(
                f"the environment shows {env.observation_space.shape}, the policy takes {shape}"
            )
        return evaluate(adapter, env, roles.validation), environment_of(env)
    finally:
        env.close()
