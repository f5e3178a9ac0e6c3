"""Commands of the experiments layout: ``castore experiments``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castore.cli.app import PROBLEMS
from castore.cli.options import DryRun, Json, RepositoryUrl, open_repository
from castore.cli.output import Output, plural, printable, size, utc
from castore.errors import InvalidInputError, NotFoundError, ObjectNotFoundError

if TYPE_CHECKING:
    from castore_experiments.place import Place
    from castore_experiments.records import Records
    from castore_experiments.states import Archive

app = typer.Typer(
    name="experiments",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Root = Annotated[str, typer.Argument(metavar="ROOT", show_default=False)]


@app.callback()
def _root() -> None:
    """Experiments kept by CheckpointManager: what there is, what changed, curves, files.

    ROOT is the path or URL that was given as root_log_dir. A HASH may be cut to its first
    characters as long as one experiment has them.

    \b
    Example:
      castore experiments runs logs/exp
      castore experiments why logs/exp 5bd1 bcca
    """


def _open(root: str, out: Output) -> Place:
    """A root that holds something, opened to read."""
    import secrets
    import time

    from castore_experiments.options import Options
    from castore_experiments.place import Place, World

    place = Place(root, Options(), World(None, out.note, time.time, lambda: secrets.token_hex(4)))
    if place.archive is None:
        raise NotFoundError(f"there is no experiment at or below {root}")
    return place


def _archive(place: Place) -> Archive:
    assert place.archive is not None
    return place.archive


def _kept(place: Place, root: str) -> Records:
    """The records of a root that has a repository."""
    from castore_experiments.records import Records

    if not isinstance(place.archive, Records):
        raise InvalidInputError(
            f"{root} has no repository yet: 'castore experiments import {root} -r URL' makes one"
        )
    return place.archive


def _hash(archive: Archive, text: str) -> str:
    """The one hash that begins with ``text``."""
    return _kept_hash([archive], text)[1]


def _kept_hash(archives: Sequence[Archive], text: str) -> tuple[Archive, str]:
    """The one hash that begins with ``text``, and what holds it: of equal ones the first."""
    found = {h: a for a in reversed(archives) for h in a.hashes() if h.startswith(text)}
    if len(found) != 1:
        raise NotFoundError(
            f"{text!r} begins {plural(len(found), 'hash')} here; there are:"
            f" {', '.join(h for a in archives for h in a.hashes()[:8])}"
        )
    ((hash, archive),) = found.items()
    return archive, hash


@app.command("list")
def list_(repository: RepositoryUrl, json: Json = False) -> None:
    """List all experiments of a repository: namespaces, hashes, steps, sizes, last use.

    \b
    Example:
      castore experiments list -r s3://bucket/store
    """
    from castore_experiments.inventory import inventory

    out = Output(json)
    rows = []
    for found in inventory(open_repository(repository)):
        out.document("experiment", **found.document())
        rows.append(
            [
                found.namespace,
                found.hash,
                str(len(found.steps)),
                "-".join(map(str, sorted({*found.steps[:1], *found.steps[-1:]}))),
                size(found.size),
                utc(found.last_used),
            ]
        )
    out.table(["NAMESPACE", "HASH", ">WEIGHTS", "STEPS", ">SIZE", "LAST USED (UTC)"], rows)
    out.note(plural(len(rows), "experiment"))


@app.command()
def runs(root: Root, json: Json = False) -> None:
    """List the hashes of one root, last used first, with their parents.

    \b
    Example:
      castore experiments runs logs/exp
    """
    from castore_experiments.answers import runs

    out = Output(json)
    archive = _archive(_open(root, out))
    found = runs(archive, archive.latest())
    for one in found:
        out.document("run", **one)
    head = ["", "HASH", "NAME", ">STEP", "PARENT", "CREATED", "NOTES"]
    rows = [
        [
            "*" if r["is_current"] else "",
            r["hash"],
            r["experiment_name"] or "",
            "" if r["latest_weight_step"] is None else str(r["latest_weight_step"]),
            r["parent"] or "",
            r["created"][:19],
            r["notes"],
        ]
        for r in found
    ]
    out.table(head, rows)


@app.command()
def why(
    words: Annotated[list[str], typer.Argument(metavar="[ROOT] HASH1 HASH2", show_default=False)],
    repository: Annotated[
        str | None,
        typer.Option("--repository", "-r", metavar="URL", help="Look in all its namespaces."),
    ] = None,
    json: Json = False,
) -> None:
    """Say in words what differs between two hashes: configuration, model, samples and tags.

    Without ROOT and -r the current folder is the root.

    \b
    Example:
      castore experiments why logs/exp 5bd1 bcca
      castore experiments why -r s3://bucket/store 5bd1 bcca
    """
    from castore_experiments.difference import difference

    out = Output(json)
    if len(words) not in (2, 3) or (repository and len(words) == 3):
        raise typer.BadParameter(f"{len(words)} words: expected [ROOT] HASH1 HASH2")
    if repository is not None:
        archives = _namespaces(repository)
    else:
        archives = [_archive(_open(words[0] if len(words) == 3 else ".", out))]
    for component, lines in difference(*(_kept_hash(archives, w) for w in words[-2:])).items():
        for line in lines:
            out.document("difference", component=component, text=line)
            out.line(printable(f"{component}: {line}"))


def _namespaces(url: str) -> list[Archive]:
    """What each namespace of a repository holds."""
    from castore_experiments.records import Records

    repository = open_repository(url)
    found = [Records(repository, namespace) for namespace in repository.namespaces()]
    for records in found:
        records.refresh()
    return [*found]


@app.command()
def materialize(
    root: Root,
    to: Annotated[
        str | None, typer.Option("--to", metavar="DIR", help="Another folder or URL, a new one.")
    ] = None,
    json: Json = False,
) -> None:
    """Write every documented file: weights of all steps, documents, manifest and curves.

    \b
    Example:
      castore experiments materialize logs/exp
      castore experiments materialize s3://bucket/team/exp --to exported
    """
    from castore_experiments.export import export

    out = Output(json)
    place = _open(root, out)
    count = export(_kept(place, root), place.files, to, out.note)
    where = to or place.files.url
    out.document("materialized", root=where, hashes=count)
    out.note(f"{plural(count, 'experiment')} written to {where}")


@app.command("import")
def import_(
    root: Root,
    repository: RepositoryUrl,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Where to."),
    ] = None,
    json: Json = False,
) -> None:
    """Take a root that another program wrote into a repository; again, only what is new.

    The root itself is only read, also while it is being written. By default a root's own
    repository takes it into the root's own namespace, any other into one made of its URL.

    \b
    Example:
      castore experiments import logs/old -r s3://bucket/store -n old
    """
    from castore_experiments.files import open_files
    from castore_experiments.folder import FolderRecords
    from castore_experiments.importer import import_root
    from castore_experiments.records import Records
    from castore_experiments.root import new_namespace, read_root

    out = Output(json)
    files = open_files(root)
    try:
        folder = FolderRecords(files, out.note)
    except ObjectNotFoundError as e:
        raise NotFoundError(f"there is no experiment in {root}") from e
    opened, record = open_repository(repository), read_root(files)
    if namespace is None and record is not None and record.id == opened.id:
        namespace = record.namespace  # what another program wrote to it since
    # The same root goes to the same namespace each time, another one to another.
    name = namespace or new_namespace(files.url, sha256(files.url.encode()).hexdigest()[:8])
    records = Records(opened, name)
    records.refresh()
    done = import_root(folder, records, out.note)
    fields: dict[str, Any] = {"states": done.states, "weights": done.weights, "rows": done.rows}
    out.document("imported", namespace=name, left=done.left, **fields)
    out.note(f"{done} taken into {name}")
    if done.left:
        raise typer.Exit(PROBLEMS)


@app.command()
def forget(
    root: Root,
    hash: Annotated[
        str | None, typer.Option("--hash", metavar="HASH", help="Only this one; else all.")
    ] = None,
    last: Annotated[int | None, typer.Option("--last", min=1, help="Keep the newest N.")] = None,
    every: Annotated[
        int | None, typer.Option("--every", min=1, help="Keep every multiple of N steps.")
    ] = None,
    best: Annotated[
        str | None,
        typer.Option("--best", metavar="METRIC:MODE:N", help="Keep the best N, such as val:max:2."),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Forget weights that a rule lets go; never the newest, never a branch point.

    Hashes, configurations, data and curves stay. 'castore prune' frees the room after the grace
    period; 'castore unforget' brings them back before.

    \b
    Example:
      castore experiments forget logs/exp --last 3 --every 1000 --best val:max:2 --dry-run
    """
    from castore_experiments.export import exhibit_of
    from castore_experiments.options import Keep, parse_best
    from castore_experiments.saving import forget_weights, let_go

    out = Output(json)
    keep = Keep(last, every, parse_best(best))
    if keep == Keep():
        raise typer.BadParameter("give at least one of --last, --every and --best")
    place = _open(root, out)
    records = _kept(place, root)
    gone = [
        w
        for h in ([_hash(records, hash)] if hash else records.hashes())
        for w in let_go(records, keep, h)
    ]
    for weights in gone:
        file = records.file_of(weights)
        fields: dict[str, Any] = {"hash": weights.hash, "step": weights.step, "size": file.size}
        out.document("forgotten", snapshot=str(weights.snapshot), **fields)
        out.line(f"{weights.hash} step {weights.step}  {size(file.size)}")
    if not dry_run:
        forget_weights(records, exhibit_of(records, place.files, out.note), gone)
    out.note(f"{'would forget' if dry_run else 'forgot'} {plural(len(gone), 'weight file')}")


@app.command()
def curves(
    root: Root,
    metric: Annotated[str | None, typer.Argument(metavar="[METRIC]", show_default=False)] = None,
    hash: Annotated[
        str | None, typer.Option("--hash", metavar="HASH", help="Only this one's rows.")
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Of all roots found at or below ROOT.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.duckdb", help="Write one database.")
    ] = None,
    json: Json = False,
) -> None:
    """Show metrics, the points of one, or write all rows as one database.

    \b
    Example:
      castore experiments curves logs/exp loss
      castore experiments curves logs/sweep --merged --out all.duckdb
    """
    from castore_experiments.siblings import curves_of

    out = Output(json)
    if (hash and metric is None) or (file and metric is not None):
        raise typer.BadParameter("--hash goes with METRIC; --out writes all rows and takes neither")
    place = _open(root, out)
    found = curves_of(place, merged=merged, report=out.note)
    if file is not None:
        from castore_experiments.signals import export_merged

        rows = export_merged(found, file)
        out.document("exported", file=str(file), rows=rows)
        out.note(f"{plural(rows, 'row')} written to {file}")
        return
    if metric is None:
        for name in found.metrics():
            out.document("metric", name=name)
            out.line(printable(name))
        return
    full = _hash(_archive(place), hash) if hash else None
    points = found.signals(metric, full)
    columns = ["step", "metric_value", "experiment_hash", "run"]
    values = points[columns].astype({"experiment_hash": object})
    values.loc[values["experiment_hash"].isna(), "experiment_hash"] = None
    found_rows = values.astype(object).values.tolist()
    for row in found_rows:
        out.document("point", **dict(zip(columns, map(_finite, row), strict=True)))
    cells = [["" if v is None else str(v) for v in row] for row in found_rows]
    out.table([">STEP", ">VALUE", "HASH", "RUN"], cells)


def _finite(value: Any) -> Any:
    """JSON has no number for NaN and infinities: they are text there."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@app.command()
def verify(root: Root, json: Json = False) -> None:
    """Recompute what a root promises: snapshots, files, manifest and curves.

    \b
    Example:
      castore experiments verify logs/exp
    """
    from castore_experiments.audit import audit

    out = Output(json)
    place = _open(root, out)
    count = 0
    for path, defect in audit(_kept(place, root), place.files):
        count += 1
        out.document("problem", kind="layout", object=path, detail=defect)
        out.line(printable(f"{path}: {defect}"))
    out.note(plural(count, "problem") if count else "no problems found")
    if count:
        raise typer.Exit(PROBLEMS)
