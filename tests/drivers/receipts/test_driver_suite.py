"""The receipts layout as a driver: the suite that castore ships, on a real run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from castore.testing.drivers import DriverTests
from castore_receipts.driver import ReceiptsDriver


class TestReceiptsDriver(DriverTests):
    driver = ReceiptsDriver()

    @pytest.fixture(autouse=True)
    def run(self, made: Path) -> None:
        self.made = made

    def lay(self, root: Path) -> None:
        """Three checkpoints and a final evaluation, without the repository they came from."""
        hidden = shutil.ignore_patterns(".castore")
        shutil.copytree(self.made, root, ignore=hidden, dirs_exist_ok=True)
