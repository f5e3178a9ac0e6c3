"""The links of a receipt to the files beside it: hashes, arrays, traces, returns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from castore_receipts.arrays import Array, arrays_digest, first_nonfinite
from castore_receipts.destination import CHECKPOINTS, FINAL, NORMALIZER, POLICY, step_name
from castore_receipts.episodes import mean
from castore_receipts.links import MISMATCH, MISSING, NOT_CHECKED, OK, UNREADABLE, Link
from castore_receipts.record import RULE, sha256
from castore_receipts.subject import Subject, absent
from castore_receipts.trace_folder import RULE as RULE_OF_FOLDER
from castore_receipts.trace_folder import digest_of_folder
from castore_receipts.traces import seed_of, trace_name
from castore_receipts.validation import FILE, FOLDER

_SHA256 = re.compile(r"[0-9a-f]{64}")


def place(subject: Subject) -> Link:
    """The folder's name and the step or run in the receipt."""
    name, folder = "place", subject.source.folder
    key = "run" if subject.final else "step"
    number = subject.receipt.get(key)
    if type(number) is not int or not 0 <= number < 1 << 63:
        missing = absent(subject, key, name)
        return missing or Link(name, MISMATCH, f"{key} is {number!r:.80}, expected a count")
    expected = f"evaluation_{number:04d}" if subject.final else step_name(number)
    if folder == expected:
        return Link(name, OK, folder)
    if not folder.startswith(("step_", "evaluation_")) and not _in_layout(subject):
        return Link(name, NOT_CHECKED, f"the folder's name {folder!r} names no step")
    return Link(name, MISMATCH, f"{key} {number} in folder {folder!r}, expected {expected!r}")


def _in_layout(subject: Subject) -> bool:
    """Whether a receipt of ours stands among others, where its folder's name must be right."""
    parent = subject.source.name.rpartition("/")[0].replace(":", "/").rpartition("/")[2]
    return subject.ours and parent in (CHECKPOINTS, FINAL)


def file_hash(subject: Subject, key: str, file: str) -> Link:
    """The SHA-256 of a file's bytes and the one the receipt gives under ``key``."""
    missing = absent(subject, key, key)
    if missing is not None:
        required = key == "checkpoint_sha256" and subject.trouble is None
        return Link(key, MISSING, missing.detail) if required else missing
    facts = {"sha256": subject.receipt[key]}
    if key == "checkpoint_sha256" and subject.ours:
        facts["bytes"] = subject.receipt.get("checkpoint_bytes")
    return _filed(subject, key, facts, file)


def validation_hash(subject: Subject) -> Link:
    """The hash of the trajectories: of a file's bytes, or by the rule for a folder."""
    if subject.form == "npz":
        return file_hash(subject, "validation_sha256", FILE)
    name = "validation_sha256"
    missing = absent(subject, name, name)
    if missing is not None:
        return missing
    files = subject.folder(FOLDER)
    found, wanted = digest_of_folder(files), subject.receipt[name]
    if found == wanted:
        return Link(name, OK, found)
    return Link(
        name,
        MISMATCH,
        f"{subject.source.name}/{FOLDER} ({len(files)} files) has the digest {found} by"
        f" {RULE_OF_FOLDER}, the receipt says {wanted!r:.80}: one of them was changed; fetch the"
        " folder again or check it out from its snapshot",
    )


def compare(link: str, expected: Any, data: bytes, where: str) -> Link:
    """Bytes and the digest promised for them."""
    if not isinstance(expected, str) or not _SHA256.fullmatch(expected):
        return Link(link, MISMATCH, f"{expected!r:.80} is no SHA-256 in lower-case hex")
    found = sha256(data)
    if found == expected:
        return Link(link, OK, found)
    return Link(
        link,
        MISMATCH,
        f"{where} ({len(data)} bytes) has SHA-256 {found}, the receipt says {expected}: one of them"
        " was changed; fetch the folder again or check it out from its snapshot",
    )


def finite(subject: Subject) -> Link:
    """Every stored tensor is readable and finite."""
    tensors = subject.tensors()
    bad = first_nonfinite(tensors)
    if bad is not None:
        return Link("finite", MISMATCH, f"{subject.source.name}/{POLICY}: {bad}")
    said = subject.receipt.get("tensors", len(tensors))
    if subject.ours and said != len(tensors):
        return Link("finite", MISMATCH, f"{len(tensors)} tensors, the receipt says {said!r:.80}")
    return Link("finite", OK, f"{len(tensors)} tensors")


def policy_digest(subject: Subject) -> Link:
    """The digest of the adapter's arrays, where its rule is known."""
    name = "policy_digest"
    arrays = _arrays_for(subject, name)
    if isinstance(arrays, Link):
        return arrays
    tensors = subject.tensors()
    lost = [n for n in arrays if n not in tensors]
    if lost:
        return Link(name, MISSING, f"{POLICY} has no {lost[0][:80]!r}")
    found = arrays_digest({n: tensors[n] for n in arrays})
    wanted = subject.receipt[name]
    verdict = OK if found == wanted else MISMATCH
    return Link(name, verdict, f"computed {found}, the receipt says {wanted!r:.80}")


def policy_array_bytes(subject: Subject) -> Link:
    """The numeric size of the adapter's arrays."""
    name = "policy_array_bytes"
    arrays = _arrays_for(subject, name)
    if isinstance(arrays, Link):
        return arrays
    tensors = subject.tensors()
    found = sum(tensors[n].nbytes for n in arrays if n in tensors)
    wanted = subject.receipt[name]
    verdict = OK if found == wanted and type(wanted) is int else MISMATCH
    return Link(name, verdict, f"computed {found}, the receipt says {wanted!r:.80}")


def _arrays_for(subject: Subject, name: str) -> list[str] | Link:
    """The arrays that the field ``name`` is about, or the link where those are not known."""
    missing = absent(subject, name, name)
    if missing is not None:
        return missing
    arrays = _adapter_arrays(subject)
    if subject.receipt.get("policy_digest_rule") != RULE or arrays is None:
        return _unknown_rule(subject, name)
    return arrays


def _unknown_rule(subject: Subject, name: str) -> Link:
    verdict = MISMATCH if subject.ours else NOT_CHECKED
    return Link(name, verdict, "the rule it was computed by is not known")


def _adapter_arrays(subject: Subject) -> list[str] | None:
    adapter = subject.receipt.get("adapter")
    arrays = adapter.get("arrays") if isinstance(adapter, Mapping) else None
    good = isinstance(arrays, list) and arrays and all(isinstance(n, str) for n in arrays)
    return list(arrays) if good and arrays is not None else None


# -- traces


def traces(subject: Subject) -> Link:
    """One finite trace of the right shape for each seed, and nothing else."""
    found = subject.traces()
    where = f"{subject.source.name}/{subject.evaluated}"
    for name, array in found.items():
        if seed_of(name) is None:
            return Link("traces", MISMATCH, f"{where}: {name[:80]!r} is no trace_<seed>")
        bad = np.flatnonzero(np.logical_not(np.isfinite(np.ravel(array))))
        if len(bad):
            at = [int(i) for i in np.unravel_index(int(bad[0]), array.shape)]
            return Link("traces", MISMATCH, f"{where}: {name}: {len(bad)} not finite, first {at}")
    if not found:
        return Link("traces", MISSING, f"{where} holds no trace")
    wrong = next(_promised(subject, found), None) if subject.ours else None
    return wrong or Link("traces", OK, f"{len(found)} traces")


def _promised(subject: Subject, found: Mapping[str, Array]) -> Iterator[Link]:
    """What is wrong with the traces in view of what our receipts say about each."""
    said, columns = subject.receipt.get("traces"), _columns(subject)
    if not isinstance(said, Mapping) or columns is None:
        yield Link("traces", UNREADABLE, "the receipt does not tell shapes of traces")
        return
    for seed, facts in said.items():
        name = f"trace_{seed}"
        if name not in found:
            yield Link("traces", MISSING, f"{subject.evaluated} has no {name}")
            continue
        expected = (facts.get("steps") if isinstance(facts, Mapping) else None, columns)
        if found[name].shape != expected:
            yield Link("traces", MISMATCH, f"{name}: {found[name].shape}, expected {expected}")
    extra = sorted(found.keys() - {f"trace_{s}" for s in said})
    if extra:
        yield Link("traces", MISMATCH, f"{extra[0]} is not in the receipt")


def _columns(subject: Subject) -> int | None:
    said = subject.receipt.get("trace_columns")
    if not isinstance(said, Mapping):
        return None
    parts = [said.get(n) for n in ("observation", "action", "reward")]
    if parts[-1] != 1 or not all(type(n) is int and 0 <= n < 1 << 32 for n in parts):
        return None
    return sum(int(n) for n in parts if n is not None)


def returns(subject: Subject) -> Link:
    """Returns and their mean, recomputed from the rewards in the traces."""
    missing = absent(subject, "returns", "returns")
    if missing is not None:
        return missing
    said = subject.receipt["returns"]
    if not subject.ours or _columns(subject) is None or not isinstance(said, Mapping) or not said:
        verdict = UNREADABLE if subject.ours else NOT_CHECKED
        return Link("returns", verdict, "the receipt does not tell which column is the reward")
    found = {}
    for name, array in subject.traces().items():
        if array.ndim == 2 and array.shape[1] and array.dtype.kind == "f":
            found[str(seed_of(name))] = math.fsum(array[:, -1])
    for seed, value in said.items():
        if found.get(seed) != value:
            return Link("returns", MISMATCH, f"{trace_name(seed)}: {found.get(seed)}, not {value}")
    if not found:
        return Link("returns", MISSING, f"{subject.evaluated} holds no trace with rewards")
    recomputed, told = mean(list(found.values())), subject.receipt.get("mean_return")
    verdict = OK if recomputed == told and found.keys() == said.keys() else MISMATCH
    return Link("returns", verdict, f"mean {recomputed}, the receipt says {told!r:.80}")


# -- other files


def normalizer(subject: Subject) -> Link:
    """The statistics of a normaliser, where the run had one."""
    name = "normalizer"
    missing = absent(subject, name, name)
    if missing is not None:
        return missing
    said = subject.receipt[name]
    adapter = subject.receipt.get("adapter")
    scaled = isinstance(adapter, Mapping) and adapter.get("normalizer") is True
    if said is None:
        verdict = MISMATCH if scaled else OK
        return Link(name, verdict, "the run had none")
    return _filed(subject, name, said, NORMALIZER)


def state(subject: Subject) -> Link:
    """Training state and replay buffer, which lie in the repository only."""
    missing = absent(subject, "state", "state")
    if missing is not None:
        return missing
    said = subject.receipt["state"]
    if not isinstance(said, Mapping):
        return Link("state", UNREADABLE, "the receipt does not tell which files there are")
    if not said:
        return Link("state", NOT_CHECKED, "none was stored")
    if not subject.source.holds_state:
        return Link(
            "state", NOT_CHECKED, "not here: it lies in the repository that the run wrote to"
        )
    for file in ("training.safetensors", "replay.safetensors"):
        if file in said:
            link = _filed(subject, "state", said[file], file)
            if link.verdict != OK:
                return link
    return Link("state", OK, ", ".join(sorted(said)))


def _filed(subject: Subject, link: str, said: Any, file: str) -> Link:
    """A file beside the receipt, and the digest and size that are given for it."""
    data, facts = subject.file(file), said if isinstance(said, Mapping) else {}
    where = f"{subject.source.name}/{file}"
    found = compare(link, facts.get("sha256"), data, where)
    if found.verdict == OK and facts.get("bytes", len(data)) != len(data):
        detail = f"{where} takes {len(data)} bytes, the receipt says {facts['bytes']!r:.80}"
        return Link(link, MISMATCH, detail)
    return found
