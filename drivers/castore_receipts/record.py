"""The body of a receipt, put together from what was measured. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from castore_receipts.arrays import Tensor
from castore_receipts.episodes import Evaluation
from castore_receipts.policy import Adapter, numeric_bytes, policy_digest

RULE = "castore-arrays/1"


@dataclass(frozen=True, slots=True)
class Parent:
    """The receipt before this one: ``previous``, ``resumed``, ``expanded`` or ``evaluates``."""

    relation: str
    step: int
    receipt_sha256: str

    def record(self) -> dict[str, Any]:
        return {
            "relation": self.relation,
            "step": self.step,
            "receipt_sha256": self.receipt_sha256,
        }


@dataclass(frozen=True, slots=True)
class Watched:
    """Digests of the watched objects at the start of training, before and after validation."""

    reference: str
    before: str
    after: str
    objects: Mapping[str, str] = field(default_factory=dict)

    @property
    def unchanged(self) -> bool | None:
        """Whether all three agree; None where nothing was watched, so that nothing is claimed."""
        return self.reference == self.before == self.after if self.objects else None

    def record(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "before": self.before,
            "after": self.after,
            "objects": dict(self.objects),
        }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files(content: Mapping[str, bytes]) -> dict[str, Any]:
    """Digest and size of each file."""
    return {n: {"sha256": sha256(d), "bytes": len(d)} for n, d in content.items()}


def policy_fields(adapter: Adapter, policy: bytes, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What links a receipt to the saved weights and to the adapter that was evaluated."""
    return {
        "policy_array_bytes": numeric_bytes(adapter),
        "policy_digest": policy_digest(adapter),
        "policy_digest_rule": RULE,
        "checkpoint_sha256": sha256(policy),
        "checkpoint_bytes": len(policy),
        "tensors": len(tensors),
        "adapter": {**adapter.describe(), "arrays": sorted(adapter.tensors())},
    }


def evaluation_fields(evaluation: Evaluation, digests: Mapping[str, str]) -> dict[str, Any]:
    """Returns, and the shape of each trace; ``digests`` is the hash of the traces, by its field."""
    return {
        **digests,
        "mean_return": evaluation.mean_return,
        "returns": {str(s): r for s, r in evaluation.returns.items()},
        "trace_columns": {
            "observation": evaluation.observation,
            "action": evaluation.action,
            "reward": 1,
        },
        "traces": {
            str(s): {
                "steps": len(e.trace),
                "terminated": e.terminated,
                "truncated": e.truncated,
            }
            for s, e in evaluation.episodes.items()
        },
    }


def not_contained(normalizer: bool, state: Sequence[str], environment: bool) -> list[str]:
    """What somebody who has only this receipt's files must not expect in them."""
    absent = ["environment code", "training code"]
    if not normalizer:
        absent.append("observation or reward normalisation (the run had none)")
    if "training.safetensors" not in state:
        absent.append("optimizers, entropy coefficient, random streams")
    if "replay.safetensors" not in state:
        absent.append("replay buffer")
    if not environment:
        absent.append("state of the training environments")
    return absent
