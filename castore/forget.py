"""Forget: take a snapshot off the list, in an order that a prune beside it cannot misread."""

from __future__ import annotations

from castore.backend import Backend, UnansweredError
from castore.errors import (
    AlreadyExistsError,
    BackendError,
    ObjectNotFoundError,
    SnapshotNotFoundError,
)
from castore.publish import Patience, until_answered
from castore.snapshot import MAX_DOCUMENT, SnapshotName


def forget(backend: Backend, name: SnapshotName, patience: Patience) -> None:
    """Create ``forgotten/...``, then delete the snapshot. A second forget restarts the clock.

    Raises
    ------
    SnapshotNotFoundError
        It is not listed.
    """
    try:
        data = backend.get(name.path, 0, MAX_DOCUMENT + 1)
    except ObjectNotFoundError:
        raise SnapshotNotFoundError(f"{name} is not in {backend.url}") from None
    for _ in range(patience.tries):
        if _remember(backend, name, data):
            break
        patience.sleep(patience.poll)
    else:
        raise BackendError(f"{backend.url} does not answer: {name} was not forgotten; try again")
    until_answered(lambda: backend.delete(name.path), patience)


def _remember(backend: Backend, name: SnapshotName, data: bytes) -> bool:
    try:
        backend.create(name.forgotten, data)
        return True
    except UnansweredError:
        return False
    except AlreadyExistsError:
        pass
    try:
        backend.replace(name.forgotten, data, backend.stat(name.forgotten).version)
        return True
    except (AlreadyExistsError, ObjectNotFoundError, UnansweredError):
        return False
