"""Seeds have roles: validation seeds give feedback at every checkpoint, final seeds once, after.

A seed that was used for validation can never stand for a final evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from castore import InvalidInputError


@dataclass(frozen=True, slots=True)
class SeedRoles:
    """Disjoint seeds by role, and how often each validation seed has been consumed so far.

    ``retired`` are final seeds of an earlier part of the chain: they never validate.
    """

    validation: tuple[int, ...]
    final: tuple[int, ...] = ()
    consumed: Mapping[int, int] = field(default_factory=dict)
    retired: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        wrong = defects(self.validation, (*self.final, *self.retired))
        if not self.validation:
            wrong = ["at least one validation seed is needed", *wrong]
        if wrong:
            raise InvalidInputError(f"seeds: {'; '.join(wrong)}")

    def used(self) -> SeedRoles:
        """After one more validation."""
        counts = {s: self.consumed.get(s, 0) + 1 for s in self.validation}
        return replace(self, consumed={**self.consumed, **counts})

    def following(self, before: SeedRoles, used: bool = True) -> SeedRoles:
        """These roles with the counts of ``before``, and one more validation if ``used``."""
        was_final = {*before.final, *before.retired} - {*self.final}
        now = SeedRoles(
            self.validation, self.final, dict(before.consumed), tuple(sorted(was_final))
        )
        return now.used() if used else now

    def record(self) -> dict[str, Any]:
        """As it stands in a receipt."""
        return {
            "validation": list(self.validation),
            "final": list(self.final),
            "consumed": {str(s): n for s, n in sorted(self.consumed.items())},
            **({"retired": list(self.retired)} if self.retired else {}),
        }


def roles(validation: Sequence[int], final: Sequence[int]) -> SeedRoles:
    """Roles from what a caller gave; NumPy's integers are taken, anything else is refused."""
    return SeedRoles(_integers(validation), _integers(final))


def _integers(seeds: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(int(s.__index__()) for s in seeds)
    except AttributeError as e:
        raise InvalidInputError(f"seeds are integers: {e}") from e


def read(record: Any) -> SeedRoles:
    """Roles as a receipt tells them; `InvalidInputError` where it does not or they overlap."""
    try:
        consumed = {int(s): int(n) for s, n in record["consumed"].items()}
        retired = tuple(record.get("retired", ()))
        return SeedRoles(tuple(record["validation"]), tuple(record["final"]), consumed, retired)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InvalidInputError(f"seeds are malformed: {e}") from e


def defects(validation: Sequence[Any], final: Sequence[Any]) -> list[str]:
    """What is wrong with two lists of seeds."""
    found = []
    for role, seeds in (("validation", validation), ("final", final)):
        if any(type(s) is not int or not 0 <= s < 1 << 63 for s in seeds):
            found.append(f"a {role} seed is no integer of 0 to 2^63 - 1")
        elif len(set(seeds)) != len(seeds):
            found.append(f"a {role} seed stands twice")
    both = sorted(set(map(str, validation)) & set(map(str, final)))
    if both:
        found.append(f"{', '.join(both[:10])} both for validation and for the final evaluation")
    return found


def chain_defects(own: SeedRoles, before: SeedRoles, validated: bool = True) -> list[str]:
    """What roles say against those of the parent receipt: a changed role, a count gone back.

    ``validated`` says that the validation seeds were used once more since.
    """
    found = []
    was_final = {*before.final, *before.retired}
    reused = sorted((set(own.validation) & was_final) | (set(own.final) & {*before.consumed}))
    if reused:
        found.append(f"{', '.join(map(str, reused[:10]))} had the other role in the parent")
    forgotten = sorted(was_final - {*own.final, *own.retired})
    if forgotten:
        found.append(f"{', '.join(map(str, forgotten[:10]))} final before, neither so nor retired")
    for seed, count in sorted(before.consumed.items()):
        least = count + (validated and seed in own.validation)
        if own.consumed.get(seed, 0) < least:
            found.append(f"{seed} consumed {own.consumed.get(seed, 0)} times, at least {least}")
    return found
