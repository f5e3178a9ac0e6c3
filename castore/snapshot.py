"""A snapshot: one immutable document that names one tree. Pure data, no I/O.

Its name sorts newest first: ``<9999999999999999 - microseconds>-<UTC time>-<key>-<16 hex>.json``,
so the newest of a namespace is the first name under one prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from castore import document
from castore.digest import digest_of, is_digest
from castore.errors import FormatError, InvalidInputError

FENCE = b""
"""Zero bytes under a snapshot's name: this name is spent, its writer starts over."""

MAX_DOCUMENT = 4 << 20
"""Bytes of the largest snapshot document."""

_LAST = 9_999_999_999_999_999
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}")
_KEY = re.compile(r"[a-z0-9._]{1,64}")
_NAME = re.compile(r"[0-9]{16}-[0-9]{8}T[0-9]{6}-[a-z0-9._]{1,64}-[0-9a-f]{16}\.json")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a commit records.

    ``tree`` is a digest; ``time`` microseconds since the epoch by the store's clock; ``key`` the
    driver's part of the name; ``labels`` text by text; ``facts`` whatever JSON the driver keeps;
    ``parents`` names of earlier snapshots; ``files`` and ``size`` count the tree's files and bytes.
    """

    tree: str
    time: int
    namespace: str
    driver: str = "folder"
    key: str = "snapshot"
    labels: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()
    files: int = 0
    size: int = 0

    def encode(self) -> bytes:
        """Canonical bytes, proven to read back; `InvalidInputError` for what cannot be stored."""
        check_namespace(self.namespace)
        check_key(self.key)
        try:
            data = document.encode(
                "snapshot",
                {
                    "tree": self.tree,
                    "time": self.time,
                    "namespace": self.namespace,
                    "driver": self.driver,
                    "key": self.key,
                    "labels": dict(self.labels),
                    "facts": dict(self.facts),
                    "parents": list(self.parents),
                    "files": self.files,
                    "size": self.size,
                },
            )
            Snapshot.decode(data)
        except (TypeError, ValueError, RecursionError) as e:
            raise InvalidInputError(
                f"labels must be text, facts finite JSON with text for keys: {e}"
            ) from e
        if len(data) > MAX_DOCUMENT:
            raise InvalidInputError(
                f"labels and facts make a document of {len(data)} bytes, at most {MAX_DOCUMENT}:"
                " put what is large into a file"
            )
        return data

    @staticmethod
    def decode(data: bytes, where: str = "snapshot") -> Snapshot:
        """The snapshot in ``data``, or `FormatError`."""
        body = document.decode(data, "snapshot", Snapshot.__slots__, where)
        return document.parsed(lambda: _checked(body, where), where)


def _checked(body: dict[str, Any], where: str) -> Snapshot:
    s = Snapshot(**{**body, "parents": tuple(body["parents"])})
    texts = [s.namespace, s.driver, s.key, *s.parents, *s.labels, *s.labels.values()]
    counts = [s.time, s.files, s.size]
    if (
        not is_digest(s.tree)
        or not all(isinstance(t, str) for t in texts)
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in counts)
        or not isinstance(s.facts, dict)
        or not isinstance(body["parents"], list)
        or not _NAMESPACE.fullmatch(s.namespace)
        or not _KEY.fullmatch(s.key)
    ):
        raise FormatError(f"{where}: a field has a wrong type or value")
    return s


@dataclass(frozen=True, slots=True, order=True)
class SnapshotName:
    """A snapshot's place: its namespace and its name, taken apart without reading it."""

    namespace: str
    name: str

    @property
    def time(self) -> int:
        """Microseconds since the epoch; decides which is newest."""
        return _LAST - int(self.name[:16])

    @property
    def key(self) -> str:
        return self.name.split("-", 2)[2].rsplit("-", 1)[0]

    @property
    def id(self) -> str:
        """The 16 hex characters people use to name it."""
        return self.name[-21:-5]

    @property
    def path(self) -> str:
        return f"snapshots/{self.namespace}/{self.name}"

    @property
    def pending(self) -> str:
        return f"pending/{self.namespace}/{self.name}"

    @property
    def forgotten(self) -> str:
        return f"forgotten/{self.namespace}/{self.name}"

    def __str__(self) -> str:
        return f"{self.namespace}@{self.id}"


def name_of(document_bytes: bytes, namespace: str, key: str, time: int) -> SnapshotName:
    """The name a document gets at ``time`` (microseconds)."""
    stamp = datetime.fromtimestamp(time // 1_000_000, UTC).strftime("%Y%m%dT%H%M%S")
    name = f"{_LAST - time:016d}-{stamp}-{key}-{digest_of(document_bytes)[:16]}.json"
    return SnapshotName(namespace, name)


def parse_name(path: str) -> SnapshotName | None:
    """The snapshot that ``<folder>/<namespace>/<name>`` names, or None for anything else."""
    _, _, rest = path.partition("/")
    namespace, _, name = rest.partition("/")
    if _NAMESPACE.fullmatch(namespace) and _NAME.fullmatch(name):
        return SnapshotName(namespace, name)
    return None


def check_namespace(namespace: str) -> str:
    """``namespace`` if it is legal, else `InvalidInputError`."""
    if not _NAMESPACE.fullmatch(namespace):
        raise InvalidInputError(
            f"namespace {namespace!r}: expected 1 to 128 letters, digits or . _ = + -,"
            " beginning with a letter or digit"
        )
    return namespace


def check_key(key: str) -> str:
    """``key`` if it is legal, else `InvalidInputError`."""
    if not _KEY.fullmatch(key):
        raise InvalidInputError(f"key {key!r}: expected 1 to 64 of a-z, 0-9, '.' and '_'")
    return key
