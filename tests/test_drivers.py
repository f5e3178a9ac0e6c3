"""The conformance suite of drivers, and the strategies, on the store itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hypothesis import given, settings

from castore import Draft, MemoryFile, Repository
from castore.driver import FolderDriver
from castore.testing import strategies
from castore.testing.drivers import DriverTests
from tests.helpers import contents, memory_url, safetensors, weights


class TestFolderDriver(DriverTests):
    driver = FolderDriver()
    refuses_foreign = False

    def lay(self, root: Path) -> None:
        (root / "a").mkdir()
        (root / "a" / "w.safetensors").write_bytes(safetensors({"w": weights()}))
        (root / "notes.txt").write_text("hello")


@settings(max_examples=60, deadline=None)
@given(strategies.folders())
def test_any_folder_comes_back(files: Mapping[str, bytes]) -> None:
    repository = Repository.init(memory_url())
    done = repository.commit(Draft({p: MemoryFile(d) for p, d in files.items()}))
    assert contents(repository, done.name) == files


@settings(max_examples=60, deadline=None)
@given(strategies.drafts(2_000))
def test_any_draft_can_be_committed(draft: Draft) -> None:
    repository = Repository.init(memory_url())
    done = repository.commit(draft)
    assert repository.snapshot(done.name).labels == draft.labels
