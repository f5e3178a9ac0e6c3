"""Commands of the pools layout: ``castore pools``. Nothing heavy is imported until one runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from os.path import isdir
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from castore.cli.options import Dask, Json, RepositoryUrl, Workers, at_work

if TYPE_CHECKING:
    from castore import Repository
    from castore_pools.places import Place

PROBLEMS = 3
"""Exit code: the command finished and found problems."""

app = typer.Typer(name="pools", no_args_is_help=True, rich_markup_mode=None)

Root = Annotated[str, typer.Argument(metavar="ROOT", show_default=False)]
Given = Annotated[
    str | None,
    typer.Option(
        "--repository",
        "-r",
        envvar="CASTORE_REPOSITORY",
        metavar="URL",
        help="Of castore:// addresses.",
    ),
]
CellName = Annotated[
    str | None, typer.Option("--cell", metavar="ARCH__DATASET", help="Only this cell.")
]


@app.callback()
def _root() -> None:
    """Pool checkpoints with frozen tensors, reassembled on read.

    ROOT is a folder, a URL, or castore://NAMESPACE/SNAPSHOT of the repository given with -r.
    """


def _open(url: str | None) -> Repository | None:
    from castore import Repository

    return Repository.open(url) if url else None


def _place(root: str, repository: str | None, keep: int | None = None) -> Place:
    from castore_pools.places import open_place
    from castore_pools.sources import KEPT

    store = _open(repository) if root.startswith("castore://") else None
    return open_place(root, None, KEPT if keep is None else keep, store)


@app.command("import")
def import_(
    root: Root,
    repository: RepositoryUrl,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Where the snapshots are listed.")
    ] = "main",
    json: Json = False,
) -> None:
    """Store a zoo: a snapshot of each base, then one of each cell.

    A pool file is stored as the difference to the file before it, the first as that to the base.

    \b
    Example:
      castore pools import zoo-folder -r store -n agnews
    """
    from castore.cli.output import Output, size
    from castore_pools.importing import import_zoo

    out, store = Output(json), _open(repository)
    assert store is not None
    with out.progress("import") as progress:
        for made in import_zoo(store, root, namespace, progress=progress):
            found = made.snapshot
            out.document(
                "commit",
                snapshot=str(made.name),
                key=made.name.key,
                labels=dict(found.labels),
                files=found.files,
                size=found.size,
                added=made.added,
            )
            out.line(str(made.name))
            out.note(
                f"{made.name.key}: {found.files} files, {size(found.size)},"
                f" in {size(made.added)} of new objects"
            )


@app.command()
def ls(
    root: Annotated[str | None, typer.Argument(metavar="[ROOT]", show_default=False)] = None,
    repository: Given = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n")] = None,
    json: Json = False,
) -> None:
    """List the cells at ROOT; without ROOT the pools in the repository.

    \b
    Example:
      castore pools ls zoo-folder
      castore pools ls -r store
    """
    from castore.cli.output import Output

    out = Output(json)
    if root is None:
        _list_repository(out, repository, namespace)
        return
    from castore_pools.layout import survey

    rows = []
    for files in survey(_place(root, repository)).cells:
        body = files.record.body if files.record is not None else {}
        metric = files.record.part("pool").get("val_metric") if files.record is not None else None
        fields = {
            "cell": files.cell.name,
            "task": files.cell.task,
            "model": files.cell.model_id,
            "files": len(files.pool),
            "generated_params": body.get("generated_params"),
            "frozen_params": body.get("frozen_params"),
            "val_metric_mean": metric.get("mean") if isinstance(metric, dict) else None,
            "pinned": bool(body.get("pin")),
            "base": files.base,
        }
        out.document("cell", **fields)
        rows.append([_shown(fields[k]) for k in list(fields)[:-1]])
    head = [
        *("CELL", "TASK", "MODEL", ">FILES", ">GENERATED", ">FROZEN", ">METRIC", "PINNED"),
    ]
    out.table(head, rows)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _list_repository(out: Any, url: str | None, namespace: str | None) -> None:
    from castore.cli.output import size, utc
    from castore_pools.importing import DRIVER

    store = _open(url)
    if store is None:
        raise typer.BadParameter("give ROOT, or a repository with -r")
    rows = []
    for name in store.snapshots(namespace):
        found = store.snapshot(name)
        if found.driver != DRIVER:
            continue
        labels = dict(found.labels)
        out.document("snapshot", snapshot=str(name), labels=labels, files=found.files)
        cell = f"{labels.get('arch', '')}__{labels.get('dataset', '')}"
        counts = [str(found.files), size(found.size)]
        about = ["-" if cell == "__" else cell, labels.get("model", "-"), labels.get("part", "-")]
        rows.append([str(name), utc(name.time), *about, *counts])
    out.table(["SNAPSHOT", "TIME", "CELL", "MODEL", "PART", ">FILES", ">SIZE"], rows)


@app.command()
def assemble(
    base: Annotated[str, typer.Argument(metavar="BASE", show_default=False)],
    pool: Annotated[str, typer.Argument(metavar="POOL", show_default=False)],
    out_path: Annotated[str, typer.Argument(metavar="OUT", show_default=False)],
    format: Annotated[
        Literal["pth", "safetensors"], typer.Option(help="Of the file that is written.")
    ] = "pth",
    require_pin: Annotated[
        bool, typer.Option("--require-pin", help="Refuse a file that names no base digests.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Of the pool file, where it was not recorded.")
    ] = None,
    repository: Given = None,
    json: Json = False,
) -> None:
    """Write the whole model of a pool file.

    BASE is the base checkpoint; or a folder, or an address ending in /, whose registry or digests
    tell it. Nothing is opened that a file names itself.

    \b
    Example:
      castore pools assemble zoo/agnews/bertbase/bertbase_010.pth collect_000.pth whole.pth
      castore pools assemble zoo-folder/ collect_000.pth whole.safetensors --format safetensors
    """
    from castore.cli.output import Output
    from castore_pools.assembly import assemble as join
    from castore_pools.assembly import find_base
    from castore_pools.checkpoint import open_checkpoint
    from castore_pools.output import encode_assembled, write_output
    from castore_pools.pins import FIELD, read_pin

    out = Output(json)
    store = _open(repository) if "castore://" in (pool[:10], base[:10]) else None
    member = open_checkpoint(pool, None, store)
    if base.endswith("/") or isdir(base):
        place = _place(base, repository)
        base = find_base(place, member)
        opened = open_checkpoint(place.source(base))
    else:
        opened = open_checkpoint(base, None, store)
    state = join(opened, member, dtype=dtype, require_pin=require_pin)
    data = encode_assembled(state, member.fields, format)
    write_output(out_path, data)
    pinned = bool(read_pin(member.fields.get(FIELD), pool).frozen)
    out.document(
        "assembled", out=out_path, base=base, keys=len(state), size=len(data), pinned=pinned
    )
    out.note(f"wrote {len(state)} keys to {out_path}" + ("" if pinned else " (unpinned)"))


@app.command()
def verify(
    root: Root,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Called with a whole state dict and the base's fields; gives the metric.",
        ),
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="Files a cell for --metric.")] = 3,
    require_pin: Annotated[
        bool, typer.Option("--require-pin", help="Unpinned files are problems.")
    ] = False,
    repository: Given = None,
    workers: Workers = None,
    dask: Dask = None,
    json: Json = False,
) -> None:
    """Recompute what a zoo promises.

    Digests, keys, shapes, numbering, counts, finite values, and with --metric the logged metric
    of some files. Exits with 3 where a promise is broken.

    \b
    Example:
      castore pools verify zoo-folder --metric mymodels:accuracy
      castore pools verify castore://agnews/latest -r store
    """
    from dataclasses import asdict

    from castore.cli.output import Output, printable
    from castore_pools.verify import verify_place

    out, counts = Output(json), {"kept": 0, "broken": 0, "not_checked": 0}
    function = _function(metric) if metric is not None else None
    place = _place(root, repository)
    how: dict[str, Any] = {"metric": function, "sample": sample, "require_pin": require_pin}
    with at_work(workers, dask) as executor:
        for found in verify_place(place, **how, executor=executor):
            kind = "broken" if found.broken else "kept" if found.verdict == "ok" else "not_checked"
            counts[kind] += 1
            if found.verdict != "ok":
                out.document("finding", **asdict(found))
                words = (found.path, found.check, found.verdict, found.detail)
                out.line(printable(": ".join(words)))
    out.document("verified", **counts)
    out.note(", ".join(f"{n} {k.replace('_', ' ')}" for k, n in counts.items()))
    if counts["broken"]:
        raise typer.Exit(PROBLEMS)


def _function(text: str) -> Callable[..., float]:
    """The function that ``module:function`` names; the user's own code, named by the user."""
    from importlib import import_module

    module, colon, name = text.partition(":")
    try:
        found: Callable[..., float] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise typer.BadParameter(f"--metric {text!r}: {e}; expected MODULE:FUNCTION") from e
    return found


@app.command()
def stats(
    root: Root,
    cell: CellName = None,
    tensor: Annotated[
        list[str] | None, typer.Option("--tensor", metavar="KEY", help="Only these.")
    ] = None,
    repository: Given = None,
    json: Json = False,
) -> None:
    """Show how far each tensor spreads over a pool, in bounded memory.

    STD: root mean square over elements of the standard deviation over files. LARGEST: that of the
    element that moves most. FROM BASE: root mean square distance to the base.

    \b
    Example:
      castore pools stats zoo-folder --cell bertbase__agnews
    """
    from dataclasses import asdict

    from castore.cli.output import Output
    from castore_pools.layout import survey
    from castore_pools.stats import KEEP, pool_stats

    out, place = Output(json), _place(root, repository, KEEP)
    found = [f for f in survey(place).cells if cell in (None, f.cell.name, str(f.cell))]
    if cell is not None and not found:
        raise typer.BadParameter(f"--cell {cell!r}: there is no such cell at {root}")
    for files in found:
        rows = []
        for one in pool_stats(place, files, tensor):
            fields = asdict(one)
            finite = {k: v for k, v in fields.items() if _finite(v)}
            out.document("spread", cell=str(files.cell), **dict.fromkeys(fields, None) | finite)
            numbers = [one.mean, one.min, one.max, one.std, one.largest, one.from_base]
            rows.append([one.key, str(one.elements), *map(_shown, numbers)])
        out.line(f"{files.cell}: {len(files.pool)} files")
        head = ["TENSOR", ">ELEMENTS", ">MEAN", ">MIN", ">MAX", ">STD", ">LARGEST", ">FROM BASE"]
        out.table(head, rows)


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


@app.command()
def reduce(
    base: Annotated[str, typer.Argument(metavar="BASE", show_default=False)],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", show_default=False)],
    out_folder: Annotated[str, typer.Argument(metavar="OUT", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    json: Json = False,
) -> None:
    """Take the keys that never changed out of full pool files.

    Every file is reassembled and compared before it is written. OUT may be FOLDER itself.

    \b
    Example:
      castore pools reduce zoo/agnews/bertbase/bertbase_010.pth full reduced
    """
    from castore.cli.output import Output, size
    from castore_pools.reduce import reduce_files

    out = Output(json)
    done = reduce_files(base, folder, out_folder, dry_run=dry_run)
    out.document(
        "reduced",
        keys=list(done.keys),
        files=len(done.files),
        before=done.before,
        after=None if dry_run else done.after,
    )
    for key in done.keys:
        out.line(key)
    after = "" if dry_run else f", {size(done.before)} became {size(done.after)}"
    out.note(f"{len(done.keys)} keys never changed in {len(done.files)} files{after}")
