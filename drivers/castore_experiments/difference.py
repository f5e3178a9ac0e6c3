"""What differs between two hashes, in words."""

from __future__ import annotations

from typing import Any, TypeAlias

from castore_experiments.architecture import Description
from castore_experiments.documents import ARCHITECTURE
from castore_experiments.layout import COMPONENTS, Component
from castore_experiments.resume import read_config, read_data
from castore_experiments.states import Archive
from castore_experiments.why import explain

Kept: TypeAlias = tuple[Archive, str]
"""A hash, and what holds it."""


def difference(a: Kept, b: Kept) -> dict[Component, list[str]]:
    """Lines for each component that differs; a component whose content is not kept says so.

    The two may be of different roots.

    Raises
    ------
    SnapshotNotFoundError
        One of the hashes does not exist.
    """
    changed = a[0].state(a[1]).digests.changed(b[0].state(b[1]).digests)
    found: dict[Component, list[str]] = {}
    for component in COMPONENTS:
        if component in changed:
            found[component] = _explain(_content(*a, component), _content(*b, component))
    return found


def _explain(a: Any, b: Any) -> list[str]:
    if a is None or b is None:
        which = "neither is" if a is None and b is None else "one is not"
        return [f"the digests differ; {which} kept, so that no more can be said"]
    return explain(a, b) or ["the digests differ, what is kept does not"]


def _content(archive: Archive, hash: str, component: Component) -> Any:
    if component == "hp":
        return read_config(archive, hash)
    if component == "data":
        return read_data(archive, hash)[0]
    data = archive.document(hash, ARCHITECTURE)
    return None if data is None else Description.decode(data, f"{ARCHITECTURE} of {hash}")
