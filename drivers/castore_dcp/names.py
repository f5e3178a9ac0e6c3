"""Names of the layout: checkpoint ids, keys, namespaces and paths. No torch, no I/O."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from castore import InvalidInputError
from castore.digest import digest_of
from castore.snapshot import check_namespace

DRIVER = "dcp"
METADATA = "dcp.json"
"""The path of the document that says what the checkpoint holds."""

_STEP = re.compile(r"(?:[A-Za-z]+[-_=.]?)?([0-9]{1,18})")
_KEY = re.compile(r"step\.[0-9]+|name\.[0-9a-f]{16}|checkpoint")
_PARTS = ".parts"
_LONGEST = 1024


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Which checkpoint of a namespace: its step, or its name; neither for "some checkpoint"."""

    step: int | None = None
    name: str | None = None

    @property
    def key(self) -> str:
        """The key of its snapshots, so that it is found by a listing alone."""
        if self.step is not None:
            return f"step.{self.step}"
        return "checkpoint" if self.name is None else f"name.{digest_of(self.name.encode())[:16]}"

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its snapshots."""
        if self.step is not None:
            return {"step": str(self.step)}
        return {} if self.name is None else {"checkpoint": self.name}

    def __str__(self) -> str:
        if self.step is not None:
            return f"step {self.step}"
        return "a checkpoint" if self.name is None else f"checkpoint {self.name!r}"


def parse_id(checkpoint_id: str | os.PathLike[str] | int) -> Checkpoint:
    """What a ``checkpoint_id=`` means: a step (``100``, ``step-100``, ``a/step_100``) or a name.

    A step is a last path element of digits, or of letters, at most one of ``- _ = .`` and digits.

    Raises
    ------
    InvalidInputError
        Empty, over 1024 characters, or text that cannot be a label.
    """
    text = str(checkpoint_id) if isinstance(checkpoint_id, int) else os.fspath(checkpoint_id)
    if not is_id(text):
        raise InvalidInputError(
            f"checkpoint id {text[:100]!r}: expected 1 to {_LONGEST} printable characters,"
            " for example 'step-100'"
        )
    found = _STEP.fullmatch(text.rstrip("/").rpartition("/")[2])
    return Checkpoint(step=int(found[1])) if found else Checkpoint(name=text)


def is_id(checkpoint_id: object) -> bool:
    """Whether `parse_id` takes it."""
    if isinstance(checkpoint_id, os.PathLike):
        checkpoint_id = os.fspath(checkpoint_id)
    return (
        isinstance(checkpoint_id, str)
        and 0 < len(checkpoint_id) <= _LONGEST
        and checkpoint_id.isprintable()
    )


def is_key(key: str) -> bool:
    """Whether a snapshot of this key is a checkpoint: `Checkpoint.key` of some id."""
    return _KEY.fullmatch(key) is not None


def at_step(step: int | None) -> Checkpoint:
    """The checkpoint of a step; `InvalidInputError` for a negative one."""
    if step is not None and (type(step) is not int or not 0 <= step < 10**18):
        raise InvalidInputError(f"step {step!r}: expected a whole number from 0")
    return Checkpoint(step=step)


def parts_of(namespace: str) -> str:
    """The namespace in which ranks keep their parts until the whole is committed."""
    return check_namespace(check_namespace(namespace) + _PARTS)


def shard_path(rank: int, number: int) -> str:
    """The path of a rank's ``number``-th file."""
    return f"rank_{rank:05d}/{number:03d}.safetensors"
