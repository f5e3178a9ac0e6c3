"""The final evaluation: a role of its own, used once, and recorded as repeated if it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from castore import AlreadyExistsError, InvalidInputError
from castore_receipts import destination, normalize, record
from castore_receipts.destination import Destination, Folder
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
    last, statistics = _last_receipt(callback)
    run = _next_run(callback, again)
    model = callback.model
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


def _last_receipt(callback: ReceiptCallback) -> tuple[dict[str, Any], bytes | None]:
    """The receipt of the model as it was last recorded, and the normaliser's file of then."""
    if not callback.seeds.final:
        raise InvalidInputError("no final seeds were set aside: give final_seeds= to the callback")
    history, resumed = callback.history, callback.journal.resumed
    if history:
        return history[-1], normalize.capture(callback.model.get_vec_normalize_env())
    if resumed is None:
        raise InvalidInputError("there is no receipt yet: a final evaluation follows training")
    return resumed.receipt, resumed.statistics


def _next_run(callback: ReceiptCallback, again: bool) -> int:
    """1, or one more than the runs there are, here and where the chain was resumed from."""
    place = callback.destination
    if callback.journal.materialize:
        place.complete()  # a run that a crash kept from being laid out
    resumed = callback.journal.resumed
    places = [place, *([resumed.place] if resumed else [])]
    known = {p.backend.url: _runs(p) for p in places}
    looked = {url: runs for url, runs in known.items() if runs}
    if looked and not again:
        where = ", ".join(f"{len(runs)} time(s) in {url}" for url, runs in looked.items())
        raise AlreadyExistsError(
            f"the final evaluation has been run already, {where}: a second look is feedback; ask"
            " for it with again=True, and the receipt will say so"
        )
    return max(set().union(*known.values()), default=0) + 1


def _runs(place: Destination) -> set[int]:
    """The runs in a destination; folders that somebody deleted count too."""
    known = [n.key.removeprefix("final.") for n in place.snapshots("final.")]
    laid = [n.removeprefix("evaluation_") for n in place.backend.folders(destination.FINAL)]
    return {int(n) for n in (*known, *laid) if n.isdigit()}
