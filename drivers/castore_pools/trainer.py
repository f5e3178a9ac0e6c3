"""The collector as a callback of ``transformers.Trainer``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from castore import InvalidInputError

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from castore_pools.collector import PoolCollector


def make_callback(collector: PoolCollector) -> TrainerCallback:
    """A callback that collects after each step and stops the training after the last file.

    The trainer's data begin anew when an interrupted collection goes on; optimizer and random
    numbers do not. `InvalidInputError` when the trainer trains with another optimizer.
    """
    from transformers import TrainerCallback

    class Collecting(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            used = given.get("optimizer")
            used = getattr(used, "optimizer", used)  # what accelerate wraps
            if used is not collector.optimizer:
                raise InvalidInputError(
                    "the trainer has an optimizer of its own: give it"
                    " optimizers=(pool.optimizer, schedule)"
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if not collector.done:
                collector.after_step()
            control.should_training_stop = control.should_training_stop or collector.done

    return Collecting()
