"""castore_receipts: each checkpoint of a reinforcement-learning run as an experiment receipt.

    from castore_receipts import ReceiptCallback
    callback = ReceiptCallback("runs/a", "Pendulum-v1", every=1000, validation_seeds=[1, 2])
    model.learn(10_000, callback=callback)

Importing this package is cheap: what needs torch or Stable-Baselines3 is imported when it is first
used, and verifying needs neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castore_receipts.callback import ReceiptCallback
    from castore_receipts.episodes import evaluate
    from castore_receipts.expand import expand_observation
    from castore_receipts.expansion import expand_receipt, verify_expansion
    from castore_receipts.gates import Gate
    from castore_receipts.links import Link, Report
    from castore_receipts.parameters import ledger
    from castore_receipts.policy import ArrayPolicy
    from castore_receipts.replaying import replay
    from castore_receipts.resuming import resume
    from castore_receipts.verify import verify_all, verify_receipt

_HOMES = {
    "ArrayPolicy": "policy",
    "Gate": "gates",
    "Link": "links",
    "ReceiptCallback": "callback",
    "Report": "links",
    "evaluate": "episodes",
    "expand_observation": "expand",
    "expand_receipt": "expansion",
    "ledger": "parameters",
    "replay": "replaying",
    "resume": "resuming",
    "verify_all": "verify",
    "verify_expansion": "expansion",
    "verify_receipt": "verify",
}

__all__ = [
    "ArrayPolicy",
    "Gate",
    "Link",
    "ReceiptCallback",
    "Report",
    "evaluate",
    "expand_observation",
    "expand_receipt",
    "ledger",
    "replay",
    "resume",
    "verify_all",
    "verify_expansion",
    "verify_receipt",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"castore_receipts.{home}")
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("castore"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs {e.name}: pip install 'castore[receipts]'", name=e.name
        ) from e
    value = getattr(module, name)
    globals()[name] = value
    return value
