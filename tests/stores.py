"""A repository on a local disk or on S3, with what opens it by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from castore.repository import Repository
from castore.source import SourceEntry
from tests.helpers import draft


@dataclass(frozen=True)
class Store:
    """``options`` are those of ``castore://``."""

    repository: Repository
    options: dict[str, Any]

    def fs(self, **more: Any) -> Any:
        return fsspec.filesystem("castore", **self.options, **more)


def new_store(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Store:
    """An empty one, for a fixture to return; ``kind`` is ``local`` or ``s3``."""
    if kind == "local":
        url = str(tmp_path / "store")
        return Store(Repository.init(url), {"repository": url})
    url, options = request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options")
    repository = Repository.init(url, storage_options=options)
    return Store(repository, {"repository": url, "repository_options": options})


def commit(repository: Repository, content: Mapping[str, bytes | SourceEntry], **more: Any) -> str:
    """The path in the view of a new snapshot of namespace ``me``."""
    name = repository.commit(draft(content, **more), namespace="me").name
    return f"me/{name.id}"
