"""What every test of the experiments driver gets."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Working copies of remote roots' curves lie in the test's folder, not in the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
