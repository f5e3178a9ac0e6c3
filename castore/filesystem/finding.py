"""The half of fsspec's interface that finds: paths, folders, what is known of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from fsspec.core import has_magic

from castore.filesystem import address, infos
from castore.filesystem.address import Address
from castore.filesystem.content import Content
from castore.filesystem.infos import Info
from castore.filesystem.lookup import Lookup
from castore.filesystem.place import Place
from castore.filesystem.readonly import ReadOnly
from castore.tree import File, Folder, Link


class Finding(ReadOnly):
    """Looks paths up, anew at each call.

    A path that is not there is `FileNotFoundError`; whatever else keeps from knowing is raised as
    it is, also by what answers with a bool, and never taken for "not there".
    """

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """A path as the view spells it: without protocol, and without slashes around it."""
        plain = super()._strip_protocol(path)
        return plain if isinstance(plain, list) else plain.strip("/")

    @property
    def _lookup(self) -> Lookup:
        """This process's access to the repository."""
        raise NotImplementedError

    def _look(self, path: str) -> tuple[Place, str, str | None]:
        """Place, path there, and the same less all links: None for a link that leads nowhere.

        `FileNotFoundError` where there is nothing.
        """
        where = address.parse(self._strip_protocol(path))
        place = self._lookup.place(where)
        real = place.follow(where.path)
        if real is None and not isinstance(place.entries.get(where.path), Link):
            raise FileNotFoundError(f"castore://{place.name(where.path)} does not exist")
        return place, where.path, real

    def _content(self, place: Place, real: str | None) -> tuple[Content, int] | None:
        """What a file holds, and its time; None for a folder or a link."""
        entry = None if real is None else place.entries.get(real)
        if isinstance(entry, File):
            return entry, place.time
        if real is None or entry is None or isinstance(entry, Folder | Link):
            return None
        return self._lookup.content(place, real, entry), entry.time

    def _describe(self, place: Place, path: str, real: str | None) -> Info:
        """What is known of a path whose links were followed."""
        name, entry = place.name(path), place.entries.get(path)
        found = self._content(place, real)
        if found is not None:
            info = infos.file(name, *found)
        elif real is None:
            info = infos.link(name, place.time)
        else:
            info = infos.folder(name, place.time)
        if isinstance(entry, Link):
            info["islink"], info["destination"] = True, entry.target
        if place.snapshot is not None:
            info["snapshot"] = str(place.snapshot)
        return info

    def info(self, path: str, **_: Any) -> Info:
        """What is known of a path, links followed; see `infos.Info`."""
        where = address.parse(self._strip_protocol(path))
        if not where.namespace:
            return {"name": "", "size": 0, "type": "directory", "mode": 0o555}
        if not where.path and not where.snapshot:
            return infos.folder(where.namespace, self._lookup.newest(where.namespace).time)
        return self._describe(*self._look(path))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What lies in a folder, sorted by name; a file is its own list.

        A link to a folder is listed as a link, so that no walk goes in circles.
        """
        where = address.parse(self._strip_protocol(path))
        if not where.namespace:
            spaces = self._namespaces()
            return spaces if detail else [i["name"] for i in spaces]
        if not where.snapshot and not where.path:
            return self._namespace(where.namespace, detail)
        place, inner, real = self._look(path)
        if real is None or real not in place.folders:
            found = self._describe(place, inner, real)
            return [found] if detail else [found["name"]]
        return self._list(place, inner, real, detail)

    def _namespaces(self) -> list[Info]:
        """Those that hold a snapshot: one whose last was forgotten may leave its folder."""
        found = []
        for namespace in self._lookup.repository.namespaces():
            with suppress(FileNotFoundError):
                found.append(self.info(namespace))
        return found

    def _namespace(self, namespace: str, detail: bool) -> list[Any]:
        """A namespace's snapshots, each once, and what its layout has."""
        snapshots = [
            {**infos.folder(f"{namespace}/{n.id}", n.time), "snapshot": str(n)}
            for n in sorted(self._lookup.names(namespace), key=lambda n: n.id)
        ]
        layout = self._list(self._lookup.place(Address(namespace)), "", "", detail)
        return [*(snapshots if detail else (i["name"] for i in snapshots)), *layout]

    def _list(self, place: Place, path: str, real: str, detail: bool) -> list[Any]:
        below = [(_join(path, n), _join(real, n)) for n in place.folders[real]]
        if not detail:
            return [place.name(p) for p, _ in below]
        return [self._listed(place, p, r) for p, r in below]

    def _listed(self, place: Place, path: str, real: str) -> Info:
        """As `_describe`, but a link to a folder is a link: no walk goes in circles."""
        end = place.follow(real)
        info = self._describe(place, path, end)
        entry = place.entries.get(real)
        if isinstance(entry, Link):
            if info["type"] == "directory":
                info |= infos.link(info["name"], place.time)
            info["islink"], info["destination"] = True, entry.target
        return info

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: str | Callable[[OSError], None] = "omit",
        **kwargs: Any,
    ) -> Iterator[tuple[str, Any, Any]]:
        """As fsspec has it, but within a snapshot or layout all of one moment.

        Only what is not there may be left out: damage and outages are raised.
        """
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        where = address.parse(self._strip_protocol(path))
        if not where.snapshot and not where.path:
            strict = _only_missing if on_error == "omit" else on_error
            yield from super().walk(path, maxdepth, topdown, strict, **kwargs)
            return
        try:
            place, inner, real = self._look(path)
        except FileNotFoundError as e:
            if on_error == "raise":
                raise
            if callable(on_error):
                on_error(e)
            return
        detail = bool(kwargs.get("detail", False))
        if real is not None and real in place.folders:
            yield from self._walk(place, inner, real, maxdepth, topdown, detail)
        else:
            only = {"": self._describe(place, inner, real)}
            yield place.name(inner), {} if detail else [], only if detail else [""]

    def _walk(
        self, place: Place, path: str, real: str, depth: int | None, topdown: bool, detail: bool
    ) -> Iterator[tuple[str, Any, Any]]:
        found = {i["name"].rpartition("/")[2]: i for i in self._list(place, path, real, True)}
        folders: Any = {n: i for n, i in found.items() if i["type"] == "directory"}
        files: Any = {n: i for n, i in found.items() if i["type"] != "directory"}
        if not detail:
            folders, files = list(folders), list(files)
        if topdown:
            yield place.name(path), folders, files
        if depth is None or depth > 1:
            less = None if depth is None else depth - 1
            for n in list(folders):
                yield from self._walk(place, _join(path, n), _join(real, n), less, topdown, detail)
        if not topdown:
            yield place.name(path), folders, files

    def glob(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """As fsspec has it, but a path that is there stands for itself, whatever is in its name."""
        plain = self._strip_protocol(path)
        where = address.parse(plain)
        if has_magic(where.path) and not has_magic(where.root) and self.exists(plain):
            return {plain: self.info(plain)} if kwargs.get("detail") else [plain]
        return super().glob(path, maxdepth, **kwargs)

    def exists(self, path: str, **_: Any) -> bool:
        """Whether there is such a path; a link that leads nowhere is there."""
        return self._type(path) is not None

    def isdir(self, path: str) -> bool:
        """Whether it is a folder, or a link to one."""
        return self._type(path) == "directory"

    def isfile(self, path: str) -> bool:
        """Whether it is a file, or a link to one."""
        return self._type(path) == "file"

    def _type(self, path: str) -> str | None:
        try:
            return str(self.info(path)["type"])
        except FileNotFoundError:
            return None

    def lexists(self, path: str, **_: Any) -> bool:
        """As `exists`."""
        return self.exists(path)

    def created(self, path: str) -> datetime:
        """When what it shows was committed."""
        return self.modified(path)

    def modified(self, path: str) -> datetime:
        """When what it shows was committed; of a namespace its newest snapshot's time."""
        found = self.info(path).get("modified")
        if not isinstance(found, datetime):
            raise IsADirectoryError("castore:// itself has no time")
        return found

    def ukey(self, path: str) -> str:
        """Changes when the content does: the SHA-256 of a file."""
        info = self.info(path)
        return str(info.get("sha256") or super().ukey(path))


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _only_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
