"""The pools layout as a driver: the suite that castore ships, on a pool that was collected."""

from __future__ import annotations

from pathlib import Path

from castore.testing.drivers import DriverTests
from castore_pools.driver import PoolsDriver
from tests.drivers.pools.models import collect


class TestPoolsDriver(DriverTests):
    driver = PoolsDriver()

    def lay(self, root: Path) -> None:
        collect(root, "wordavg", count=2)
        code = root / "metadata" / "code" / "text_classification"
        code.mkdir(parents=True)
        (code / "README.md").write_text("how to reassemble\n")
