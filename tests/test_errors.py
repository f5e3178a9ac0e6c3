"""The tree of errors is part of the interface: pinned, picklable, with documented exit codes."""

from __future__ import annotations

import pickle

import pytest

import castore
from castore import errors

TREE = {
    "CastoreError": (["Exception"], 1),
    "NotFoundError": (["CastoreError", "LookupError"], 1),
    "ObjectNotFoundError": (["NotFoundError"], 1),
    "SnapshotNotFoundError": (["NotFoundError"], 1),
    "RepositoryNotFoundError": (["NotFoundError"], 10),
    "AlreadyExistsError": (["CastoreError", "FileExistsError"], 1),
    "IntegrityError": (["CastoreError"], 11),
    "CorruptObjectError": (["IntegrityError"], 11),
    "ReceiptMismatchError": (["IntegrityError"], 11),
    "FormatError": (["CastoreError", "ValueError"], 1),
    "LayoutError": (["CastoreError", "ValueError"], 1),
    "InvalidInputError": (["CastoreError", "ValueError"], 1),
    "UntrustedPickleError": (["CastoreError"], 12),
    "BackendError": (["CastoreError", "OSError"], 13),
}


def classes() -> dict[str, type[errors.CastoreError]]:
    found = {n: c for n, c in vars(errors).items() if isinstance(c, type) and not n.startswith("_")}
    return {n: c for n, c in found.items() if issubclass(c, errors.CastoreError)}


def test_the_tree_is_the_pinned_one() -> None:
    tree = {n: ([b.__name__ for b in c.__bases__], c.exit_code) for n, c in classes().items()}
    assert tree == TREE


def test_all_are_public() -> None:
    assert {n for n in castore.__all__ if n.endswith("Error")} == set(TREE)


def test_an_exit_code_of_its_own_belongs_to_one_branch() -> None:
    owners: dict[int, list[str]] = {}
    for name, cls in classes().items():
        if "exit_code" in vars(cls):
            owners.setdefault(cls.exit_code, []).append(name)
    assert all(len(names) == 1 for names in owners.values()), owners
    assert not set(owners) & {0, 2, 3, 130}


@pytest.mark.parametrize("name", TREE)
def test_pickling_keeps_class_and_message(name: str) -> None:
    error = classes()[name]("what happened")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "what happened"


def test_pickling_a_corrupt_object_error_keeps_its_facts() -> None:
    error = errors.CorruptObjectError("bad", name="ab", expected="cd", actual="ef")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.name, again.expected, again.actual) == ("bad", "ab", "cd", "ef")
