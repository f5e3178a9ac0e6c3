"""Commands that only read: snapshots, ls, cat, checkout, usage, drivers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castore.cli.app import PROBLEMS, app
from castore.cli.options import Json, RepositoryUrl, open_repository, split_path
from castore.cli.output import Output, aligned, iso, plural, size, utc
from castore.errors import CastoreError, InvalidInputError, NotFoundError, SnapshotNotFoundError

if TYPE_CHECKING:
    from castore.repository import Repository
    from castore.snapshot import Snapshot, SnapshotName
    from castore.tree import Entry
    from castore.usage import Share

Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Only this namespace.")]
Within = Annotated[str, typer.Argument(metavar="SNAPSHOT[:PATH]", show_default=False)]


@app.command()
def snapshots(
    repository: RepositoryUrl,
    namespace: Namespace = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Only this many, the newest.")
    ] = None,
    forgotten: Annotated[
        bool, typer.Option("--forgotten", help="What 'castore unforget' can bring back instead.")
    ] = False,
    json: Json = False,
) -> None:
    """List snapshots, newest first.

    \b
    Example:
      castore snapshots -r store -n alice --limit 10
    """
    out = Output(json)
    store = open_repository(repository)
    names = _names(store, namespace, limit, forgotten)
    found, damaged = [], []
    for name, document in _documents(store, names, forgotten):
        if isinstance(document, CastoreError):
            damaged.append(document)
            out.document("problem", kind="corrupt", object=name.path, detail=str(document))
        elif document is not None:
            found.append((name, document))
            out.document("snapshot", **_snapshot_fields(name, document))
    head = ["ID", "TIME (UTC)", "NAMESPACE", "KEY", ">FILES", ">SIZE", "LABELS"]
    out.table(head, [_row(name, document) for name, document in found])
    for error in damaged:
        out.note(f"castore: problem: {error}")
    if damaged:
        raise typer.Exit(PROBLEMS)


def _names(
    store: Repository, namespace: str | None, limit: int | None, forgotten: bool
) -> list[SnapshotName]:
    if forgotten:
        listed = [n for n in store.forgotten() if namespace in (None, n.namespace)]
    else:
        listed = list(store.snapshots(namespace, limit))
    listed.sort(key=lambda n: (-n.time, n))
    return list(islice(listed, limit))


def _documents(
    store: Repository, names: Sequence[SnapshotName], forgotten: bool
) -> Iterator[tuple[SnapshotName, Snapshot | CastoreError | None]]:
    """Each name's document; the error of one that is damaged; None for one that has just gone."""
    from castore.errors import FormatError, IntegrityError, ObjectNotFoundError
    from castore.load import read_snapshot
    from castore.snapshot import MAX_DOCUMENT

    def read(name: SnapshotName) -> Snapshot | CastoreError | None:
        try:
            if forgotten:
                return read_snapshot(store.backend.get(name.forgotten, 0, MAX_DOCUMENT + 1), name)
            return store.snapshot(name)
        except (ObjectNotFoundError, SnapshotNotFoundError):
            return None
        except (IntegrityError, FormatError) as e:
            return e

    with ThreadPoolExecutor(store.backend.parallel) as pool:
        yield from zip(names, pool.map(read, names), strict=True)


def _snapshot_fields(name: SnapshotName, document: Snapshot) -> dict[str, Any]:
    return {
        "snapshot": str(name),
        "id": name.id,
        "namespace": name.namespace,
        "key": name.key,
        "time": iso(name.time),
        "driver": document.driver,
        "labels": dict(document.labels),
        "files": document.files,
        "size": document.size,
        "tree": document.tree,
    }


def _row(name: SnapshotName, document: Snapshot) -> list[str]:
    labels = " ".join(f"{k}={v}" for k, v in sorted(document.labels.items()))
    counts = [str(document.files), size(document.size)]
    return [name.id, utc(name.time), name.namespace, name.key, *counts, labels]


@app.command()
def ls(within: Within, repository: RepositoryUrl, json: Json = False) -> None:
    """List what a snapshot holds.

    Kind, bytes and path. Kinds: - file, x executable file, l link, d empty folder.

    \b
    Example:
      castore ls -r store latest:checkpoints
    """
    out = Output(json)
    tree = open_repository(repository).tree(within)
    rows = []
    for path, entry in tree.entries.items():
        fields = _entry_fields(entry)
        out.document("entry", path=path, **fields)
        target = f" -> {fields['target']}" if "target" in fields else ""
        mark = (
            "x" if fields.get("executable") else {"file": "-", "link": "l"}.get(fields["kind"], "d")
        )
        rows.append([mark, str(fields.get("size", 0)), path + target])
    if not json:
        for text in list(aligned(["", ">", ""], rows))[1:]:
            out.line(text)


def _entry_fields(entry: Entry) -> dict[str, Any]:
    from castore.tree import File, Link

    if isinstance(entry, File):
        return {
            "kind": "file",
            "size": entry.size,
            "sha256": entry.sha256,
            "executable": entry.executable,
        }
    if isinstance(entry, Link):
        return {"kind": "link", "target": entry.target}
    return {"kind": "folder"}


@app.command()
def cat(
    what: Annotated[str, typer.Argument(metavar="SNAPSHOT:PATH", show_default=False)],
    repository: RepositoryUrl,
    json: Json = False,
) -> None:
    """Write one file's bytes to stdout.

    Every byte is verified. With --json only an error is a document, on stderr: stdout is the file.

    \b
    Example:
      castore cat -r store latest:config.yaml
    """
    from castore.tree import File

    snapshot, path = split_path(what)
    store = open_repository(repository)
    tree = store.tree(snapshot)
    entry = tree.entries.get(path)
    if entry is None:
        known = "a folder" if tree.below(path).entries else "not there"
        raise NotFoundError(f"{path!r} is {known} in {snapshot}: 'castore ls' lists its paths")
    if not isinstance(entry, File):
        raise InvalidInputError(f"{path!r} in {snapshot} is a link or a folder, not a file")
    if sys.stdout is None:
        raise InvalidInputError("there is nowhere to write the file to: stdout is closed")
    for part in store.read_file(entry):
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


@app.command()
def checkout(
    within: Within,
    target: Annotated[Path, typer.Argument(metavar="TARGET", show_default=False)],
    repository: RepositoryUrl,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Also compute each file's SHA-256 once more.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a snapshot, or a part, to a folder.

    Every byte is verified, and nothing is left half-written.

    \b
    Example:
      castore checkout -r store latest:checkpoints/best.pt restored
    """
    out = Output(json)
    store = open_repository(repository)
    total = store.tree(within).size if sys.stderr.isatty() else None
    with out.progress("checkout", total) as progress:
        tree = store.checkout(within, target, force=force, sha256=sha256, progress=progress)
    count = sum(1 for _ in tree.files())
    out.document(
        "checkout",
        snapshot=within,
        target=str(target.absolute()),
        files=count,
        entries=len(tree.entries),
        size=tree.size,
    )
    out.note(f"wrote {plural(count, 'file')}, {size(tree.size)}, to {target}")


@app.command()
def usage(repository: RepositoryUrl, namespace: Namespace = None, json: Json = False) -> None:
    """Say where the bytes are.

    LOGICAL: the files' sizes. STORED: what the repository keeps for them. FREES: what only this
    one needs: forgetting it, and a later prune, would free it.

    \b
    Example:
      castore usage -r store -n alice
    """
    from castore.usage import usage as measure

    out = Output(json)
    with out.progress("usage", objects=True) as progress:
        found = measure(open_repository(repository), namespace, progress=progress)
    for kind, shares in (("namespace", found.namespaces), ("snapshot", found.snapshots)):
        for share in shares:
            out.document(kind, **_share_fields(share))
    out.document(
        "total",
        logical=found.logical,
        stored=found.stored,
        ratio=round(found.ratio, 6),
        objects=found.objects,
        unreferenced=found.unreferenced,
    )
    head = [">LOGICAL", ">STORED", ">RATIO", ">FREES", ">SNAPSHOTS"]
    out.table(["NAMESPACE", *head], [_share_row(s) for s in found.namespaces])
    out.line("")
    out.table(["SNAPSHOT", *head[:-1]], [_share_row(s)[:-1] for s in found.snapshots])
    out.line("")
    out.line(
        f"total: {size(found.logical)} in {size(found.stored)} stored (ratio {found.ratio:.3f}),"
        f" {plural(found.objects, 'object')}, {size(found.unreferenced)} unreferenced"
    )


def _share_fields(share: Share) -> dict[str, Any]:
    return {
        "name": share.name,
        "logical": share.logical,
        "stored": share.stored,
        "unique": share.unique,
        "snapshots": share.snapshots,
    }


def _share_row(share: Share) -> list[str]:
    ratio = f"{share.stored / share.logical:.3f}" if share.logical else "-"
    sizes = [size(share.logical), size(share.stored), ratio, size(share.unique)]
    return [share.name, *sizes, str(share.snapshots)]


@app.command()
def drivers(json: Json = False) -> None:
    """List the drivers that 'commit --driver' takes.

    \b
    Example:
      castore drivers
    """
    from importlib.metadata import entry_points

    from castore.driver import GROUP, FolderDriver

    out = Output(json)
    origins = {FolderDriver.name: "castore"}
    for entry in entry_points(group=GROUP):
        origins[entry.name] = entry.dist.name if entry.dist else ""
    for name, package in sorted(origins.items()):
        out.document("driver", name=name, package=package)
    out.table(["NAME", "PACKAGE"], sorted(origins.items()))
