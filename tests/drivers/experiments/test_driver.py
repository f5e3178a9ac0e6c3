"""The experiments layout as a driver: the suite that castore ships, on a root of ours."""

from __future__ import annotations

import shutil
from pathlib import Path

from castore.testing.drivers import DriverTests
from castore_experiments import CheckpointManager
from castore_experiments.driver import ExperimentsDriver
from tests.drivers.experiments.training import Training


class TestExperimentsDriver(DriverTests):
    driver = ExperimentsDriver()

    def lay(self, root: Path) -> None:
        training = Training()
        options = {"materialize": "all"}
        with CheckpointManager(root, checkpoint_manager=options) as manager:
            training.watch(manager)
            manager.update_experiment_hash(dump_immediately=True)
            training.train(2, manager)
            manager.save_model_checkpoint(step=2)
            training.config["lr"] = 0.5
            manager.update_experiment_hash(dump_immediately=True)
        shutil.rmtree(root / ".castore")
