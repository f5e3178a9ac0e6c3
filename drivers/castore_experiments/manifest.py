"""``manifest.yaml``: the chronology of a root's hashes, derived from snapshots. Pure; no I/O.

It is the document of the layout, with its keys and times as local ISO-8601 text; what castore adds
stands under the key ``castore``, of the whole and of each entry. Keys of others are kept. Ids are
always quoted. What is written here is YAML 1.1 and 1.2 alike, one entry a block, one value a line,
and each value JSON: so our own files are read line by line, all others event by event
(`castore_experiments.yaml_subset`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from castore import FormatError, InvalidInputError
from castore_experiments import yaml_subset
from castore_experiments.layout import COMPONENTS, is_hash, is_label, parse_weights, split

FORMAT = 1
"""Of what castore adds; the key ``format`` under ``castore``."""

_HEAD = "experiments:\n"
_KEYS = {
    *("hp_hash", "model_hash", "data_hash", "created", "last_used", "latest_weight_checkpoint"),
    *("latest_weight_step", "experiment_name", "notes", "castore"),
}
_NO_JSON = re.compile("\\\\(?:/|u[dD][89a-fA-F])|[\r\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*": ')  # a key in JSON's spelling
_PLAIN = re.compile(r'"[^"\\]*"|[0-9]{1,18}|null')  # a value that can only be one
_LONGEST = 1000  # characters of any other: longer keys and numbers are none to YAML
_BARE = re.compile("[0-9a-z]*")
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Entries by hash in the order of their creation, and the other keys of the document.

    ``entries[hash]`` has the documented keys as far as they are there: ``hp_hash model_hash
    data_hash created last_used latest_weight_checkpoint latest_weight_step experiment_name notes``,
    ours under ``castore``, and foreign ones. ``rest`` holds foreign keys of the whole.
    """

    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    latest_hash: str | None = None
    last_updated: str | None = None
    castore: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)
    _texts: dict[str, str] = field(init=False, compare=False, repr=False, default_factory=dict)
    """Entries as they were rendered before: most stay the same from one write to the next."""


@dataclass(frozen=True, slots=True)
class Change:
    """What one write adds to a manifest; see `merge`.

    Parameters
    ----------
    entries : mapping
        Keys to set, by hash. ``castore`` is merged key by key; ``created`` of an entry that is
        there already stays; ``last_used`` never goes back.
    latest_hash, last_updated : str, optional
        Set, the former unless the manifest has one of a later ``time``.
    time : int
        Microseconds by the store's order (`SnapshotName.time`) of what made ``latest_hash``, and
        of the weights that the entries name: of two writers the later save decides, in whichever
        order they come to the manifest. 0: unknown, applies.
    drop : tuple of str
        Hashes whose entries go.
    castore : mapping
        Keys to set under ``castore`` of the whole. ``format`` and ``time`` are not for callers,
        nor is ``time`` of an entry.
    """

    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    latest_hash: str | None = None
    last_updated: str | None = None
    time: int = 0
    drop: tuple[str, ...] = ()
    castore: Mapping[str, Any] = field(default_factory=dict)


def entry_of(
    hash: str,
    *,
    created: str,
    last_used: str,
    experiment_name: str | None = None,
    notes: str = "",
    weights: str | None = None,
    step: int | None = None,
    castore: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The documented entry of a hash, its keys in the documented order."""
    hp, model, data = split(hash)
    entry: dict[str, Any] = {
        "hp_hash": hp,
        "model_hash": model,
        "data_hash": data,
        "created": created,
        "last_used": last_used,
        "latest_weight_checkpoint": weights,
        "latest_weight_step": step,
        "experiment_name": experiment_name,
        "notes": notes,
    }
    return {**entry, "castore": dict(castore)} if castore else entry


# -- reading


def parse(data: bytes, where: str) -> Manifest:
    """The manifest in ``data``.

    Raises
    ------
    FormatError
        Not YAML, truncated, an id that is no quoted hexadecimal text of its length, a weight file's
        name that is none, foreign tags, aliases, a key twice, too deep or too large, or of a newer
        format. The message names place and line.
    """
    document = _own(data)
    if document is None:
        document = yaml_subset.load(data, where)
    if not isinstance(document, dict) or not isinstance(document.get("experiments"), dict):
        raise FormatError(f"{where}: not a manifest: expected the key 'experiments' with a mapping")
    for hash, entry in document["experiments"].items():
        if problem := _wrong_entry(hash, entry):
            raise FormatError(f"{where}: {problem}")
    return _checked(document, where)


def _checked(document: dict[Any, Any], where: str) -> Manifest:
    entries = document.pop("experiments")
    if entries and not document.keys() >= {"latest_hash", "last_updated"}:
        raise FormatError(f"{where}: latest_hash or last_updated is missing: cut off?")
    latest, updated = document.pop("latest_hash", None), document.pop("last_updated", None)
    castore = document.pop("castore", {})
    if problem := _wrong_whole(latest, updated, castore):
        raise FormatError(f"{where}: {problem}")
    return Manifest(entries, latest, updated, castore, document)


def _wrong_whole(latest: object, updated: object, castore: object) -> str:
    """What is wrong beside the entries, or nothing."""
    if latest is not None and not is_hash(latest):
        return f"latest_hash: {latest!r} is no quoted text of 24 hex digits"
    if not isinstance(updated, str | None):
        return f"last_updated: {updated!r} is no text"
    if not isinstance(castore, Mapping):
        return f"castore: {castore!r} is no mapping"
    version = castore.get("format", FORMAT)
    if version != FORMAT or type(version) is not int:
        return f"format {version!r}, this castore reads {FORMAT}: upgrade castore"
    if type(castore.get("time", 0)) is not int:
        return f"castore.time: {castore['time']!r} is no whole number"
    return ""


def _wrong_entry(hash: object, entry: object) -> str:
    """What is wrong with an entry, or nothing."""
    if not is_hash(hash):
        return f"experiments: the id {hash!r} is no quoted text of 24 hex digits"
    if not isinstance(entry, Mapping):
        return f"experiments.{hash}: {entry!r} is no mapping"
    for component in COMPONENTS:
        name = f"{component}_hash"
        if name in entry and not is_label(entry[name]):
            return f"experiments.{hash}.{name}: {entry[name]!r} is no quoted text of 8 hex digits"
    for name in ("created", "last_used"):
        if not isinstance(entry.get(name), str | None):
            return f"experiments.{hash}.{name}: {entry[name]!r} is no text"
    for name in ("experiment_name", "notes"):
        if not isinstance(entry.get(name), _SCALARS):
            return f"experiments.{hash}.{name}: {entry[name]!r} is no text"
    return _wrong_weights(hash, entry)


def _wrong_weights(hash: object, entry: Mapping[str, Any]) -> str:
    name, step = entry.get("latest_weight_checkpoint"), entry.get("latest_weight_step")
    if name is not None and (not isinstance(name, str) or parse_weights(name) is None):
        return f"experiments.{hash}.latest_weight_checkpoint: {name!r} is no weight file's name"
    if step is not None and (type(step) is not int or step < 0):
        return f"experiments.{hash}.latest_weight_step: {step!r} is no step"
    ours = entry.get("castore", {})
    if not isinstance(ours, Mapping) or type(ours.get("time", 0)) is not int:
        return f"experiments.{hash}.castore: {ours!r} is not what castore writes"
    return ""


def _own(data: bytes) -> dict[Any, Any] | None:
    """The document of a manifest that `render` spelled, or None: it must be read as YAML.

    A line is a key and a JSON value; what JSON and YAML read differently is left to YAML.
    """
    try:
        text = data.decode()
        if not text.startswith(_HEAD) or not text.endswith("\n") or _NO_JSON.search(text):
            return None
        body, entries = text[len(_HEAD) :], {}
        if body[:1] != " ":
            return None  # no entries: YAML reads none as null, which is no manifest
        end = next(m.end() for m in re.finditer(r"\n(?! )", body))
        for block in body[:end].removesuffix("\n").split('\n  "'):
            hash, _, lines = block.removeprefix('  "').partition('":\n')
            entries[hash] = _lines(lines, "    ")
        if len(entries) != body[:end].count('":\n') or not all(map(_BARE.fullmatch, entries)):
            return None
        whole = _lines(body[end:].removesuffix("\n"), "")
        return None if "experiments" in whole else {"experiments": entries, **whole}
    except (ValueError, RecursionError, StopIteration):
        return None


def _lines(text: str, indent: str) -> dict[str, Any]:
    """Keys and values of some lines; ValueError for anything `render` would not write."""
    pairs = []
    for line in text.split("\n"):
        if not line.startswith(indent):
            raise ValueError(line)
        pair = line.removeprefix(indent)
        if quoted := _QUOTED.match(pair):
            key, value = quoted[0][:-2], pair[quoted.end() :]
        else:
            key, _, value = pair.partition(": ")
            if key not in _KEYS and (key[:1] == '"' or yaml_subset.write_key(key) != key):
                raise ValueError(key)
            key = f'"{key}"'
        if not _PLAIN.fullmatch(value) or len(key) > _LONGEST:
            _check_alone(key, value)
        pairs.append(f"{key}:{value}")
    found: dict[str, Any] = _JSON.decode("{" + ",".join(pairs) + "}")
    if len(found) != len(pairs):
        raise ValueError("a value is more than one")
    return found


def _check_alone(key: str, value: str) -> None:
    """ValueError unless a value ends on its line, within the bounds of YAML's reading."""
    deep = value.count("[") + value.count("{") >= yaml_subset.MAX_DEPTH - 2
    text = isinstance(_JSON.decode(value), str)
    if len(key) > _LONGEST or (not text and (deep or len(value) > _LONGEST)):
        raise ValueError(key)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _pointed(text: str) -> float:
    """A JSON number that YAML reads as one, too."""
    if "." not in text or ("e" in text.lower() and not re.search("[eE][+-]", text)):
        raise ValueError(text)
    return float(text)


def _never(text: str) -> None:
    raise ValueError(text)


_JSON = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_pointed, parse_constant=_never, strict=True
)


# -- writing


def render(manifest: Manifest) -> bytes:
    """Its text: equal manifests give equal bytes; `InvalidInputError` for what `parse` refuses."""
    if problem := _wrong_whole(manifest.latest_hash, manifest.last_updated, manifest.castore):
        raise InvalidInputError(f"manifest: {problem}")
    rest = {k: v for k, v in manifest.rest.items() if k not in _WHOLE}
    whole = {
        "latest_hash": manifest.latest_hash,
        "last_updated": manifest.last_updated,
        "castore": {**manifest.castore, "format": FORMAT},
        **rest,
    }
    blocks = [_block(manifest, h) for h in manifest.entries]
    head = [_HEAD, *blocks] if blocks else ["experiments: {}\n"]
    return "".join([*head, *(_line(k, v, "") for k, v in whole.items())]).encode()


_WHOLE = ("experiments", "latest_hash", "last_updated", "castore")


def _block(manifest: Manifest, hash: str) -> str:
    text = manifest._texts.get(hash)
    if text is None:
        entry = manifest.entries[hash]
        if problem := _wrong_entry(hash, entry):
            raise InvalidInputError(f"manifest: {problem}")
        text = f'  "{hash}":\n' + "".join(_line(k, v, "    ") for k, v in entry.items())
        if not entry:
            text = f'  "{hash}": {{}}\n'
        manifest._texts[hash] = text
    return text


def _line(key: Any, value: Any, indent: str) -> str:
    return f"{indent}{yaml_subset.write_key(key)}: {yaml_subset.write(value)}\n"


# -- changing


def merge(manifest: Manifest, change: Change) -> Manifest:
    """``manifest`` with ``change``; merging twice, or in another order, gives the same latest."""
    entries = {h: e for h, e in manifest.entries.items() if h not in change.drop}
    for hash, update in change.entries.items():
        entries[hash] = _merged(entries.get(hash, {}), update, change.time)
    castore = {"format": FORMAT, **manifest.castore, **change.castore}
    latest = manifest.latest_hash if manifest.latest_hash not in change.drop else None
    if change.latest_hash is not None and not 0 < change.time < castore.get("time", 0):
        latest = change.latest_hash
        castore["time"] = max(change.time, castore.get("time", 0))
    updated = later(manifest.last_updated, change.last_updated)
    merged = Manifest(entries, latest, updated, castore, manifest.rest)
    touched = {*change.entries, *change.drop}
    merged._texts.update((h, t) for h, t in dict(manifest._texts).items() if h not in touched)
    return merged


def _merged(entry: Mapping[str, Any], update: Mapping[str, Any], time: int) -> dict[str, Any]:
    new = {**entry, **update}
    ours = {**entry.get("castore", {}), **update.get("castore", {})}
    if entry.get("created") is not None:
        new["created"] = entry["created"]
    if "last_used" in new:
        new["last_used"] = later(entry.get("last_used"), update.get("last_used"))
    if update.get("latest_weight_checkpoint") is not None:
        if 0 < time < ours.get("time", 0):
            new.update((k, entry.get(k)) for k in update if k.startswith("latest_weight_"))
        elif time:
            ours["time"] = time
    return {**new, "castore": ours} if ours else new


def later(a: str | None, b: str | None) -> str | None:
    """The later of two times; ``b`` where that cannot be told, ``a`` where there is no ``b``."""
    if b is None:
        return a
    old, new = parse_time(a), parse_time(b)
    return a if old is not None and new is not None and old > new else b


# -- times


def last_use(manifest: Manifest) -> float:
    """When it was last updated, seconds since the epoch; a weight save counts. 0.0: never."""
    stated = [manifest.last_updated]
    for entry in manifest.entries.values():
        stated += entry.get("last_used"), entry.get("created")
    return max([t for t in map(parse_time, set(stated)) if t is not None], default=0.0)


def stamp(now: float) -> str:
    """Local ISO-8601 text without a zone, as the layout has it, of seconds since the epoch."""
    local = datetime.fromtimestamp(now, UTC).astimezone().replace(tzinfo=None)
    return local.isoformat(timespec="microseconds")


def parse_time(value: object) -> float | None:
    """Seconds since the epoch of a time as people and programs write them, or None.

    ISO-8601 with or without zone (without: local), with ``T`` or a space, a date alone; or a number
    of seconds.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    if not isinstance(value, str):
        return None
    try:
        return datetime.fromisoformat(re.sub(r"\s+(?=[+-]\d\d)", "", value.strip())).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
