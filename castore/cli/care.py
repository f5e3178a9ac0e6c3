"""Commands that look after a repository: check, prune, copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castore.cli.app import PROBLEMS, app
from castore.cli.options import (
    Dask,
    DryRun,
    Json,
    Labels,
    Namespaces,
    RepositoryUrl,
    SinceText,
    Workers,
    at_work,
    open_repository,
    parse_duration,
    parse_labels,
    parse_part,
    parse_share,
    parse_since,
)
from castore.cli.output import Output, iso, plural, printable, size, utc
from castore.errors import CastoreError

if TYPE_CHECKING:
    from castore.check import CheckReport, Problem
    from castore.prune import PruneReport
    from castore.repository import Repository
    from castore.snapshot import SnapshotName


@app.command()
def check(
    repository: RepositoryUrl,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read, decode and hash every stored byte.")
    ] = False,
    sample: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Read this share of the objects: 5%.")
    ] = None,
    since: SinceText = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep what was read and verified; go on from it."),
    ] = None,
    layout: Annotated[
        bool, typer.Option("--layout", help="Also let drivers verify what their layouts promise.")
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Only part K (from 1) of N, at most 256."),
    ] = None,
    repair_from: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="First replace damaged objects by good ones from this repository."
        ),
    ] = None,
    workers: Workers = None,
    dask: Dask = None,
    json: Json = False,
) -> None:
    """Look for damage; exit code 3 if there is.

    Documents, trees, names and headers always, every stored byte on request. Nothing is changed,
    but for damaged objects with --repair-from.

    With --part, N commands look at one N-th of the objects each, on as many machines as you like;
    what they find together is what one check finds.

    \b
    Example:
      castore check -r store --read-data --state check.state
      castore check -r s3://bucket/store --read-data --dask tcp://scheduler:8786
      castore check -r s3://bucket/store --read-data --state 3.state --part 3/16
    """
    from castore.check import CheckReport
    from castore.check import check as find_problems

    out = Output(json)
    share, moment, own = parse_share(sample), parse_since(since), parse_part(part)
    if read_data and share is not None:
        raise typer.BadParameter("--read-data reads all, --sample a share: choose one of the two")
    if state is not None and not read_data and share is None:
        raise typer.BadParameter("--state goes with --read-data or --sample")
    if repair_from is not None and own is not None:
        raise typer.BadParameter("--repair-from looks at everything: repair without --part")
    store = open_repository(repository)
    if repair_from is not None:
        _repair(out, store, open_repository(repair_from))
    report = CheckReport()
    with at_work(workers, dask) as executor, out.progress("check") as progress:
        problems = list(
            find_problems(
                store,
                read_data=read_data,
                sample=share,
                since=moment.moment(store),
                state=str(state) if state else None,
                layout=layout,
                part=own,
                progress=progress,
                report=report,
                executor=executor,
            )
        )
    _tell_check(out, problems, report, own)
    if problems:
        raise typer.Exit(PROBLEMS)


def _repair(out: Output, store: Repository, other: Repository) -> None:
    from castore.repair import repair

    with out.progress("repair") as progress:
        replaced = repair(store, other, progress=progress)
    for digest in replaced:
        out.document("repaired", object=digest, source=other.url)
        out.line(f"repaired {digest}")
    out.note(f"replaced {plural(len(replaced), 'object')} from {other.url}")


def _tell_check(
    out: Output, problems: list[Problem], report: CheckReport, part: tuple[int, int] | None
) -> None:
    for problem in problems:
        out.document(
            "problem",
            kind=problem.kind,
            object=problem.object,
            detail=problem.detail,
            needed_by=[list(pair) for pair in problem.needed_by],
        )
        out.line(f"{problem.kind}: {printable(problem.object)}: {printable(problem.detail)}")
        for snapshot, path in problem.needed_by:
            out.line(f"  needed by {snapshot}{':' + printable(path) if path else ''}")
    # Of a part it is not known what nobody needs.
    own = {"unreferenced": report.unreferenced} if part is None else {"part": list(part)}
    out.document(
        "summary",
        problems=len(problems),
        snapshots=report.snapshots,
        objects=report.objects,
        bytes_read=report.bytes_read,
        **own,
        unstable=report.unstable,
    )
    for name in report.unstable:
        out.note(f"read wrong once and right the second time: {name} (look at disk and memory)")
    out.note(
        (f"part {part[0]}/{part[1]}: " if part else "")
        + f"{plural(report.snapshots, 'snapshot')}, {plural(report.objects, 'object')},"
        f" {size(report.bytes_read)} read: "
        + (plural(len(problems), "problem") if problems else "no problems")
    )


@app.command()
def prune(
    repository: RepositoryUrl,
    dry_run: DryRun = False,
    grace: Annotated[
        str, typer.Option(metavar="AGE", help="Keep what is younger or was forgotten since.")
    ] = "14d",
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", help="You vouch that nobody writes: for stores without conditional writes."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Delete objects that no snapshot needs.

    Safe beside writers. Forgotten snapshots go when their grace is over.

    \b
    Example:
      castore prune -r store --dry-run
    """
    from castore.prune import prune as sweep

    out = Output(json)
    seconds = parse_duration(grace)
    store = open_repository(repository)
    with out.progress("prune", objects=True) as progress:
        report = sweep(store, dry_run=dry_run, grace=seconds, offline=offline, progress=progress)
    _tell_prune(out, report, store)
    if report.failed:
        raise typer.Exit(PROBLEMS)


def _tell_prune(out: Output, report: PruneReport, store: Repository) -> None:
    verb = "would delete" if report.dry_run else "deleted"
    for name in report.expired:
        more = _of_forgotten(store, name) if report.dry_run else {}
        out.document(
            "expired",
            snapshot=str(name),
            key=name.key,
            time=iso(name.time),
            dry_run=report.dry_run,
            reason="its grace is over",
            **more,
        )
        words = [str(name), utc(name.time), name.key, size(more["size"]) if more else ""]
        words += [f"{k}={v}" for k, v in sorted(more.get("labels", {}).items())]
        text = printable(" ".join(w for w in words if w))
        out.line(f"{verb} forgotten snapshot {text}: its grace is over")
    for digest, stored in report.victims:
        reason = "no snapshot needs it"
        out.document("deleted", object=digest, size=stored, dry_run=report.dry_run, reason=reason)
        out.line(f"{verb} object {digest} {stored}: {reason}")
    for name_, reason in report.failed:
        out.document("problem", kind="undeleted", object=name_, detail=reason)
        out.note(f"not deleted: {name_}: {printable(reason)}")
    out.document(
        "summary",
        dry_run=report.dry_run,
        objects=report.objects,
        bytes=report.bytes,
        kept_objects=report.kept_objects,
        kept_bytes=report.kept_bytes,
        expired=len(report.expired),
        failed=len(report.failed),
    )
    out.note(
        f"{verb} {plural(report.objects, 'object')}, {size(report.bytes)};"
        f" {plural(report.kept_objects, 'object')}, {size(report.kept_bytes)} stay"
    )


def _of_forgotten(store: Repository, name: SnapshotName) -> dict[str, Any]:
    """What people know a snapshot by; empty where its document cannot be read."""
    from castore.load import read_snapshot
    from castore.snapshot import MAX_DOCUMENT

    try:
        found = read_snapshot(store.backend.get(name.forgotten, 0, MAX_DOCUMENT + 1), name)
    except (CastoreError, OSError):
        return {}
    return {"size": found.size, "labels": dict(found.labels)}


@app.command()
def copy(
    repository: RepositoryUrl,
    to: Annotated[str, typer.Option(metavar="URL", help="The repository to copy to.")],
    namespace: Namespaces = None,
    label: Labels = None,
    since: SinceText = None,
    workers: Workers = None,
    dask: Dask = None,
    json: Json = False,
) -> None:
    """Copy snapshots to another repository.

    Sends only what it lacks, every byte verified. May be interrupted and run again.

    \b
    Example:
      castore copy -r store --to s3://bucket/store -n alice --since 7d
    """
    from castore.copy import copy as transfer

    out = Output(json)
    labels, moment = parse_labels(label), parse_since(since)
    source, target = open_repository(repository), open_repository(to)
    with at_work(workers, dask) as executor, out.progress("copy") as progress:
        report = transfer(
            source,
            target,
            namespaces=namespace,
            labels=labels or None,
            since=moment.moment(source),
            progress=progress,
            executor=executor,
        )
    for name in report.names:
        out.document("copied", snapshot=str(name))
        out.line(str(name))
    out.document(
        "summary",
        snapshots=report.snapshots,
        skipped=report.skipped,
        objects=report.objects,
        bytes=report.bytes,
    )
    out.note(
        f"copied {plural(report.snapshots, 'snapshot')}, {plural(report.objects, 'object')},"
        f" {size(report.bytes)}; {report.skipped} were there already"
    )
