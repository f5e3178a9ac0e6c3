"""The public tool's own state file, in a root that it wrote: kept at the hash that is current.

``.checkpoint_manager_state.json`` beats the manifest there, so that tool would go back to the hash
it left otherwise. A root without the file gets none.
"""

from __future__ import annotations

import json

from castore import AlreadyExistsError, ObjectNotFoundError
from castore_experiments import layout
from castore_experiments.documents import read_object
from castore_experiments.files import Files
from castore_experiments.states import State


def follow(files: Files, state: State, step: int, now: str) -> None:
    """Make ``state`` the current one of the file, if there is one; foreign keys are kept.

    Parameters
    ----------
    files : Files
    state : State
    step : int
        The training step.
    now : str
        Local ISO time.

    Raises
    ------
    FormatError
        The file is damaged; it is left as it is.
    """
    while True:
        try:
            data, version = files.get_versioned(layout.FOREIGN_STATE)
        except ObjectNotFoundError:
            return
        body = read_object(data, f"{files.url}/{layout.FOREIGN_STATE}")
        before = body.get("current_exp_hash")
        if before != state.hash:
            body["previous_exp_hash"] = before
        body.update(
            current_exp_hash=state.hash,
            step_counter=step,
            model_init_step=state.init_step,
            last_updated=now,
            component_hashes={**layout.split(state.hash)._asdict(), "combined": state.hash},
        )
        try:
            files.replace(layout.FOREIGN_STATE, json.dumps(body, indent=2).encode(), version)
            return
        except AlreadyExistsError:
            continue
