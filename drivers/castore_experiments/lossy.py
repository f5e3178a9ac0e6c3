"""A loaded configuration that lost types on its way: YAML has no tuples.

Its digest is not the one its hash was made of. As long as it stays as it was loaded it is no edit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from castore_experiments import canonical
from castore_experiments.components import Content, Scheme
from castore_experiments.resume import Loaded
from castore_experiments.states import Digests, same


@dataclass(frozen=True, slots=True)
class Lossy:
    """The digest by the hash, and the canonical text of what was loaded."""

    hp: str
    text: bytes

    def without(self, content: Content, current: Digests) -> Content:
        """``content`` without its configuration where that is still as it was loaded."""
        if content.config is None or not same(current.hp, self.hp):
            return content
        unchanged = canonical.encode(content.config) == self.text
        return replace(content, config=None) if unchanged else content


def lossy_of(rule: Scheme, loaded: Loaded) -> Lossy | None:
    """What to remember of a loaded state before its mapping is given away; mostly nothing."""
    if loaded.config is None:
        return None
    config, hp = rule.config(loaded.config), loaded.state.digests.hp
    return None if same(rule.hp(config), hp) else Lossy(hp, canonical.encode(config))
