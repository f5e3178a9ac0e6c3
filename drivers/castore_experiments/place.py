"""An opened root: where it is, what it holds, and how it becomes writable.

Opening only reads. The first write makes the repository and ``root.json`` of a fresh root, takes a
namespace of its own for a copied one, and takes in the files of one that another program wrote.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from castore import (
    AlreadyExistsError,
    FormatError,
    InvalidInputError,
    ObjectNotFoundError,
    Repository,
    RepositoryNotFoundError,
)
from castore_experiments import layout
from castore_experiments import root as root_
from castore_experiments.components import CASTORE_1
from castore_experiments.discover import Discovery, discover
from castore_experiments.files import Files, open_files
from castore_experiments.folder import FolderRecords
from castore_experiments.fork import fork_namespace
from castore_experiments.importer import import_root
from castore_experiments.local_files import LocalFiles
from castore_experiments.manifest import parse
from castore_experiments.options import Options
from castore_experiments.records import Records
from castore_experiments.root import RootRecord
from castore_experiments.states import Archive

_STORE = "store"

Report = Callable[[str], None]
"""Told one line for people, about what was found and done."""


@dataclass(frozen=True, slots=True)
class World:
    """What a manager takes from outside: credentials, words to people, time, chance."""

    storage_options: dict[str, Any] | None
    report: Report
    clock: Callable[[], float]
    token: Callable[[], str]


class Place:
    """One root, open. `archive` is what it holds; `writable` gives the records to write to.

    Raises
    ------
    BackendError, RepositoryNotFoundError, IntegrityError
        The root or its repository cannot be reached, or another one is in its place.
    FormatError
        ``root.json`` or the manifest of a root without one is damaged or newer.
    """

    def __init__(self, given: str, options: Options, world: World):
        self.discovery: Discovery = discover(given, world.storage_options)
        self.options, self._world = options, world
        self.files: Files = open_files(self.discovery.root, world.storage_options)
        self.record: RootRecord | None = root_.read_root(self.files)
        self._records: Records | None = None
        self._folder: FolderRecords | None = None
        self._copied = self._moved = self._swept = False
        for line in self.discovery.problems:
            world.report(line)
        if self.record is not None:
            self._open_recorded(self.record)
        elif self.has_manifest():
            self._folder = FolderRecords(self.files, world.report)
        else:
            self._open_named()

    # -- opening

    def _open_recorded(self, record: RootRecord) -> None:
        repository = root_.open_repository(self.files, record, self._world.storage_options)
        self._expect(repository, record, self.options)
        origin = root_.origin(self.files, record, self._world.storage_options)
        if origin == "moved":
            self._world.report(f"{self.files.url}: moved here from {record.url}")
        records = Records(repository, record.namespace)
        records.refresh()
        self._tell_foreign(records)
        self._copied, self._moved = origin == "copied", origin == "moved"
        self._records = records

    def _tell_foreign(self, records: Records) -> None:
        """Say so if another program wrote experiments to the root since: they are not resumed."""
        try:
            there = parse(self.files.get(layout.MANIFEST), layout.MANIFEST).entries
        except (ObjectNotFoundError, FormatError):
            return  # the next write makes it again
        if all(h in records for h in there):
            return
        records.refresh()  # it may be newer than what was listed
        unknown = [h for h in there if h not in records]
        if unknown:
            self._world.report(
                f"{self.files.url}: another program wrote {', '.join(unknown)}, not resumed here:"
                f" 'castore experiments import {self.files.url} -r {records.repository.url}' takes"
                " it in"
            )

    def expect(self, options: Options) -> bool:
        """Whether what is open is kept where ``options`` say; False for a root without a record.

        Raises
        ------
        InvalidInputError
            A recorded root is kept elsewhere.
        """
        if self.record is None:
            return False
        assert self._records is not None
        self._expect(self._records.repository, self.record, options)
        return True

    def _expect(self, repository: Repository, record: RootRecord, options: Options) -> None:
        """Refuse options that contradict what the root is kept in."""
        # The configuration of a copied root still names the namespace of its original.
        if options.namespace not in (None, record.namespace, record.forked_from):
            raise InvalidInputError(
                f"{self.files.url} is kept in namespace {record.namespace!r}, not"
                f" {options.namespace!r}: leave the option out, or take another root"
            )
        if options.repository is None:
            return
        wanted = Repository.open(options.repository, storage_options=self._world.storage_options)
        if wanted.id != repository.id:
            raise InvalidInputError(
                f"{self.files.url} is kept in {repository.url}, not in {wanted.url}: leave the"
                " option out, or copy the root with 'castore experiments import'"
            )

    def has_manifest(self) -> bool:
        """Whether ``manifest.yaml`` stands in the root."""
        try:
            self.files.stat(layout.MANIFEST)
        except ObjectNotFoundError:
            return False
        return True

    def _open_named(self) -> None:
        """A fresh root; with a namespace that is there already it goes on from that."""
        if self.options.namespace is None:
            return
        try:
            repository = Repository.open(
                self.repository_url, storage_options=self._world.storage_options
            )
        except RepositoryNotFoundError:
            return
        self._records = Records(repository, self.options.namespace)
        self._records.refresh()

    @property
    def repository_url(self) -> str:
        """Where the repository of a root without a record is, or is to be."""
        return self._named_repository or f"{self.files.url.rstrip('/')}/{layout.OWN}"

    @property
    def _named_repository(self) -> str | None:
        return self.options.repository or os.environ.get("CASTORE_REPOSITORY")

    def look_again(self) -> None:
        """See what others wrote meanwhile, also if the root was fresh when it was opened."""
        if self.record is None:
            record = root_.read_root(self.files)
            if record is not None:
                self._open_recorded(record)
                self.record, self._folder = record, None
        if self.archive is not None:
            self.archive.refresh()

    # -- what there is

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """What was given for the file system."""
        return self._world.storage_options

    @property
    def archive(self) -> Archive | None:
        """What the root holds, None for a fresh one."""
        return self._records or self._folder

    @property
    def scheme(self) -> str:
        """The rule of the root's hashes."""
        if self.record is not None:
            return self.record.scheme
        return self._folder.scheme if self._folder is not None else CASTORE_1

    @property
    def repository(self) -> Repository | None:
        """None before a fresh or foreign root's first write."""
        return self._records.repository if self._records is not None else None

    @property
    def namespace(self) -> str | None:
        return self._records.namespace if self._records is not None else None

    @property
    def is_writable(self) -> bool:
        """Whether `writable` has nothing more to do."""
        if self.record is None or self._folder is not None:
            return False
        return not self._copied and not self._moved

    # -- the first write

    def writable(self) -> Records:
        """The records to write to; makes whatever is missing for that. Safe to call again."""
        if self.record is None:
            self._make()
        elif self._copied:
            self._fork(self.record)
        elif self._moved:
            self._settle_down(self.record)
        if isinstance(self.files, LocalFiles) and not self._swept:
            self.files.sweep(self._world.clock())
            self._swept = True
        assert self._records is not None
        return self._records

    def _make(self) -> None:
        repository = self.repository or self._open_or_init()
        namespace = self.options.namespace or root_.new_namespace(
            self.files.url, self._world.token()
        )
        records = Records(repository, namespace)
        records.refresh()
        if self._folder is not None:  # before the claim: what ends early is begun anew
            done = import_root(self._folder, records, self._world.report)
            self._world.report(f"{self.files.url}: {done} taken into {repository.url}")
        if isinstance(self.files, LocalFiles):
            self.files.prepare()
        record = root_.new_record(self.files, repository, namespace, self.scheme)
        record = root_.claim_root(self.files, record)
        if record.namespace != namespace:
            self._yield_to(record, records)
        else:
            self._records = records
        self.record, self._folder = record, None  # last: what failed before is begun anew

    def _yield_to(self, record: RootRecord, made: Records) -> None:
        """Another process claimed the root first: what was imported beside it goes."""
        for suffix in ("", ".signals"):
            for name in made.repository.snapshots(made.namespace + suffix):
                made.repository.forget(name)
        self._open_recorded(record)

    def _open_or_init(self) -> Repository:
        url, options = self.repository_url, self._world.storage_options
        try:
            return _open_or_init(url, options)
        except AlreadyExistsError:
            if self._named_repository is not None:
                raise
        # What this root keeps of itself lies there, from when its repository was elsewhere.
        return _open_or_init(f"{url}/{_STORE}", options)

    def _settle_down(self, record: RootRecord) -> None:
        """Record where a moved root is now, so that a copy of it can be told from it."""
        assert self._records is not None
        here = root_.new_record(
            self.files, self._records.repository, record.namespace, record.scheme
        )
        here = replace(here, forked_from=record.forked_from)
        self.record = root_.replace_root(self.files, record, here)
        self._moved = False

    def _fork(self, record: RootRecord) -> None:
        """A namespace of its own for a copied root, with all that the original's held."""
        assert self._records is not None
        repository = self._records.repository
        fresh = root_.new_namespace(self.files.url, self._world.token())
        self._world.report(
            f"{self.files.url}: a copy of {record.url}; it goes on in namespace {fresh!r}, forked"
            f" from {record.namespace!r}"
        )
        for suffix in ("", ".signals", ".runs"):
            fork_namespace(repository, record.namespace + suffix, fresh + suffix)
        new = root_.new_record(self.files, repository, fresh, record.scheme)
        new = replace(new, forked_from=record.namespace)
        new = root_.replace_root(self.files, record, new)
        records = Records(repository, new.namespace)
        records.refresh()
        self.record, self._records, self._copied = new, records, False


def _open_or_init(url: str, options: dict[str, Any] | None) -> Repository:
    """The repository at ``url``, a new one if need be; `AlreadyExistsError` for anything else."""
    try:
        return Repository.open(url, storage_options=options)
    except RepositoryNotFoundError:
        pass
    try:
        return Repository.init(url, storage_options=options)
    except AlreadyExistsError as e:
        try:  # another process was first
            return Repository.open(url, storage_options=options)
        except RepositoryNotFoundError:
            raise e from None
