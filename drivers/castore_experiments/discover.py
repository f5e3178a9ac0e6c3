"""Which experiment roots lie at or below a place, and which of them is to be adopted.

A root is a folder with ``checkpoints/manifest.yaml``. The place itself is looked at, and three
levels below it. Not entered: folders called ``checkpoints``, names that begin with a dot, what was
seen before under another name, links to a folder above the place, and repositories. Names are
literal.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from castore import FormatError, InvalidInputError, ObjectNotFoundError
from castore.backend import check_name
from castore_experiments.files import Files, open_files
from castore_experiments.layout import CHECKPOINTS, MANIFEST
from castore_experiments.local_files import LocalFiles
from castore_experiments.manifest import last_use, parse

DEPTH = 3
_AT_ONCE = 16  # requests under way on a remote store


@dataclass(frozen=True, slots=True)
class Found:
    """One root: its URL, when it was last updated, and what is wrong with its manifest.

    ``last_use`` in seconds since the epoch, 0.0 where that cannot be told; ``problem`` is empty
    where nothing is wrong.
    """

    url: str
    last_use: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Discovery:
    """What `discover` found.

    ``given`` is what was passed; ``root`` the URL of the effective root, ``given`` spelled out if
    there is none; ``roots`` all of them sorted by URL; ``problems`` one line each for folders
    that could not be listed and for damaged manifests.
    """

    given: str
    root: str
    roots: tuple[Found, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def is_multi_root(self) -> bool:
        """Whether there are several."""
        return len(self.roots) > 1

    @property
    def siblings(self) -> tuple[str, ...]:
        """The URLs of the roots that were not adopted."""
        return tuple(f.url for f in self.roots if f.url != self.root)


def discover(
    url: str | PathLike[str], storage_options: dict[str, Any] | None = None, depth: int = DEPTH
) -> Discovery:
    """The roots at or below ``url``; reads only.

    None: ``root`` is ``url``, a fresh one. One: that. Several: the one most recently updated, where
    a weight save counts; of equals the last by URL. A damaged manifest ranks last and is listed.

    Raises
    ------
    BackendError
        ``url``, or a manifest below it, cannot be read: never taken for "nothing there".
    """
    files = open_files(url, storage_options)
    found, problems = _search(_Place(files, "", storage_options, top=True), depth)
    problems += [f.problem for f in found if f.problem]
    best = max(found, key=lambda f: (not f.problem, f.last_use, f.url), default=None)
    return Discovery(
        os.fspath(url),
        best.url if best else files.url,
        tuple(sorted(found, key=lambda f: f.url)),
        tuple(sorted(problems)),
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder: its name among ``files``, whether a link led to it, whether it is the given one."""

    files: Files
    prefix: str
    options: dict[str, Any] | None
    linked: bool = False
    top: bool = False

    @property
    def url(self) -> str:
        return f"{self.files.url}/{self.prefix}" if self.prefix else self.files.url

    def key(self) -> Hashable:
        """The folder's identity, whatever name led to it."""
        if not isinstance(self.files, LocalFiles):
            return self.url
        try:
            info = os.stat(self.url)
        except OSError:
            return self.url
        return info.st_dev, info.st_ino

    def name_of(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def closed(self) -> bool:
        """Whether this is a local folder, not the given one, that may not be entered or listed."""
        local = isinstance(self.files, LocalFiles) and not self.top
        return local and os.path.isdir(self.url) and not os.access(self.url, os.R_OK | os.X_OK)

    def child(self, name: str) -> _Place:
        """A folder below; one whose name a remote store's rules forbid is opened on its own."""
        if isinstance(self.files, LocalFiles):
            linked = self.linked or os.path.islink(f"{self.url}/{name}")
            return _Place(self.files, self.name_of(name), self.options, linked)
        try:
            check_name(self.name_of(name))
        except InvalidInputError:
            return _Place(open_files(f"{self.url}/{name}", self.options), "", self.options)
        return _Place(self.files, self.name_of(name), self.options)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one folder holds: a root or none, folders to enter, why they could not be listed."""

    place: _Place
    left: int
    root: Found | None
    below: tuple[_Place, ...] = ()
    problem: str = ""


def _search(start: _Place, depth: int) -> tuple[list[Found], list[str]]:
    """All roots and problems, a level at a time; what lies behind links after all else."""
    above, entered = _above(start), dict[Hashable, int]()
    found, problems = dict[Hashable, Found](), list[str]()
    wave, links = [(start, depth)], list[tuple[_Place, int]]()
    with ThreadPoolExecutor(1 if isinstance(start.files, LocalFiles) else _AT_ONCE) as pool:
        while wave or links:
            if not wave:
                wave, links = links, []
            todo = [(p, left) for p, left in wave if _enter(p.key(), left, above, entered)]
            wave = []
            for seen in pool.map(_look, todo):
                if seen.root:
                    found.setdefault(seen.place.key(), seen.root)
                problems += [seen.problem] if seen.problem else []
                for place in seen.below:
                    (links if place.linked else wave).append((place, seen.left - 1))
    return list(found.values()), problems


def _enter(key: Hashable, left: int, above: set[Hashable], entered: dict[Hashable, int]) -> bool:
    """Whether a folder is to be looked at: new, or reached with more levels left than before."""
    if key in above or entered.get(key, -1) >= left:
        return False
    entered[key] = left
    return True


def _above(start: _Place) -> set[Hashable]:
    """The folders above the given one: a link that leads there is a loop."""
    if not isinstance(start.files, LocalFiles):
        return set()
    real = Path(os.path.realpath(start.url))
    return {_Place(LocalFiles(str(p)), "", None).key() for p in real.parents}


def _look(what: tuple[_Place, int]) -> _Seen:
    """One folder: its manifest, and the folders in it if any levels are left.

    A local folder that this user may not enter or list is told, not an error: a disk has its
    ``lost+found``. A manifest that is there and cannot be read is one, as is a store's silence.
    """
    place, left = what
    if place.closed():
        return _Seen(place, left, None, problem=f"{place.url}: not searched: no permission")
    root = _root(place)
    names = place.files.folders(place.prefix) if left else []
    if _is_repository(place, names):
        return _Seen(place, left, root)
    wanted = [n for n in names if n != CHECKPOINTS and not n.startswith(".")]
    return _Seen(place, left, root, tuple(place.child(n) for n in wanted))


def _root(place: _Place) -> Found | None:
    try:
        data = place.files.get(place.name_of(MANIFEST))
    except ObjectNotFoundError:
        return None
    try:
        return Found(place.url, last_use(parse(data, f"{place.url}/{MANIFEST}")))
    except FormatError as e:
        return Found(place.url, 0.0, str(e))


def _is_repository(place: _Place, names: list[str]) -> bool:
    """Whether this is a castore repository: hundreds of folders, and no root among them."""
    if not {"objects", "snapshots"} <= {*names}:
        return False
    try:
        place.files.stat(place.name_of("config.json"))
    except ObjectNotFoundError:
        return False
    return True
