"""What every driver promises, as a pytest class to inherit, one test a sentence.

class TestMine(DriverTests):
    driver = MyDriver()
    def lay(self, root): ...   # a small layout of yours, as your programs write it
"""

from __future__ import annotations

from pathlib import Path

import pytest

from castore.check import check
from castore.driver import Driver
from castore.errors import CastoreError, LayoutError
from castore.objects import object_name
from castore.repository import Commit, Repository
from castore.tree import File


class DriverTests:
    """Inherit, and give ``driver`` and `lay`."""

    driver: Driver
    refuses_foreign = True
    """Whether a folder without the layout is refused (one that takes any folder does not)."""

    def lay(self, root: Path) -> None:
        """Write a small layout into ``root``, an empty folder."""
        raise NotImplementedError

    @pytest.fixture
    def layout(self, tmp_path: Path) -> Path:
        """A layout on disk."""
        root = tmp_path / "layout"
        root.mkdir()
        self.lay(root)
        return root

    @pytest.fixture
    def repository(self, tmp_path: Path) -> Repository:
        """An empty one."""
        return Repository.init(tmp_path / "store")

    def commit(self, repository: Repository, layout: Path) -> list[Commit]:
        """What `Driver.collect` finds, committed in its order."""
        drafts = self.driver.collect(layout)
        return [repository.commit(draft, namespace="layout") for draft in drafts]

    def test_snapshots_carry_the_drivers_name(self, repository: Repository, layout: Path) -> None:
        done = self.commit(repository, layout)
        assert done and {c.snapshot.driver for c in done} == {self.driver.name}

    def test_collecting_changes_nothing(self, repository: Repository, layout: Path) -> None:
        before = _content(layout)
        self.commit(repository, layout)
        assert _content(layout) == before

    def test_what_was_collected_is_whole(self, repository: Repository, layout: Path) -> None:
        self.commit(repository, layout)
        assert list(check(repository, read_data=True, layout=True)) == []

    def test_collecting_again_stores_no_content_again(
        self, repository: Repository, layout: Path
    ) -> None:
        self.commit(repository, layout)
        objects = sum(1 for _ in repository.store.list())
        self.commit(repository, layout)
        assert sum(1 for _ in repository.store.list()) == objects

    def test_materialized_files_are_those_of_the_layout(
        self, repository: Repository, layout: Path, tmp_path: Path
    ) -> None:
        """Every file that is written is one of the layout, byte for byte, and most are."""
        done = self.commit(repository, layout)
        for i, commit in enumerate(done):
            target = tmp_path / f"copy-{i}"
            target.mkdir()
            self.driver.materialize(repository, commit.name, target / "root")
            made = _content(target / "root")
            original = _content(layout)
            shared = {p: d for p, d in made.items() if p in original}
            assert shared and shared.items() <= original.items()

    def test_verify_finds_nothing_in_what_is_sound(
        self, repository: Repository, layout: Path
    ) -> None:
        for commit in self.commit(repository, layout):
            assert list(self.driver.verify(repository, commit.name)) == []

    def test_lost_content_is_never_taken_for_sound(
        self, repository: Repository, layout: Path
    ) -> None:
        """Whichever file lost its bytes: `verify` tells of it or raises."""
        for commit in self.commit(repository, layout):
            for path, file in commit.tree.files():
                if not file.slices:
                    continue
                assert self._is_noticed(repository, commit, file), path

    def _is_noticed(self, repository: Repository, commit: Commit, file: File) -> bool:
        name = object_name(file.slices[0].blob)
        kept = repository.backend.get(name)
        repository.backend.delete(name)
        fresh = Repository.open(repository.url)
        try:
            return bool(list(self.driver.verify(fresh, commit.name)))
        except CastoreError:
            return True
        finally:
            repository.backend.create(name, kept)

    def test_a_folder_without_the_layout_is_refused(self, tmp_path: Path) -> None:
        if not self.refuses_foreign:
            return
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "notes.txt").write_text("no layout")
        with pytest.raises(LayoutError):
            list(self.driver.collect(tmp_path / "other"))


def _content(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
