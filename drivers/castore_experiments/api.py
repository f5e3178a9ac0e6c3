"""The documented spelling of watching: one function for every kind of object."""

from __future__ import annotations

import os
from typing import Any, Literal, TypeVar, get_args

from castore import InvalidInputError
from castore_experiments import answers
from castore_experiments.manager import CheckpointManager

T = TypeVar("T")
Flag = Literal["model", "optimizer", "scheduler", "hyperparameters", "data", "dataloader"]


class _Managers:
    """The managers that `watch_or_edit` made, and which of them was used last."""

    def __init__(self) -> None:
        self._made: list[CheckpointManager] = []

    def at(self, root: str | None) -> CheckpointManager:
        """The one of ``root``; without a root the one that was used last."""
        for manager in reversed(self._made):
            given = manager.given_root_log_dir
            if root is None or given is None or answers.same_place(given, root):
                self._made.remove(manager)
                self._made.append(manager)
                return manager
        self._made.append(CheckpointManager(root))
        return self._made[-1]

    def forget_closed(self) -> None:
        self._made = [m for m in self._made if not m.is_closed]


_managers = _Managers()


def watch_or_edit(
    obj: T,
    flag: Flag,
    root_log_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> T:
    """Watch ``obj`` with the manager of its root, and give it back.

    The manager is made when the first object of a root is watched; `manager_of` gives it. The
    root is ``root_log_dir``, else that of watched hyperparameters, else the one used last.

    Parameters
    ----------
    obj : object
    flag : str
        What it is: ``model optimizer scheduler hyperparameters data dataloader``.
    root_log_dir : path or URL, optional
    name : str, optional
        The name of a data loader; ``train_loader`` by default.

    Raises
    ------
    InvalidInputError
        An unknown flag, or what `CheckpointManager.watch` refuses.
    """
    if flag not in get_args(Flag):
        raise InvalidInputError(f"flag {flag!r}: expected one of {', '.join(get_args(Flag))}")
    root = os.fspath(root_log_dir) if root_log_dir is not None else None
    if flag == "hyperparameters" and root is None:
        root = _root_in(obj)
    manager = manager_of(root)
    if flag == "dataloader":
        manager.watch(dataloaders={name or "train_loader": obj})
    else:
        watched: dict[str, Any] = {flag: obj}
        manager.watch(**watched)
    return obj


def manager_of(root_log_dir: str | os.PathLike[str] | None = None) -> CheckpointManager:
    """The manager behind `watch_or_edit` for a root; without a root the one used last."""
    _managers.forget_closed()
    return _managers.at(os.fspath(root_log_dir) if root_log_dir is not None else None)


def _root_in(config: Any) -> str | None:
    root = config.get("root_log_dir") if hasattr(config, "get") else None
    return os.fspath(root) if root is not None else None
