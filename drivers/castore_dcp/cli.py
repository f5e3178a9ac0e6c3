"""Commands of distributed checkpoints: ``castore dcp``. Nothing heavy is imported by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from castore.cli.options import Json, RepositoryUrl

if TYPE_CHECKING:
    from castore_dcp.layout import Entry

app = typer.Typer(name="dcp", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _root() -> None:
    """Checkpoints of torch.distributed.checkpoint."""


@app.command()
def show(
    repository: RepositoryUrl,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Where the checkpoints are listed.")
    ] = "main",
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "-c", help="A step or name; the latest without."),
    ] = None,
    json: Json = False,
) -> None:
    """List what a checkpoint holds: each tensor's dtype, shape and chunks, and other values.

    \b
    Example:
      castore dcp show -r store -n train -c step-100
    """
    from castore import Repository
    from castore.cli.output import Output
    from castore_dcp import find
    from castore_dcp.names import parse_id

    out, store = Output(json), Repository.open(repository)
    wanted = "latest" if checkpoint is None else parse_id(checkpoint)
    found = find.read(store, find.resolve(store, namespace, wanted))
    rows = []
    for fqn, entry in found.layout.entries.items():
        fields = _fields(entry)
        out.document("entry", name=fqn, **fields)
        rows.append([fqn, *(str(v) for v in fields.values())])
    out.table(["name", "dtype", "shape", "chunks"], rows)


def _fields(entry: Entry) -> dict[str, Any]:
    from castore_dcp.layout import BytesEntry

    if isinstance(entry, BytesEntry):
        return {"dtype": "bytes", "shape": [], "chunks": 1}
    return {"dtype": entry.dtype, "shape": list(entry.size), "chunks": len(entry.chunks)}
