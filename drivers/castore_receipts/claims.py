"""The links of a receipt to itself, to its chain and to its signer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from itertools import islice
from typing import Any

from castore import InvalidInputError
from castore_receipts import documents, gates, seeds, sign
from castore_receipts.links import MISMATCH, MISSING, NOT_CHECKED, OK, UNREADABLE, Link
from castore_receipts.subject import Subject, absent

_MOST_ERRORS = 100
"""Breaches of the schema that are looked for: a forged receipt could hold millions."""


def receipt(subject: Subject) -> Link:
    """The document's own bytes: canonical, and with the digest it carries."""
    if subject.trouble is not None:
        return subject.trouble
    if not subject.ours:
        return Link("receipt", NOT_CHECKED, "another program's: it carries no digest of itself")
    said = subject.receipt
    if said.get("kind") != documents.KIND:
        return Link("receipt", MISMATCH, f"kind {said.get('kind')!r:.80}, not {documents.KIND!r}")
    if type(said.get("format")) is not int or said.get("format") != documents.FORMAT:
        detail = (
            f"format {said.get('format')!r:.80}, this castore reads {documents.FORMAT}: upgrade"
        )
        return Link("receipt", UNREADABLE, detail)
    if "receipt_sha256" not in said:
        return Link("receipt", MISSING, "there is no 'receipt_sha256'")
    found = documents.digest_of(said)
    if found != said["receipt_sha256"]:
        detail = f"its content hashes to {found}, it says {said['receipt_sha256']!r:.80}: edited"
        return Link("receipt", MISMATCH, detail)
    if documents.canonical(said) != subject.raw:
        return Link("receipt", MISMATCH, "its bytes are not in canonical form: edited")
    return Link("receipt", OK, found)


def schema() -> dict[str, Any]:
    """The JSON Schema that is shipped with the package."""
    text = files("castore_receipts").joinpath("receipt.schema.json").read_text()
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def known_fields() -> frozenset[str]:
    """The fields that the layout gives a meaning to."""
    found = set(schema()["$defs"]["own"]["properties"])
    found |= set(schema()["$defs"]["foreign"]["properties"])
    return frozenset(found)


def follows_schema(subject: Subject) -> Link:
    """The receipt and the JSON Schema."""
    if subject.trouble is not None:
        return Link("schema", NOT_CHECKED, "there is no readable receipt")
    if find_spec("jsonschema") is None:
        return Link("schema", NOT_CHECKED, "needs jsonschema: pip install 'castore[receipts]'")
    validator = import_module("jsonschema").Draft202012Validator
    whole = schema()
    part = {"$ref": f"#/$defs/{'own' if subject.ours else 'foreign'}", "$defs": whole["$defs"]}
    errors = list(islice(validator(part).iter_errors(subject.receipt), _MOST_ERRORS))
    if not errors:
        return Link("schema", OK)
    some = "; ".join(f"{e.json_path}: {e.message[:160]}" for e in errors[:5])
    lacking = all(e.validator == "required" for e in errors)
    return Link("schema", MISSING if lacking else MISMATCH, some)


def budget(subject: Subject) -> Link:
    """Steps and updates are told once, and not the configured for the completed."""
    missing = absent(subject, "budget", "budget")
    if missing is not None:
        return missing
    said = subject.receipt["budget"]
    done = said.get("completed") if isinstance(said, Mapping) else None
    if not isinstance(done, Mapping):
        return Link("budget", UNREADABLE, "the receipt does not tell what was completed")
    wrong = [
        f"{name} {subject.receipt.get(name)!r:.40}, completed {done.get(other)!r:.40}"
        for name, other in (("step", "environment_steps"), ("updates", "updates"))
        if subject.receipt.get(name) != done.get(other)
    ]
    wrong += [f"less than the parent: {n}" for n in _went_back(subject, done)]
    return Link("budget", MISMATCH if wrong else OK, "; ".join(wrong))


def _went_back(subject: Subject, done: Mapping[str, Any]) -> Iterator[str]:
    """The counts that are lower than in the receipt that training went on from."""
    parent = subject.family.parent_of(subject.receipt)
    if parent is None or gates.relation_of(subject.receipt) not in ("previous", "resumed"):
        return
    said = parent.get("budget")
    before = said.get("completed") if isinstance(said, Mapping) else None
    for name in ("training_steps", "updates"):
        was, now = (before or {}).get(name), done.get(name)
        if type(was) is int and type(now) is int and now < was:
            yield f"{name} {now}, {was} before"


def world_model(subject: Subject) -> Link:
    """The watched objects' digests, and the claim that they did not change."""
    name = "world_model_immutable"
    missing = absent(subject, name, "world_model")
    if missing is not None:
        return missing
    claim, said = subject.receipt[name], subject.receipt.get("watched")
    if not subject.ours and not isinstance(said, Mapping):
        if claim is True:
            return Link("world_model", NOT_CHECKED, "claimed; no digests are given")
        return Link("world_model", MISMATCH, f"{name} is {claim!r:.40}")
    if not isinstance(said, Mapping):
        return Link("world_model", MISSING, "there are no digests of watched objects")
    same = said.get("reference") == said.get("before") == said.get("after")
    expected = same if said.get("objects") else None
    if claim is not expected or not same:
        return Link("world_model", MISMATCH, f"{name} is {claim!r:.40}, digests agree: {same}")
    before = _previous(subject)
    if before is not None and _reference(before) != said.get("reference"):
        return Link("world_model", MISMATCH, "the reference is not the parent's")
    return Link("world_model", OK if claim else NOT_CHECKED, "" if claim else "nothing was watched")


def _previous(subject: Subject) -> Mapping[str, Any] | None:
    """The parent in the same training run."""
    parent = subject.receipt.get("parent")
    if isinstance(parent, Mapping) and parent.get("relation") == "previous":
        return subject.family.parent_of(subject.receipt)
    return None


def _reference(said: Mapping[str, Any]) -> Any:
    watched = said.get("watched")
    return watched.get("reference") if isinstance(watched, Mapping) else None


def seed_roles(subject: Subject) -> Link:
    """Validation and final seeds: apart, counted, and the same roles as in the parent."""
    missing = absent(subject, "seeds", "seeds")
    if missing is not None:
        return missing
    try:
        own = seeds.read(subject.receipt["seeds"])
    except InvalidInputError as e:
        return Link("seeds", MISMATCH, str(e))
    wrong = _seed_defects(subject, own)
    return Link("seeds", MISMATCH if wrong else OK, "; ".join(wrong))


def _seed_defects(subject: Subject, own: seeds.SeedRoles) -> list[str]:
    used = subject.receipt.get("traces")
    evaluated = set(used) if isinstance(used, Mapping) else set()
    role = own.final if subject.final else own.validation
    wrong = []
    if evaluated != {str(s) for s in role}:
        wrong.append(
            f"evaluated seeds {sorted(evaluated)[:10]} are not the {len(role)} of the role"
        )
    never = [s for s in own.validation if own.consumed.get(s, 0) < 1]
    if never and not subject.final:
        wrong.append(
            f"{never[0]} was used here and is counted {own.consumed.get(never[0], 0)} times"
        )
    parent = subject.family.parent_of(subject.receipt)
    if parent is not None and "seeds" in parent:
        try:
            before = seeds.read(parent["seeds"])
            wrong += seeds.chain_defects(own, before, validated=not subject.final)
        except InvalidInputError:
            wrong.append("the parent's seeds are malformed")
    return wrong


def acceptance(subject: Subject) -> Link:
    """Gates say what their numbers say; a failed one stays failed."""
    missing = absent(subject, "gates", "gates")
    if missing is not None:
        return missing
    wrong = gates.defects(subject.receipt, subject.family.parent_of(subject.receipt))
    if wrong:
        return Link("gates", MISMATCH, "; ".join(wrong))
    failed = gates.failed(subject.receipt)
    return Link("gates", OK, f"failed and stays so: {', '.join(failed)}" if failed else "")


def parent(subject: Subject) -> Link:
    """The receipt this one names as its parent."""
    missing = absent(subject, "parent", "parent")
    if missing is not None:
        return missing
    said = subject.receipt["parent"]
    if said is None:
        return Link("parent", OK, "the first of its chain")
    if not isinstance(said, Mapping):
        return Link("parent", UNREADABLE, f"{said!r:.80} names no parent")
    found = subject.family.parent_of(subject.receipt)
    if found is not None:
        return _order(subject, said, found)
    if not subject.family.complete:
        return Link("parent", NOT_CHECKED, "give the whole destination to check the chain")
    if said.get("relation") in ("resumed", "expanded"):
        return Link("parent", NOT_CHECKED, "it may lie elsewhere: give its destination as well")
    return Link(
        "parent", MISSING, f"step {said.get('step')!r:.40}: no receipt has the digest named"
    )


def _order(subject: Subject, said: Mapping[str, Any], found: Mapping[str, Any]) -> Link:
    own, theirs = subject.receipt.get("step"), found.get("step")
    if theirs != said.get("step"):
        return Link(
            "parent", MISMATCH, f"it is of step {theirs!r:.40}, not {said.get('step')!r:.40}"
        )
    if not isinstance(own, int) or not isinstance(theirs, int):
        return Link("parent", UNREADABLE, "steps are no numbers")
    later = own > theirs if said.get("relation") in ("previous", "resumed") else own == theirs
    if not later:
        return Link(
            "parent", MISMATCH, f"step {own} after {theirs} as {said.get('relation')!r:.40}"
        )
    if subject.final:
        for name in ("checkpoint_sha256", "policy_digest"):
            if found.get(name) != subject.receipt.get(name):
                return Link("parent", MISMATCH, f"{name} is not that of the receipt evaluated")
    return Link("parent", OK, f"step {theirs}")


# -- signatures


def signature(subject: Subject) -> Link:
    """Whether there is a signature over this receipt by the key that it names."""
    if subject.trouble is not None:
        return Link("signature", NOT_CHECKED, "there is no readable receipt")
    if "signature" not in subject.receipt:
        wanted = subject.trust is not None
        return Link("signature", MISSING if wanted else NOT_CHECKED, "unsigned")
    if not sign.available():
        return Link("signature", NOT_CHECKED, "needs cryptography: pip install 'castore[receipts]'")
    if sign.holds(subject.receipt):
        return Link("signature", OK, f"by {sign.signer(subject.receipt)}")
    return Link("signature", MISMATCH, "it is not over this receipt: one of them was changed")


def signer(subject: Subject) -> Link:
    """Whether the key is among those that the caller trusts."""
    if subject.trust is None:
        return Link("signer", NOT_CHECKED, "no trusted keys were given (--trust)")
    if subject.trouble is not None or "signature" not in subject.receipt:
        return Link("signer", MISSING, "unsigned")
    key = sign.signer(subject.receipt)
    if key in subject.trust:
        return Link("signer", OK, key)
    return Link("signer", MISMATCH, f"signed with {key[:80]!r}, which is not trusted")
