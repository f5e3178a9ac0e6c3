"""Trees: names that every file system can hold, one spelling, nothing odd comes in."""

from __future__ import annotations

import json
import tracemalloc
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from castore import document
from castore.errors import FormatError, InvalidInputError
from castore.tree import (
    MAX_ELEMENT,
    MAX_PATH,
    Entry,
    File,
    Folder,
    Link,
    Slice,
    Tree,
    build_tree,
    check_path,
    check_target,
)

A, B = "a" * 64, "b" * 64
FILE = File(10, "1" * 64, True, (Slice(A, 0, 4), Slice(B, 2, 3), Slice(A, 4, 3)))
EMPTY = File(0, "e" * 64)

ELEMENT = some.text(
    some.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\"),
    min_size=1,
    max_size=8,
).filter(lambda t: t not in (".", ".."))
PATH = some.lists(ELEMENT, min_size=1, max_size=3).map("/".join)
SLICES = some.lists(
    some.builds(
        Slice, some.sampled_from([A, B, "c" * 64]), some.integers(0, 99), some.integers(1, 99)
    ),
    max_size=4,
)
FILES = some.builds(
    lambda slices, executable: File(
        sum(s.length for s in slices), "2" * 64, executable, tuple(slices)
    ),
    SLICES,
    some.booleans(),
)
ENTRY = FILES | some.builds(Link, PATH) | some.just(Folder())


@given(some.dictionaries(PATH, ENTRY, max_size=6))
def test_whatever_is_built_comes_back(entries: dict[str, Entry]) -> None:
    try:
        tree = build_tree(entries)
    except InvalidInputError:
        return
    assert list(tree.entries) == sorted(entries)
    assert dict(tree.entries) == entries
    data = tree.encode()
    assert Tree.decode(data) == tree
    assert Tree.decode(data).encode() == data


def test_the_spelling() -> None:
    tree = build_tree({"z": Link("../x"), "b/f": FILE, "b/e": Folder(), "ä": EMPTY})
    zeros = f'"{"1" * 64}"'
    assert tree.encode().decode() == (
        '{"entries":{"b/e":{"type":"folder"},"b/f":{"blobs":["' + A + '","' + B + '"],'
        '"executable":true,"sha256":' + zeros + ',"size":10,"slices":[[0,0,4],[1,2,3],[0,4,3]],'
        '"type":"file"},"z":{"target":"../x","type":"link"},"ä":{"blobs":[],"executable":false,'
        '"sha256":"'
        + "e" * 64
        + '","size":0,"slices":[],"type":"file"}},"format":1,"kind":"tree"}\n'
    )


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "..",
        "../x",
        "a/../../b",
        "a/..",
        ".",
        "a/./b",
        "a//b",
        "a/",
        "/",
        "a\0b",
        "a\nb",
        "a\x1b[31m",
        "a\x7f",
        "a\x85b",
        "..\\x",
        "C:\\x",
        "\udc80",
        "x" * (MAX_ELEMENT + 1),
        "ü" * (MAX_ELEMENT // 2 + 1),
        "/".join(["x" * 200] * (MAX_PATH // 200 + 1)),
    ],
)
def test_se2_a_path_that_could_leave_its_folder_or_break_a_terminal_is_refused(path: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot be stored"):
        check_path(path)
    with pytest.raises(InvalidInputError):
        build_tree({path: FILE})
    data = document.encode("tree", {"entries": {"p": _packed(FILE)}})
    try:
        spelled = json.dumps(path, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        spelled = json.dumps(path).encode()
    with pytest.raises(FormatError):
        Tree.decode(data.replace(b'"p":', spelled + b":"))


@pytest.mark.parametrize(
    "path",
    [
        "a",
        "...",
        "..x",
        ".hidden",
        "a b",
        " a",
        "%2e%2e/x",
        "a#?;*[1]",
        "C:x",
        "CON",
        "nul.txt",
        "ü/ß",
        "x" * 255,
        "\u202e",
    ],
)
def test_a_path_that_only_looks_odd_is_kept(path: str) -> None:
    assert check_path(path) == path
    assert list(Tree.decode(build_tree({path: FILE}).encode()).entries) == [path]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("readme", "README"),
        ("a/x", "A/y"),
        ("é", "e\u0301"),
        ("é/x", "e\u0301/y"),
        ("STRASSE", "straße"),
        ("Σ", "ς"),
        ("a", "a/b"),
        ("a/b", "a/b/c/d"),
        ("A", "a/b"),
    ],
)
def test_names_that_some_file_system_takes_for_one_are_refused(one: str, other: str) -> None:
    for pair in ((one, other), (other, one)):
        with pytest.raises(InvalidInputError):
            build_tree(dict.fromkeys(pair, FILE))
        raw = document.encode("tree", {"entries": dict.fromkeys(pair, _packed(FILE))})
        with pytest.raises(FormatError):
            Tree.decode(raw)


def test_a_folder_entry_is_only_for_empty_folders() -> None:
    with pytest.raises(InvalidInputError, match="both an entry and the folder"):
        build_tree({"a": Folder(), "a/b": FILE})


def _packed(file: File) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(Tree({"p": file}).encode())
    packed: dict[str, Any] = tree["entries"]["p"]
    return packed


@pytest.mark.parametrize(
    "change",
    [
        {"size": 11},
        {"size": -1},
        {"size": 10.0},
        {"size": True},
        {"size": "10"},
        {"sha256": "1" * 63},
        {"sha256": "G" * 64},
        {"sha256": None},
        {"executable": 1},
        {"executable": None},
        {"blobs": [A]},
        {"blobs": [A, B, "c" * 64]},
        {"blobs": [A.upper(), B]},
        {"blobs": ["../../etc", B]},
        {"blobs": None},
        {"slices": [[0, 0, 4], [1, 2, 3]]},
        {"slices": [[0, 0, 4], [1, 2, 3], [0, 4, 0], [0, 4, 3]]},
        {"slices": [[0, 0, 4], [1, 2, 3], [-2, 4, 3]]},
        {"slices": [[0, 0, 4], [1, -2, 3], [0, 4, 3]]},
        {"slices": [[0, 0, 4], [2, 2, 3], [0, 4, 3]]},
        {"slices": [[0, 0], [1, 2, 3], [0, 4, 3]]},
        {"slices": {"0": 1}},
        {"slices": [[0, 0, 1 << 63]], "size": 1 << 63},
        {"type": "device"},
        {"type": ["file"]},
        {"type": "folder"},
        {"type": "link"},
        {"owner": 0},
    ],
)
def test_a_file_that_does_not_add_up_is_refused(change: dict[str, Any]) -> None:
    good = _packed(FILE)
    assert Tree.decode(document.encode("tree", {"entries": {"p": good}})).entries["p"] == FILE
    with pytest.raises(FormatError):
        Tree.decode(document.encode("tree", {"entries": {"p": good | change}}))


@pytest.mark.parametrize(
    "entries", [[], None, 3, "x", {"p": None}, {"p": []}, {"p": {}}, {"p": "file"}]
)
def test_junk_for_entries_is_refused(entries: Any) -> None:
    with pytest.raises(FormatError):
        Tree.decode(document.encode("tree", {"entries": entries}))


@pytest.mark.parametrize("target", ["", "a\0b", "x" * (MAX_PATH + 1), "\udc80", 3, None])
def test_a_target_that_no_link_can_have_is_refused(target: Any) -> None:
    with pytest.raises(FormatError):
        check_target(target, "here")


@pytest.mark.parametrize("target", ["x", "../../etc/passwd", "/", "a\nb", "ü"])
def test_a_link_keeps_any_other_text(target: str) -> None:
    tree = build_tree({"l": Link(target)})
    assert Tree.decode(tree.encode()) == tree


def test_a_newer_tree_is_refused_by_name() -> None:
    data = build_tree({"p": FILE}).encode().replace(b'"format":1', b'"format":2')
    with pytest.raises(FormatError, match="tree xyz: format 2 of 'tree'.*upgrade castore"):
        Tree.decode(data, "tree xyz")


def test_below_gives_a_folder_or_one_entry() -> None:
    tree = build_tree({"a/b": FILE, "a/c/d": EMPTY, "ab": EMPTY, "l": Link("a")})
    assert tree.below("a") == Tree({"b": FILE, "c/d": EMPTY})
    assert tree.below("a/c/d") == Tree({"d": EMPTY})
    assert tree.below("l") == Tree({"l": Link("a")})
    assert not tree.below("x").entries
    assert tree.blobs() == [A, B]
    assert tree.size == 10


def test_a_long_path_costs_no_more_than_its_length() -> None:
    """Each folder on the way was remembered under its whole path: a hundred times the input."""
    deep = "/".join(["d"] * 300)
    data = document.encode(
        "tree", {"entries": {f"{chr(0x4E00 + i)}/{deep}": {"type": "folder"} for i in range(350)}}
    )
    tracemalloc.start()
    try:
        assert len(Tree.decode(data).entries) == 350
        assert tracemalloc.get_traced_memory()[1] < 20 * len(data)
    finally:
        tracemalloc.stop()


_ELEMENTS = some.text("aAéE\u0301ßsΣς!.-K\u212a", min_size=1, max_size=2)


@given(some.lists(some.lists(_ELEMENTS, min_size=1, max_size=3).map("/".join), max_size=4))
@settings(max_examples=300, deadline=None)
def test_one_name_is_told_as_by_comparing_each_with_each(paths: list[str]) -> None:
    """The rule, spelled out: no two folders or entries of one folded name, no entry a folder."""
    names = dict.fromkeys(p for p in paths if not {"", ".", ".."} & {*p.split("/")})
    spelled: dict[str, set[str]] = {}
    for path in names:
        for i in range(1, path.count("/") + 2):
            here = "/".join(path.split("/")[:i])
            fold = unicodedata.normalize("NFC", unicodedata.normalize("NFC", here).casefold())
            spelled.setdefault(fold, set()).add(here)
    clash = any(len(s) > 1 for s in spelled.values())
    below = any(other.startswith(path + "/") for path in names for other in names)
    if clash or below:
        with pytest.raises(InvalidInputError):
            build_tree(dict.fromkeys(names, EMPTY))
    else:
        assert list(build_tree(dict.fromkeys(names, EMPTY)).entries) == sorted(names)
