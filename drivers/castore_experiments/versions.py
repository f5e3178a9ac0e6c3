"""From full digests to the 24 characters of an experiment hash.

A label, the first 8 characters of a digest, is never an identity: the full digest decides. Of
two contents with one label the earlier keeps it and the later gets the next 8 characters.
"""

from __future__ import annotations

from collections.abc import Callable

from castore import IntegrityError
from castore_experiments.layout import COMPONENTS, NO_SEGMENT
from castore_experiments.states import MISSING, Archive, Digests, same

Owner = Callable[[str, str], str | None]
"""Component and label to the full digest that has it, or None."""


def label_of(component: str, digest: str, owner: Owner) -> str:
    """The label that stands for ``digest`` among those which ``owner`` knows."""
    if digest == MISSING:
        return NO_SEGMENT
    for at in range(0, len(digest), 8):
        label = digest[at : at + 8]
        known = owner(component, label) if label != NO_SEGMENT else MISSING
        if known is None or same(known, digest):
            return label
    raise IntegrityError(f"every label of the {component} digest {digest} stands for another one")


def hash_of(digests: Digests, owner: Owner) -> str:
    """HP(8) + MODEL(8) + DATA(8)."""
    return "".join(label_of(c, getattr(digests, c), owner) for c in COMPONENTS)


def owner_in(records: Archive) -> Owner:
    """Who has a label in a namespace: the earliest state that carries it."""

    def owner(component: str, label: str) -> str | None:
        first = next(iter(records.with_label(component, label)), None)
        return getattr(records.state(first).digests, component) if first else None

    return owner
