"""The final evaluation: a role of its own, used once, and recorded as repeated if it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from castore import AlreadyExistsError, InvalidInputError
from castore_receipts import destination, normalize, record
from castore_receipts.destination import Folder
from castore_receipts.documents import encode
from castore_receipts.episodes import evaluate, make
from castore_receipts.policy import policy_digest
from castore_receipts.record import Parent
from castore_receipts.tensors import state_of
from castore_receipts.traces import write_npz

if TYPE_CHECKING:
    from castore_receipts.callback import ReceiptCallback

EVALUATION = "evaluation.npz"


def final_evaluation(callback: ReceiptCallback, again: bool) -> dict[str, Any]:
    """See `ReceiptCallback.final_evaluation`."""
    last = _last_receipt(callback)
    run = _next_run(callback, again)
    model = callback.model
    statistics = normalize.capture(model.get_vec_normalize_env())
    adapter = callback.make_adapter(
        model, state_of(model.policy.state_dict()), normalize.frozen(statistics, "statistics")
    )
    if policy_digest(adapter) != last["policy_digest"]:
        raise InvalidInputError(
            f"the policy is not the one of the last receipt (step {last['step']}): let training"
            " end, which takes a receipt, and evaluate then"
        )
    env = make(callback.environment)
    try:
        evaluation = evaluate(adapter, env, callback.seeds.final)
    finally:
        env.close()
    packed = write_npz(evaluation.traces())
    keep = ("step", "policy_digest", "policy_digest_rule", "checkpoint_sha256", "environment")
    body = {
        **{name: last[name] for name in (*keep, "versions", "machine", "source", "adapter")},
        **record.evaluation_fields(evaluation, {"evaluation_sha256": record.sha256(packed)}),
        "role": "final",
        "run": run,
        "seeds": callback.seeds.record(),
    }
    receipt = callback.journal.sealed(
        body, Parent("evaluates", last["step"], last["receipt_sha256"])
    )
    files = {EVALUATION: packed, destination.RECEIPT: encode(receipt)}
    name = f"{destination.FINAL}/evaluation_{run:04d}"
    callback.journal.publish(Folder(name, f"final.{run:04d}", files, {}, {}), receipt)
    return receipt


def _last_receipt(callback: ReceiptCallback) -> dict[str, Any]:
    if not callback.seeds.final:
        raise InvalidInputError("no final seeds were set aside: give final_seeds= to the callback")
    if not callback.history:
        raise InvalidInputError("there is no receipt yet: a final evaluation follows training")
    return callback.history[-1]


def _next_run(callback: ReceiptCallback, again: bool) -> int:
    """1, or one more than the runs there are; folders that somebody deleted count too."""
    place = callback.destination
    if callback.journal.materialize:
        place.complete()  # a run that a crash kept from being laid out
    known = [n.key.removeprefix("final.") for n in place.snapshots("final.")]
    laid = [n.removeprefix("evaluation_") for n in place.backend.folders(destination.FINAL)]
    runs = [int(n) for n in (*known, *laid) if n.isdigit()]
    if runs and not again:
        raise AlreadyExistsError(
            f"the final evaluation has been run {len(set(runs))} time(s) already in"
            f" {place.backend.url}: a second look is feedback; ask for it with again=True, and the"
            " receipt will say so"
        )
    return max(runs, default=0) + 1
