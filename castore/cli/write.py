"""Commands that write snapshots: init, commit, forget, unforget."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from castore.cli.app import app
from castore.cli.options import (
    DryRun,
    Json,
    Labels,
    RepositoryUrl,
    Snapshots,
    open_repository,
    parse_labels,
)
from castore.cli.output import Output, iso, plural, size, utc

if TYPE_CHECKING:
    from castore.repository import Commit, Repository
    from castore.source import Draft


@app.command()
def init(
    repository: RepositoryUrl,
    shared: Annotated[
        bool, typer.Option("--shared", help="Let the folder's group write too (local).")
    ] = False,
    json: Json = False,
) -> None:
    """Make an empty repository.

    \b
    Example:
      castore init -r /data/store --shared
      castore init -r s3://bucket/store
    """
    from castore.repository import Repository

    out = Output(json)
    made = Repository.init(repository, shared=shared)
    out.document("repository", url=made.url, id=made.id)
    out.note(f"made an empty repository at {made.url}")


@app.command()
def commit(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", show_default=False)],
    repository: RepositoryUrl,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Where the snapshot is listed.")
    ] = "main",
    label: Labels = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="SNAPSHOT[:PATH]", help="Store differences to this where smaller."),
    ] = None,
    driver: Annotated[
        str | None, typer.Option(help="Read PATH as this driver's layout; see 'castore drivers'.")
    ] = None,
    compression: Annotated[
        Literal["auto", "none"], typer.Option(help="'none' takes less time and more room.")
    ] = "auto",
    max_chain: Annotated[
        int, typer.Option(min=0, max=32, help="Most differences a read goes through.")
    ] = 8,
    verify_hits: Annotated[
        bool, typer.Option("--verify-hits", help="Read back what is reused; heal what is damaged.")
    ] = False,
    json: Json = False,
) -> None:
    """Store files and folders as a snapshot.

    Prints its name. One folder gives its content; several paths keep their last names. Durable
    when this returns.

    \b
    Example:
      castore commit -r store runs/today -n alice --label task=cifar
    """
    from castore.commit import Options

    out = Output(json)
    labels = parse_labels(label)
    store = open_repository(repository)
    options = Options(compression=compression, max_chain=max_chain, verify_hits=verify_hits)
    for draft in _drafts(store, paths, driver):
        total = sum(getattr(entry, "size", 0) for entry in draft.entries.values())
        began = time.monotonic()
        with out.progress("commit", total) as progress:
            done = store.commit(
                draft,
                namespace=namespace,
                labels=labels,
                base=base,
                options=options,
                progress=progress,
            )
        _tell_commit(out, done, time.monotonic() - began)


def _drafts(store: Repository, paths: Sequence[Path], driver: str | None) -> Iterator[Draft]:
    from castore.driver import find_driver
    from castore.source import Draft, scan

    if driver is None:
        yield Draft(scan(paths, store.url if store.backend.kind == "local" else None))
        return
    found = find_driver(driver)
    for path in paths:
        yield from found.collect(path)


def _tell_commit(out: Output, done: Commit, seconds: float) -> None:
    snapshot = done.snapshot
    out.document(
        "commit",
        snapshot=str(done.name),
        id=done.name.id,
        namespace=done.name.namespace,
        key=done.name.key,
        time=iso(done.name.time),
        tree=snapshot.tree,
        labels=dict(snapshot.labels),
        files=snapshot.files,
        size=snapshot.size,
        added=done.added,
        seconds=round(seconds, 3),
    )
    out.line(str(done.name))
    out.note(
        f"stored {plural(snapshot.files, 'file')}, {size(snapshot.size)},"
        f" in {size(done.added)} of new objects ({seconds:.1f} s)"
    )


@app.command()
def forget(
    snapshots: Snapshots, repository: RepositoryUrl, dry_run: DryRun = False, json: Json = False
) -> None:
    """Take snapshots off the list.

    Nothing is deleted before 'castore prune', and not before its grace period is over: until then
    'castore unforget' brings them back.

    \b
    Example:
      castore forget -r store 3f2a9c --dry-run
    """
    out = Output(json)
    store = open_repository(repository)
    names = [store.resolve(text) for text in snapshots]
    for name in dict.fromkeys(names):
        if not dry_run:
            store.forget(name)
        out.document("forgotten", snapshot=str(name), time=iso(name.time), dry_run=dry_run)
        out.line(f"{'would forget' if dry_run else 'forgot'} {name} of {utc(name.time)}")


@app.command()
def unforget(snapshots: Snapshots, repository: RepositoryUrl, json: Json = False) -> None:
    """Bring forgotten snapshots back, under fresh names.

    'castore snapshots --forgotten' lists them.

    \b
    Example:
      castore unforget -r store 3f2a9c
    """
    out = Output(json)
    store = open_repository(repository)
    names = [store.resolve_forgotten(text) for text in snapshots]
    for name, text in dict(zip(names, snapshots, strict=True)).items():
        fresh = store.unforget(name)
        out.document("commit", snapshot=str(fresh), id=fresh.id, was=text, time=iso(fresh.time))
        out.line(str(fresh))
