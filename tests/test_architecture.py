"""Imports go downward only, castore knows no driver, and importing it is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "castore"

# A module imports only from rows above its own.
LAYERS = [
    ["errors"],
    ["digest"],
    ["backend", "cache", "document", "state"],
    ["backends", "cutters", "frame", "snapshot", "tree"],
    ["bases", "cut", "encode", "objects", "source", "tensors"],
    ["hints", "parts", "pending", "publish", "ranges", "table", "write"],
    ["base_contents", "forget", "walk"],
    ["checkout", "commit", "load"],
    ["save"],
    ["repository"],
    ["driver", "needed", "reach", "workers"],
    ["look"],
    ["check", "copy", "filesystem", "prune", "usage"],
    ["repair", "zarr_view"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FREE = {"__init__", "testing"}  # the lazy front, and what tests import
DRIVERS = {"castore_dcp", "castore_experiments", "castore_receipts", "castore_pools"}
STORAGE = {"fsspec", "s3fs", "botocore", "aiobotocore", "boto3"}
HEAVY = {
    *("aiobotocore", "botocore", "duckdb", "fsspec", "numcodecs", "numpy", "pandas", "rich"),
    *("s3fs", "torch", "zarr"),
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    """The first name below ``castore``: a module, or a package taken as one."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Every absolute name that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def siblings(path: Path) -> set[str]:
    """The parts of castore that a file imports."""
    names = (name.split(".") for name in imported(path))
    return {n[1] for n in names if n[0] == "castore" and len(n) > 1 and n[1] in {*LEVEL, *FREE}}


def ids(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_module_has_its_layer() -> None:
    assert {part(p) for p in modules()} - FREE <= LEVEL.keys(), "add it to LAYERS"


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_imports_go_downward(path: Path) -> None:
    here = part(path)
    if here in FREE:
        return
    bad = {
        n for n in siblings(path) - {here} if n in FREE - {"__init__"} or LEVEL[n] >= LEVEL[here]
    }
    assert not bad, f"{here} may not import {bad}"


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_no_driver_is_imported(path: Path) -> None:
    assert not DRIVERS & {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", modules(), ids=ids)
def test_only_the_backends_know_storage_libraries(path: Path) -> None:
    allowed = {"backends": STORAGE, "testing": STORAGE, "filesystem": {"fsspec"}}
    used = STORAGE & {name.split(".")[0] for name in imported(path)}
    assert used <= allowed.get(part(path), set())


def driver_modules() -> list[Path]:
    return sorted((ROOT / "drivers").rglob("*.py"))


def of_driver(path: Path) -> str:
    return str(path.relative_to(ROOT / "drivers"))


PUBLIC = {
    *("backend", "backends", "cli", "digest", "document", "driver", "errors"),
    *("snapshot", "source", "tensors", "zarr_view", "workers"),
}


@pytest.mark.parametrize("path", driver_modules(), ids=of_driver)
def test_drivers_use_what_is_public(path: Path) -> None:
    """Names of ``castore`` itself and of the modules that are made for drivers; no other driver."""
    own = path.relative_to(ROOT / "drivers").parts[0]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] in DRIVERS:
            assert parts[0] == own, f"{path} imports another driver: {name}"
        if parts[0] == "castore":
            assert not any(p.startswith("_") and p != "__version__" for p in parts), name
            module = len(parts) > 2 and (PACKAGE / f"{parts[1]}.py").exists()
            assert not module or parts[1] in PUBLIC, f"{path}: {name} is not made for drivers"


HELP = ["import castore", "import castore.cli"]
HELP += [f"import {d}" for d in sorted(DRIVERS)] + [f"import {d}.cli" for d in sorted(DRIVERS)]


@pytest.mark.parametrize("statement", HELP)
def test_importing_is_cheap(statement: str) -> None:
    code = f"import sys; {statement}; print(*{{n.split('.')[0] for n in sys.modules}})"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not HEAVY & set(shown.stdout.split())


@pytest.mark.parametrize("path", modules(), ids=str)
def test_no_queue_that_may_sleep_past_its_timeout(path: Path) -> None:
    """`SimpleQueue.get` of CPython 3.11 does, for ever, when others take items: a commit hung."""
    names = [n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
    assert "SimpleQueue" not in names


def test_every_public_name_resolves() -> None:
    code = "import castore; [getattr(castore, n) for n in castore.__all__]; from castore import *"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
