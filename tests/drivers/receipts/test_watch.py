"""Digests of watched objects: every leaf counts, and the one that changed is named."""

from __future__ import annotations

import dataclasses
import enum
import io
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from castore import InvalidInputError
from castore_receipts import watch


class Mode(enum.Enum):
    SLOW = 1
    FAST = 2


@dataclasses.dataclass
class Limits:
    low: float
    high: list[float]


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.scale = 3.0


class World:
    """Everything a world model may consist of."""

    def __init__(self) -> None:
        self.array = np.arange(6.0).reshape(2, 3)
        self.objects = np.array([1, "two"], dtype=object)
        self.net = Net()
        self.tensor = torch.ones(3, dtype=torch.bfloat16)
        self.limits = Limits(0.0, [1.0, 2.0])
        self.nested: dict[str, Any] = {"a": [(1, 2), {3, 4}], "b": OrderedDict(x=deque([5]))}
        self.slotted = Slotted()
        self.mode = Mode.SLOW
        self.text = "v1"
        self.bytes = bytearray(b"ab")
        self.stream = np.random.default_rng(3)
        self.itself = self

    def change(self, name: str, value: Any) -> None:
        setattr(self, name, value)


CHANGES: list[tuple[str, Callable[[World], Any]]] = [
    ("model.array", lambda w: w.array.__setitem__((1, 2), 9.0)),
    ("model.array", lambda w: w.change("array", w.array.astype(np.float32))),
    ("model.objects", lambda w: w.objects.__setitem__(1, "three")),
    ("model.net.layer.weight", lambda w: w.net.layer.weight.data.add_(1e-6)),
    ("model.net.kept", lambda w: w.net.kept.add_(1)),
    ("model.net.unsaved", lambda w: w.net.unsaved.add_(1)),
    ("model.net.scale", lambda w: setattr(w.net, "scale", 4.0)),
    ("model.net.layer", lambda w: w.net.layer.eval()),
    ("model.tensor", lambda w: w.tensor.mul_(2)),
    ("model.limits.high[1]", lambda w: w.limits.high.__setitem__(1, 3.0)),
    ("model.limits.low", lambda w: setattr(w.limits, "low", -0.0)),
    ("model.nested['a'][1]", lambda w: w.nested["a"][1].add(9)),
    ("model.nested['b']['x'][0]", lambda w: w.nested["b"]["x"].__setitem__(0, 6)),
    ("model.nested[]", lambda w: w.nested.__setitem__("c", 1)),
    ("model.slotted.gain", lambda w: setattr(w.slotted, "gain", 2.0)),
    ("model.mode", lambda w: w.change("mode", Mode.FAST)),
    ("model.text", lambda w: w.change("text", "v2")),
    ("model.bytes", lambda w: w.bytes.append(1)),
    ("model.stream", lambda w: w.stream.random()),
    ("model.more", lambda w: w.change("more", 1)),
]


@pytest.mark.parametrize(("leaf", "change"), CHANGES, ids=[c[0] for c in CHANGES])
def test_a_change_names_its_leaf(leaf: str, change: Callable[[World], Any]) -> None:
    """'checked before and after validation, providing a targeted assertion that the declared
    world-model object did not change'"""
    world = World()
    before = watch.leaves({"model": world})
    watch.assert_same(before, watch.leaves({"model": world}), "at once")
    change(world)
    after = watch.leaves({"model": world})
    with pytest.raises(AssertionError) as found:
        watch.assert_same(before, after, "during validation")
    assert leaf in str(found.value)
    assert watch.digest(before) != watch.digest(after)


def test_equal_objects_have_equal_digests() -> None:
    first, second = (watch.digest(watch.leaves({"m": World()})) for _ in range(2))
    assert first == second


def test_many_short_lived_tensors_are_not_taken_for_one_another() -> None:
    """An object's id may be given to the next one; each leaf must still be its own content."""
    net = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(50)))
    before = watch.leaves({"net": net})
    with torch.no_grad():
        net[49].bias[2] += 1
    changed = [p for p, d in watch.leaves({"net": net}).items() if before[p] != d]
    assert changed == ["net.49.bias.data"]


def test_objects_watched_side_by_side_have_their_own_digests() -> None:
    a, ab = np.zeros(2), np.zeros(3)
    found = watch.leaves({"a": a, "ab": ab})
    before = {n: watch.of_object(found, n) for n in ("a", "ab")}
    ab += 1
    now = watch.leaves({"a": a, "ab": ab})
    assert watch.of_object(now, "a") == before["a"]
    assert watch.of_object(now, "ab") != before["ab"]


def test_what_has_no_content_is_refused_by_path(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w") as file:
        for thing in (file, iter([1]), io.BytesIO(b"a"), object()):
            with pytest.raises(InvalidInputError, match=r"model\['x'\]"):
                watch.leaves({"model": {"x": thing}})


def test_reading_a_stream_does_not_move_it() -> None:
    generator, legacy = np.random.default_rng(1), np.random.RandomState(1)
    torch_stream = torch.Generator().manual_seed(4)
    watched = {"g": generator, "l": legacy, "t": torch_stream, "p": random.Random(2).getstate()}
    assert watch.leaves(watched) == watch.leaves(watched)
    assert generator.random() == np.random.default_rng(1).random()
