"""Names, registries and atomic files: what may stand in a path, and what a reader takes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from castore import InvalidInputError, LayoutError
from castore_pools import Cell
from castore_pools.files import folder_lock, write_bytes, write_file, write_json
from castore_pools.layout import survey
from castore_pools.names import (
    cell_of,
    check_base_path,
    collected_index,
    collected_name,
    is_base,
    split_root,
)
from castore_pools.places import FolderPlace, UrlPlace, open_place
from castore_pools.registry import parse_registry, put_record, read_record, read_registries
from tests.drivers.pools.models import cell

HOSTILE = [
    "../../x",
    "/etc/passwd",
    "a/../../b",
    "%2e%2e/",
    "..\\x",
    "C:x",
    "nul\0",
    "s3://other/x",
    "file://x",
    "a#b",
    "a?b",
    "a;b",
    "",
    ".",
    "..",
    "a..b",
    ".hidden",
    "-flag",
    "new\nline",
    "ends.",
    "x" * 129,
    "ünï",
    None,
    7,
]


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
@pytest.mark.parametrize("field", ["task", "arch", "dataset", "model_id"])
def test_ids_are_checked(field: str, value: Any) -> None:
    """SE2: an allow-list before any path is built; the field is named."""
    given: dict[str, Any] = {"task": "t", "arch": "a", "dataset": "d", "model_id": "m"}
    with pytest.raises(InvalidInputError, match=field):
        Cell(**{**given, field: value})


def test_ids_that_are_fine() -> None:
    for name in ("bertbase_010", "T5-small", "a", "v1.2+x=3", "0", "x" * 128):
        assert Cell("t", name, name, name).base_path == f"zoo/{name}/{name}/{name}.pth"
    with pytest.raises(InvalidInputError, match="__"):
        Cell("t", "a__b", "d", "m")
    assert Cell("t", "a", "d__e", "m").name == "a__d__e"


def test_paths_and_back() -> None:
    where = cell("bertbase")
    assert where.pool_path(7) == (
        "ckpt/text_classification/bertbase__agnews/bertbase_010/collect_007.pth"
    )
    assert cell_of(where.pool_path(7)) == cell_of(where.config_path) == where
    assert collected_index(where.pool_path(1234)) == 1234
    assert collected_name(1234) == "collect_1234.pth"
    for name in ("collect_7.pth", "collect_0007.pth", "collect_007.pt", "xcollect_007.pth"):
        assert collected_index(name) is None
    assert cell_of("ckpt/t/nounderscores/m/collect_000.pth") is None
    assert cell_of("ckpt/t/a__b/../collect_000.pth") is None
    assert cell_of("ckpt/t/a__b/m/deeper/collect_000.pth") is None
    assert not is_base("zoo/a/b/c.pt") and not is_base("zoo/a/../c.pth")
    assert split_root("/x/zoo/d/a/m.pth") == ("/x", "zoo/d/a/m.pth")
    assert split_root("s3://b/p/" + where.pool_path(0)) == ("s3://b/p", where.pool_path(0))
    assert split_root("zoo/d/a/m.pth") == (".", "zoo/d/a/m.pth")
    assert split_root("/zoo/d/a/m.pth") == ("/", "zoo/d/a/m.pth")
    assert split_root("/x/m.pth") is None


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_base_paths_are_checked(value: Any) -> None:
    with pytest.raises(LayoutError, match="ckpt_path"):
        check_base_path(value)


# -- registries


def test_records_that_contradict_themselves() -> None:
    path = cell("bertbase").base_path
    for more in (
        {"arch": "other"},
        {"dataset": "../x"},
        {"model_id": 3},
        {"cell": "other__agnews"},
    ):
        with pytest.raises((LayoutError, InvalidInputError), match=next(iter(more))):
            parse_registry(json.dumps([{"ckpt_path": path, **more}]).encode(), "t", "there")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"[" * 100_000, b"\xff"])
def test_registries_that_are_none(data: bytes) -> None:
    with pytest.raises(LayoutError, match="there"):
        parse_registry(data, "t", "there")


@pytest.mark.parametrize("data", [b"{}", b"[]", b"null", b'{"version": 3, "by": "x"}'])
def test_registries_without_records(data: bytes) -> None:
    assert parse_registry(data, "t", "there") == []


@pytest.mark.parametrize("form", ["list", "mapping", "records", "cells"])
def test_a_registrys_form_is_kept(tmp_path: Path, form: str) -> None:
    where, other = cell("bertbase"), cell("t5small")
    old = {"ckpt_path": other.base_path, "note": "kept"}
    documents: dict[str, Any] = {
        "list": [old],
        "mapping": {other.name: old},
        "records": {"version": 1, "records": [old]},
        "cells": {"version": 1, "cells": {other.name: old}},
    }
    path = tmp_path / where.registry_path
    write_json(path, documents[form])
    put_record(tmp_path, where, {"ckpt_path": where.base_path, "n": 1})
    put_record(tmp_path, where, {"ckpt_path": where.base_path, "n": 2})
    assert read_record(tmp_path, where) == {"ckpt_path": where.base_path, "n": 2}
    assert read_record(tmp_path, other) == old
    assert len(read_registries(FolderPlace(tmp_path))) == 2
    now = json.loads(path.read_text())
    assert type(now) is type(documents[form])
    assert form in ("list", "mapping") or now["version"] == 1


def test_two_models_of_one_cell(tmp_path: Path) -> None:
    one, two = cell("bertbase"), cell("bertbase", model_id="bertbase_011")
    for where in (one, two, one):
        put_record(tmp_path, where, {"ckpt_path": where.base_path, "cell": where.name})
    assert [r.cell for r in read_registries(FolderPlace(tmp_path))] == [one, two]


def test_many_writers_lose_no_record(tmp_path: Path) -> None:
    cells = [cell("bertbase", f"d{i}") for i in range(12)]

    def write(where: Cell) -> None:
        for n in range(5):
            put_record(tmp_path, where, {"ckpt_path": where.base_path, "n": n})

    threads = [threading.Thread(target=write, args=(c,)) for c in cells]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    found = read_registries(FolderPlace(tmp_path))
    assert sorted(r.cell for r in found) == sorted(cells)
    assert {r.body["n"] for r in found} == {4}


# -- files


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    write_bytes(path, b"old")

    def crash(file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(path, crash)
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    with pytest.raises(InvalidInputError, match="finite"):
        write_json(path, {"x": float("nan")})
    assert path.read_bytes() == b"old"


def test_locks_are_freed(tmp_path: Path) -> None:
    with (
        folder_lock(tmp_path),
        pytest.raises(InvalidInputError, match="busy"),
        folder_lock(tmp_path, "busy"),
    ):
        pass
    with folder_lock(tmp_path, "busy"):
        pass


# -- surveys


def test_a_survey(zoo: Path) -> None:
    found = survey(FolderPlace(zoo))
    assert [c.cell.arch for c in found.cells] == ["bertbase", "t5small", "wordavg"]
    for files in found.cells:
        assert list(files.pool) == [0, 1, 2, 3]
        assert files.base == files.cell.base_path
        assert [p.rpartition("/")[2] for p in files.configs] == [
            "collect_config.json",
            "config.json",
        ]
        assert files.record is not None and len(files.record.checkpoints) == 4
    assert (found.bases, found.rest) == ((), ())


def test_places_hold_the_same(zoo: Path, tmp_path: Path) -> None:
    local, url = open_place(zoo), open_place(f"file://{zoo}")
    assert isinstance(local, FolderPlace) and isinstance(url, UrlPlace)
    assert local.paths() == url.paths()
    assert (
        local.paths("metadata/registry")
        == url.paths("metadata/registry")
        == [cell("bertbase").registry_path]
    )
    assert local.paths("nothing/here") == url.paths("nothing/here") == []
    first = local.paths()[0]
    assert local.source(first).read(0, 10) == url.source(first).read(0, 10)


def test_links_are_not_followed(zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "zoo/d/a").mkdir(parents=True)
    (tmp_path / "zoo/d/a/m.pth").symlink_to(zoo / cell("bertbase").base_path)
    with pytest.raises(LayoutError):
        survey(FolderPlace(tmp_path))
