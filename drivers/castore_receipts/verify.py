"""Recompute what receipts promise, with no training code, no unpickling, no torch, no SB3.

A receipt whose links all hold is unchanged since it was written, as far as it is linked by
hashes. That says nothing about who wrote it (signatures do), whether the policy is safe, or
whether the science is sound.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from castore import BackendError, CastoreError, InvalidInputError, Repository
from castore.workers import ELSEWHERE, results
from castore_receipts import checks, claims, gates
from castore_receipts.destination import POLICY
from castore_receipts.links import UNREADABLE, Link, Report
from castore_receipts.sign import trusted_keys
from castore_receipts.sources import Source, sources
from castore_receipts.subject import EVALUATION, Family, Subject, told

_SLIPS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a field of an unexpected type or value may raise."""

_RECEIPTS = 8  # a job: what is done again when its worker dies

Check = Callable[[Subject], Link]

_ALWAYS: Mapping[str, Check] = {
    "receipt": claims.receipt,
    "schema": claims.follows_schema,
    "place": checks.place,
}
_CHECKPOINT: Mapping[str, Check] = {
    "checkpoint_sha256": lambda s: checks.file_hash(s, "checkpoint_sha256", POLICY),
    "finite": checks.finite,
    "policy_digest": checks.policy_digest,
    "policy_array_bytes": checks.policy_array_bytes,
    "validation_sha256": checks.validation_hash,
    "normalizer": checks.normalizer,
    "state": checks.state,
    "budget": claims.budget,
    "world_model": claims.world_model,
}
_FINAL: Mapping[str, Check] = {
    "evaluation_sha256": lambda s: checks.file_hash(s, "evaluation_sha256", EVALUATION),
}
_BOTH: Mapping[str, Check] = {
    "traces": checks.traces,
    "returns": checks.returns,
    "seeds": claims.seed_roles,
    "gates": claims.acceptance,
    "parent": claims.parent,
    "signature": claims.signature,
    "signer": claims.signer,
}


def verify_receipt(
    location: str | os.PathLike[str],
    *,
    trust: Sequence[str | os.PathLike[str]] = (),
    repository: Repository | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Report:
    """All links of the one receipt at ``location`` (a folder, a URL, or a snapshot's name).

    Everything is checked, also after the first failure. ``trust`` names files of public keys.

    Raises
    ------
    NotFoundError
        There is nothing at the location. Whatever is wrong with what is there is a verdict.
    InvalidInputError
        It holds several receipts (`verify_all`), or a file of keys holds none.
    """
    found, complete = sources(location, repository, storage_options)
    if len(found) != 1:
        raise InvalidInputError(f"{os.fspath(location)} holds {len(found)} receipts: verify_all")
    subject = Subject.read(found[0], trusted_keys(trust))
    subject.family = Family([subject.receipt], complete)
    return report(subject)


def verify_all(
    locations: Iterable[str | os.PathLike[str]],
    *,
    trust: Sequence[str | os.PathLike[str]] = (),
    repository: Repository | None = None,
    storage_options: dict[str, Any] | None = None,
    workers: int = 4,
    executor: Executor | None = None,
) -> Iterator[Report]:
    """A report for each receipt at the locations, in their order; chains go across all of them.

    A location that cannot be looked at is a report with one unreadable link. ``workers`` threads
    do the work, or ``executor``'s workers: secrets in ``storage_options`` do not travel to other
    processes, which need them in their environment (`castore.workers`).

    Raises
    ------
    BackendError
        A worker cannot read what could be read here.
    """
    if workers < 1:
        raise InvalidInputError(f"{workers} workers: expected 1 or more")
    keys = trusted_keys(trust)
    found: list[Source | Report] = []
    complete = True
    for location in locations:
        try:
            some, whole = sources(location, repository, storage_options)
        except CastoreError as e:
            found.append(Report(os.fspath(location), (told("readable", e),)))
            continue
        found += some
        complete = complete and whole
    with ThreadPoolExecutor(workers) as pool:
        subjects = [s for s in found if not isinstance(s, Report)]
        receipts = list(pool.map(lambda s: Subject.read(s).receipt, subjects))
        family = Family(receipts, complete)
        if executor is None:
            yield from pool.map(
                lambda s: s if isinstance(s, Report) else _one(s, keys, family), found
            )
            return
    tasks = [(s, family.around(r), bool(r)) for s, r in zip(subjects, receipts, strict=True)]
    jobs = ((keys, tasks[i : i + _RECEIPTS]) for i in range(0, len(tasks), _RECEIPTS))
    made = (one for some in results(executor, _job, jobs) for one in some)
    yield from (one if isinstance(one, Report) else next(made) for one in found)


def _one(source: Source, keys: frozenset[str] | None, family: Family) -> Report:
    subject = Subject.read(source, keys)
    subject.family = family
    return report(subject)


def _job(keys: frozenset[str] | None, tasks: Sequence[tuple[Source, Family, bool]]) -> list[Report]:
    """`_one` for a worker, which must not take its own want of access for a lost receipt."""
    made = [(_one(source, keys, family), readable) for source, family, readable in tasks]
    for found, readable in made:
        if readable and not found.receipt:
            raise BackendError(
                f"a worker cannot read {found.location}, which could be read here"
                f" ({found['receipt'].detail}): {ELSEWHERE}"
            )
    return [found for found, _ in made]


def report(subject: Subject) -> Report:
    """Every link of a subject."""
    kind = _FINAL if subject.final else _CHECKPOINT
    links = [_safe(subject, n, c) for n, c in {**_ALWAYS, **kind, **_BOTH}.items()]
    known = claims.known_fields()
    return Report(
        subject.source.name,
        tuple(links),
        subject.receipt,
        not subject.ours and subject.trouble is None,
        sorted(set(subject.receipt) - known),
        gates.failed(subject.receipt),
    )


def _safe(subject: Subject, name: str, check: Check) -> Link:
    """A check's link; trouble with a file is its verdict, and the other checks go on."""
    try:
        return check(subject)
    except CastoreError as e:
        return told(name, e)
    except _SLIPS as e:
        return Link(name, UNREADABLE, f"malformed: {type(e).__name__}: {str(e)[:160]}")
