"""Reassemble whole cells of a zoo into full checkpoints, several at a time.

    python scripts/assemble_pool.py ZOO OUT --cell bertbase__agnews --format safetensors
    CASTORE_REPOSITORY=store python scripts/assemble_pool.py castore://agnews/latest s3://bucket/full

ZOO is a folder, an fsspec URL or castore://NAMESPACE/SNAPSHOT; OUT a folder or URL. Each pool file
becomes OUT/<task>/<cell>/<model_id>/collect_NNN.pth (or .safetensors), written whole or not at all;
what is there already is left alone unless --force is given. A file that cannot be assembled is
named and the others get their turn.

Exit codes: 0 all written; 3 some refused; another error's own code when ZOO cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

from castore import CastoreError, NotFoundError
from castore_pools.addresses import open_source
from castore_pools.assembly import assemble
from castore_pools.checkpoint import open_checkpoint
from castore_pools.layout import CellFiles, survey
from castore_pools.output import encode_assembled, write_output
from castore_pools.places import Place, open_place
from castore_pools.pool import KeptCheckpoint

PROBLEMS = 3


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one pool file: ``status`` is written, there or refused."""

    source: str
    target: str
    status: str
    error: str = ""


def assemble_cell(
    place: Place, files: CellFiles, options: argparse.Namespace, pool: ThreadPoolExecutor
) -> Iterator[Done]:
    """All files of one cell; its base is opened and read once."""
    base_path = files.base or files.cell.base_path
    try:
        base = KeptCheckpoint(open_checkpoint(place.source(base_path)))
    except CastoreError as e:
        yield Done(base_path, "", "refused", str(e))
        return
    yield from pool.map(partial(assemble_file, place, base, options), files.pool.values())


def assemble_file(
    place: Place, base: KeptCheckpoint, options: argparse.Namespace, path: str
) -> Done:
    """Write one file; what refuses it is told, not raised."""
    name = path.removeprefix("ckpt/").removesuffix(".pth")
    target = f"{options.out.rstrip('/')}/{name}.{options.format}"
    try:
        if not options.force and _exists(target):
            return Done(path, target, "there")
        member = open_checkpoint(place.source(path))
        state = assemble(base, member, require_pin=options.require_pin)
        write_output(target, encode_assembled(state, member.fields, options.format))
        return Done(path, target, "written")
    except CastoreError as e:
        return Done(path, target, "refused", str(e))


def _exists(address: str) -> bool:
    try:
        open_source(address)
    except NotFoundError:
        return False
    return True


def main(words: Sequence[str] | None = None) -> int:
    """Assemble what is asked for; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("zoo")
    parser.add_argument("out")
    parser.add_argument("--cell", action="append", default=[], help="only this; may be repeated")
    parser.add_argument("--format", choices=("pth", "safetensors"), default="pth")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--require-pin", action="store_true")
    parser.add_argument("--force", action="store_true", help="write again what is there")
    parser.add_argument("--json", action="store_true", help="one JSON document a file")
    options = parser.parse_args(words)
    failed = False
    try:
        place = open_place(options.zoo)
        with ThreadPoolExecutor(options.jobs) as pool:
            for files in survey(place).cells:
                if options.cell and not {files.cell.name, str(files.cell)} & set(options.cell):
                    continue
                for done in assemble_cell(place, files, options, pool):
                    failed |= tell(done, options.json)
    except CastoreError as e:
        print(f"assemble_pool: {e}", file=sys.stderr)
        return e.exit_code
    return PROBLEMS if failed else 0


def tell(done: Done, as_json: bool) -> bool:
    """Say what became of one file; True where it was refused."""
    if as_json:
        print(json.dumps({"type": "assembled", **asdict(done)}), flush=True)
    elif done.error:
        print(f"{done.source}: {done.error}", file=sys.stderr)
    else:
        print(f"{done.target} ({done.status})", flush=True)
    return bool(done.error)


if __name__ == "__main__":
    sys.exit(main())
