"""Commands of the receipts layout: ``castore receipts``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from castore.cli.app import PROBLEMS
from castore.cli.options import Dask, Json, Workers, at_work
from castore.cli.output import Output

if TYPE_CHECKING:
    from castore import Repository
    from castore_receipts.links import Report

app = typer.Typer(name="receipts", no_args_is_help=True, rich_markup_mode=None)

MaybeRepository = Annotated[
    str | None,
    typer.Option(
        "--repository",
        "-r",
        envvar="CASTORE_REPOSITORY",
        metavar="URL",
        help="Repository that snapshots are looked up in.",
    ),
]
EnvironmentName = Annotated[
    str | None,
    typer.Option(
        "--environment",
        metavar="ID|MODULE:CALLABLE",
        help="What makes the environment, where the receipt alone cannot. Runs that code.",
    ),
]
_PROOF = (
    "castore: links show change since writing; they prove neither authorship (--trust does) nor"
    " that a policy is safe or correctly trained"
)


@app.callback()
def _root() -> None:
    """Checkpoint receipts of reinforcement-learning runs."""


@app.command()
def verify(
    locations: Annotated[
        list[str], typer.Argument(metavar="PATH|URL|SNAPSHOT...", show_default=False)
    ],
    repository: MaybeRepository = None,
    trust: Annotated[
        list[str] | None,
        typer.Option("--trust", metavar="KEYFILE", help="Public keys (PEM) that must have signed."),
    ] = None,
    workers: Workers = None,
    dask: Dask = None,
    json: Json = False,
) -> None:
    """Recompute everything that receipts promise, without training code.

    A location is a receipt's folder, a destination (every receipt in it), a repository, or the
    name of a snapshot. Exit code 3 where a link does not hold.

    \b
    Example:
      castore receipts verify runs/cheetah
      castore receipts verify s3://bucket/run --trust lab.pem --json
      castore receipts verify -r runs/cheetah/.castore receipts@latest
    """
    from castore_receipts.verify import verify_all

    out = Output(json)
    store = _opened(repository)
    with at_work(workers, dask) as executor:
        found_all = verify_all(locations, trust=trust or [], repository=store, executor=executor)
        reports = list(found_all)
    for found in reports:
        _show(out, found)
    out.note(_PROOF)
    if not all(found.sound for found in reports):
        raise typer.Exit(PROBLEMS)


@app.command()
def replay(
    location: Annotated[str, typer.Argument(metavar="PATH|URL|SNAPSHOT", show_default=False)],
    repository: MaybeRepository = None,
    environment: EnvironmentName = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="Largest difference of any number.")
    ] = 0.0,
    json: Json = False,
) -> None:
    """Evaluate a stored policy again on its validation seeds and compare the trajectories.

    Verifies first. The default tolerance is 0: on the platform that wrote a receipt the numbers
    are the same bits; on another they may not be.

    \b
    Example:
      castore receipts replay runs/cheetah/checkpoints/step_0001000
    """
    from castore_receipts.rebuild import named
    from castore_receipts.replaying import replay as again

    _need_gymnasium()
    out = Output(json)
    made = None if environment is None else named(environment)
    store = _opened(repository)
    found = again(location, environment=made, tolerance=tolerance, repository=store)
    _show(out, found, "replay")
    told = found.receipt
    where = "on the receipt's platform" if told["same_platform"] else "on another platform"
    out.note(f"castore: tolerance {told['tolerance']:g}, {where}: {told['here']}")
    if not found.sound:
        raise typer.Exit(PROBLEMS)


@app.command()
def expand(
    source: Annotated[str, typer.Argument(metavar="DESTINATION", show_default=False)],
    into: Annotated[str, typer.Argument(metavar="NEW_DESTINATION", show_default=False)],
    step: Annotated[int, typer.Option("--step", min=0, help="Which receipt.")],
    added: Annotated[int, typer.Option("--added", min=1, help="How many sensors.")] = 6,
    moments: Annotated[
        str, typer.Option("--moments", metavar="map|reset", help="Of the optimizers.")
    ] = "map",
    repository: MaybeRepository = None,
    environment: EnvironmentName = None,
    sign: Annotated[
        str | None, typer.Option("--sign", metavar="KEY", help="Ed25519 private key (PEM).")
    ] = None,
    json: Json = False,
) -> None:
    """Add sensors to a checkpoint's policy without changing what it computes now.

    The new receipt's parent is the old one; gates that failed stay failed.

    \b
    Example:
      castore receipts expand runs/cheetah runs/cheetah-23 --step 1000 --added 6
    """
    from castore_receipts.expansion import expand_receipt
    from castore_receipts.rebuild import named

    _need_gymnasium()
    out = Output(json)
    receipt, found = expand_receipt(
        source,
        step,
        into,
        added,
        environment=None if environment is None else named(environment),
        moments=moments,
        repository=repository,
        sign_with=sign,
    )
    _show(out, found, "expansion")
    grown = receipt["expansion"]["grown"]
    out.document("receipt", location=into, step=step, receipt_sha256=receipt["receipt_sha256"])
    for name, count in grown.items():
        out.line(f"{name}: {count} parameters added")
    out.line(f"{sum(grown.values())} parameters added in all; receipt of step {step} in {into}")


def _need_gymnasium() -> None:
    from importlib.util import find_spec

    from castore import InvalidInputError

    if find_spec("gymnasium") is None:
        raise InvalidInputError("this needs gymnasium: pip install 'castore[receipts]'")


def _opened(url: str | None) -> Repository | None:
    from castore import Repository

    return None if url is None else Repository.open(url)


def _show(out: Output, found: Report, kind: str = "receipt") -> None:
    """One report: a document, or a line and one more for each problem."""
    out.document(
        kind,
        location=found.location,
        verdict=found.verdict,
        links={n.name: {"verdict": n.verdict, "detail": n.detail} for n in found.links},
        foreign=found.foreign,
        unknown_fields=list(found.unknown),
        failed_gates=list(found.failed_gates),
        step=found.receipt.get("step"),
        mean_return=found.receipt.get("mean_return"),
    )
    kept = sum(link.verdict == "ok" for link in found.links)
    out.line(_safe(f"{found.location}: {found.verdict} ({kept} of {len(found.links)} links ok)"))
    for link in found.links:
        if not link.sound:
            out.line(_safe(f"  {link.name}: {link.verdict}: {link.detail}"))
    for name in found.failed_gates:
        out.line(_safe(f"  gate {name!r} failed"))
    if found.unknown:
        out.line(_safe(f"  unknown fields, kept: {', '.join(found.unknown)}"))


def _safe(text: str) -> str:
    """Nothing that could steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
