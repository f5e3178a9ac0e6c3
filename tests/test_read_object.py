"""The few lines in docs/ that read an object without this package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from castore import frame
from castore.commit import Options
from castore.digest import digest_of
from castore.objects import object_name
from castore.repository import Repository
from castore.tree import Tree
from tests.helpers import (
    blobs,
    draft,
    encode_delta,
    encode_packed,
    flip_object,
    headers,
    noise,
    series,
)

SCRIPT = Path(__file__).parent.parent / "docs" / "read_object.py"


def run(repository: Repository, digest: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), repository.url, digest], capture_output=True, check=False
    )


def test_it_is_short_and_needs_little() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 25
    nodes = list(ast.walk(ast.parse(text)))
    imported = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    imported |= {str(n.module) for n in nodes if isinstance(n, ast.ImportFrom)}
    assert imported == {"struct", "sys", "pathlib", "numpy", "blake3", "numcodecs"}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository.init(tmp_path / "store")


def test_it_reads_raw_packed_and_delta_objects_and_trees(repository: Repository) -> None:
    files = {**{f"m{i}": f for i, f in enumerate(series(4))}, "raw": noise(500)}
    commit = repository.commit(draft(files))
    found = headers(repository)
    seen = set()
    for path in files:
        for digest in blobs(repository, commit.name, path):
            out = run(repository, digest)
            assert out.returncode == 0, out.stderr
            assert out.stdout == bytes(repository.store.read(digest))
            seen.add((found[digest].codec, found[digest].depth))
    assert {(frame.RAW, 0), (frame.PACKED, 0), (frame.DELTA, 1), (frame.DELTA, 3)} <= seen
    tree = run(repository, commit.snapshot.tree).stdout
    assert Tree.decode(tree) == repository.tree(commit.name)


@pytest.mark.parametrize("width", frame.WIDTHS)
def test_it_undoes_differences_of_each_width(width: int, repository: Repository) -> None:
    rng = np.random.default_rng(width)
    ends = np.array([0, 1, (1 << 8 * width) - 1, 1 << 8 * width - 1], f"<u{width}")
    old, new = rng.choice(ends, 500).tobytes(), rng.choice(ends, 500).tobytes()
    delta = encode_delta(new, old, digest_of(old), 0, width)
    repository.store.create_many(
        [(digest_of(old), encode_packed(old, width)), (digest_of(new), delta)]
    )
    assert run(repository, digest_of(new)).stdout == new


@pytest.mark.parametrize("damage", ["payload", "header", "cut", "base", "gone"])
def test_it_gives_nothing_for_a_damaged_object(damage: str, repository: Repository) -> None:
    names = [
        repository.commit(draft({"m": f}), options=Options(max_chain=1)).name for f in series(2)
    ]
    base, digest = (blobs(repository, n, "m")[-1] for n in names)
    assert headers(repository)[digest].base == base
    path = Path(repository.url) / object_name(digest)
    if damage in ("payload", "header"):
        flip_object(repository, digest, 1000 if damage == "payload" else 20)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "base":
        flip_object(repository, base, -1)
    else:
        path.unlink()
    out = run(repository, digest)
    assert out.returncode != 0
    assert out.stdout == b""
