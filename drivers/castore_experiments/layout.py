"""Names of the experiments layout, and the parts they are made of. Pure; no I/O.

Paths of documents are relative to ``checkpoints/``, as in the trees of snapshots; those in capitals
to the root. Every part is checked by an allow-list before a path is built from it, and what `parse`
does not know is nobody's document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from castore import InvalidInputError

CHECKPOINTS = "checkpoints"
MANIFEST = "checkpoints/manifest.yaml"
CURVES = "checkpoints/loggers/loggers.duckdb"
OWN = ".castore"
ROOT = ".castore/root.json"
PENDING = ".castore/pending.json"
FOREIGN_STATE = ".checkpoint_manager_state.json"

NO_SEGMENT = "00000000"
"""The label of a component that there is none of."""

MAX_STEP = 2**63 - 1

Component: TypeAlias = Literal["hp", "model", "data"]
COMPONENTS: tuple[Component, ...] = get_args(Component)

Kind: TypeAlias = Literal[
    "weights",
    "architecture",
    "architecture_ref",
    "architecture_text",
    "config",
    "data_json",
    "data_parquet",
    "data_rows",
]
"""What a document is; ``data_rows`` is the JSON that stands in for a parquet file."""

_COMPONENT_OF: dict[str, Component] = {"HP": "hp", "models": "model", "data": "data"}
_LABEL = re.compile(r"[0-9a-f]{8}")
_HASH = re.compile(r"[0-9a-f]{24}")
_WEIGHTS = re.compile(r"([0-9a-f]{24}|[0-9a-f]{8})_step_([0-9]{1,19})\.pt")
_SUFFIXES: dict[str, dict[str, Kind]] = {
    "HP": {"_config.yaml": "config"},
    "data": {
        "_data_snapshot.json": "data_json",
        "_data_snapshot.parquet": "data_parquet",
        "_data_snapshot.data.json": "data_rows",
    },
    "models": {
        "_architecture.pkl": "architecture",
        "_architecture_ref.json": "architecture_ref",
        "_architecture.txt": "architecture_text",
    },
}


class Segments(NamedTuple):
    """The three labels of an experiment hash."""

    hp: str
    model: str
    data: str


@dataclass(frozen=True, slots=True)
class Document:
    """What a path says: its kind, its segment's label, and for weights their hash and step.

    ``hash`` is None for weights that carry only their model's label.
    """

    kind: Kind
    label: str
    hash: str | None = None
    step: int | None = None


def check_label(text: object, what: str = "label") -> str:
    """``text`` if it is 8 lower-case hexadecimal characters, else `InvalidInputError`."""
    if isinstance(text, str) and _LABEL.fullmatch(text):
        return text
    raise InvalidInputError(f"{what} {text!r}: expected 8 characters of 0-9 and a-f")


def check_hash(text: object, what: str = "experiment hash") -> str:
    """``text`` if it is 24 lower-case hexadecimal characters, else `InvalidInputError`."""
    if isinstance(text, str) and _HASH.fullmatch(text):
        return text
    raise InvalidInputError(f"{what} {text!r}: expected 24 characters of 0-9 and a-f")


def is_label(text: object) -> bool:
    """Whether ``text`` is spelled like a label."""
    return isinstance(text, str) and _LABEL.fullmatch(text) is not None


def is_hash(text: object) -> bool:
    """Whether ``text`` is spelled like an experiment hash."""
    return isinstance(text, str) and _HASH.fullmatch(text) is not None


def split(hash: str) -> Segments:
    """The labels of an experiment hash; `InvalidInputError` if it is none."""
    check_hash(hash)
    return Segments(hash[:8], hash[8:16], hash[16:])


def join(hp: str, model: str, data: str) -> str:
    """The experiment hash of three labels; `InvalidInputError` if one is none."""
    labels = (check_label(hp, "HP"), check_label(model, "MODEL"), check_label(data, "DATA"))
    return "".join(labels)


# -- names


def weights_name(hash: str, step: int) -> str:
    """``<HASH24>_step_<%06d>.pt``; `InvalidInputError` for a step below 0 or above `MAX_STEP`."""
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise InvalidInputError(f"step {step!r}: expected a whole number from 0 to {MAX_STEP}")
    return f"{check_hash(hash)}_step_{step:06d}.pt"


def weights_path(hash: str, step: int) -> str:
    """``models/<MODEL>/<HASH24>_step_<%06d>.pt``."""
    return f"models/{split(hash).model}/{weights_name(hash, step)}"


def config_path(hp: str) -> str:
    """``HP/<HP>/<HP>_config.yaml``."""
    return _path("HP", hp, "_config.yaml")


def data_json_path(data: str) -> str:
    """``data/<DATA>/<DATA>_data_snapshot.json``."""
    return _path("data", data, "_data_snapshot.json")


def data_parquet_path(data: str) -> str:
    """``data/<DATA>/<DATA>_data_snapshot.parquet``."""
    return _path("data", data, "_data_snapshot.parquet")


def data_rows_path(data: str) -> str:
    """``data/<DATA>/<DATA>_data_snapshot.data.json``: rows where parquet could not be written."""
    return _path("data", data, "_data_snapshot.data.json")


def architecture_path(model: str) -> str:
    """``models/<MODEL>/<MODEL>_architecture.pkl``."""
    return _path("models", model, "_architecture.pkl")


def architecture_ref_path(model: str) -> str:
    """``models/<MODEL>/<MODEL>_architecture_ref.json``."""
    return _path("models", model, "_architecture_ref.json")


def component_of(path: str) -> Component | None:
    """Whose folder a path below ``checkpoints/`` lies in; None for any other folder."""
    return _COMPONENT_OF.get(path.partition("/")[0])


def in_root(path: str) -> str:
    """A document's path relative to the root."""
    return f"{CHECKPOINTS}/{path}"


def _path(folder: str, label: str, suffix: str) -> str:
    return f"{folder}/{check_label(label)}/{label}{suffix}"


# -- what a name says


def parse_weights(name: str) -> tuple[str, int] | None:
    """The hash (or, in older roots, the model's label) and the step that a file name carries."""
    match = _WEIGHTS.fullmatch(name)
    if match is None or int(match[2]) > MAX_STEP:
        return None
    return match[1], int(match[2])


def parse(path: str) -> Document | None:
    """What a path below ``checkpoints/`` is, or None for anything that is no document.

    The label in the folder, that in the name, and the model segment in a weight file's hash must
    agree. Steps may have any number of digits; `weights_path` gives the one spelling we write.
    """
    parts = path.split("/")
    if len(parts) != 3 or not is_label(parts[1]):
        return None
    folder, label, name = parts
    for suffix, kind in _SUFFIXES.get(folder, {}).items():
        if name == label + suffix:
            return Document(kind, label)
    weights = parse_weights(name) if folder == "models" else None
    if weights is None:
        return None
    owner, step = weights
    whole = owner if len(owner) == 24 else None
    return Document("weights", label, whole, step) if label in (owner, owner[8:16]) else None
