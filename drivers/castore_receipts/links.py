"""Verdicts: one a link between a receipt and what it speaks about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OK = "ok"
NOT_CHECKED = "not-checked"
MISSING = "missing"
UNREADABLE = "unreadable"
MISMATCH = "mismatch"
VERDICTS = (OK, NOT_CHECKED, MISSING, UNREADABLE, MISMATCH)
"""From the best to the worst."""


@dataclass(frozen=True, slots=True)
class Link:
    """One promise of a receipt and whether it was kept; ``detail`` says what was found."""

    name: str
    verdict: str
    detail: str = ""

    @property
    def sound(self) -> bool:
        """Whether it is no problem: kept, or not looked at for the reason in ``detail``."""
        return self.verdict in (OK, NOT_CHECKED)


@dataclass(frozen=True, slots=True)
class Report:
    """All links of one receipt, and what else was read in it.

    ``unknown`` lists fields that the layout does not know (they are kept), ``foreign`` says that
    another program wrote it, ``failed_gates`` which acceptance gates it says failed.
    """

    location: str
    links: tuple[Link, ...]
    receipt: Mapping[str, Any] = field(default_factory=dict)
    foreign: bool = False
    unknown: Sequence[str] = ()
    failed_gates: Sequence[str] = ()

    @property
    def sound(self) -> bool:
        return all(link.sound for link in self.links)

    @property
    def verdict(self) -> str:
        """The worst problem; ``ok`` where there is none and some link was checked."""
        found = [link.verdict for link in self.links]
        some = [v for v in found if v != NOT_CHECKED]
        return max(some, key=VERDICTS.index, default=NOT_CHECKED)

    @property
    def problems(self) -> tuple[Link, ...]:
        return tuple(link for link in self.links if not link.sound)

    def __getitem__(self, name: str) -> Link:
        """The link called ``name``; KeyError for one that this kind of receipt has not."""
        return {link.name: link for link in self.links}[name]
