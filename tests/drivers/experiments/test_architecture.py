"""What the MODEL segment stands for (field case HC6)."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from castore import FormatError, InvalidInputError
from castore_experiments import architecture, canonical
from castore_experiments.architecture import Description, describe

HERE = pathlib.Path(__file__).parent


class Net(nn.Module):
    """Has a tied or untied head, a bare parameter, a setting, and a counter."""

    def __init__(self, tied: bool = True, scale: float = 0.5, extra: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.bias = nn.Parameter(torch.zeros(11))
        self.factor = scale
        self.seen = 0
        self.device = torch.device("cpu")
        self.where = "cuda:1"
        self.helper = object()
        self.text = f"<helper at {hex(id(self.helper))}>"
        if extra:
            self.register_buffer("mask", torch.zeros(3), persistent=extra == "kept")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.embed(x)) * self.factor + self.bias  # type: ignore[no-any-return]


class Swapped(nn.Module):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        for name in (first, second):
            self.add_module(name, nn.Linear(3, 3))


def digest(model: object, init_step: int = 0) -> str:
    return describe(model, init_step).digest()


Maker = Callable[[], nn.Module]
UNLIKE: dict[str, tuple[Maker, Maker]] = {
    "widths": (lambda: nn.Linear(10, 20), lambda: nn.Linear(10, 200)),
    "bias": (lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2, bias=False)),
    "stride": (lambda: nn.Conv2d(3, 3, 3, stride=1), lambda: nn.Conv2d(3, 3, 3, stride=2)),
    "padding": (lambda: nn.Conv2d(3, 3, 3), lambda: nn.Conv2d(3, 3, 3, padding="same")),
    "activation": (nn.ReLU, lambda: nn.LeakyReLU(0.2)),
    "slope": (lambda: nn.LeakyReLU(0.2), lambda: nn.LeakyReLU(0.3)),
    "dropout": (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2)),
    "epsilon": (lambda: nn.LayerNorm(3), lambda: nn.LayerNorm(3, eps=1e-6)),
    "infinite": (lambda: nn.Threshold(0, 1.0), lambda: nn.Threshold(0, math.inf)),
    "heads": (lambda: nn.MultiheadAttention(8, 2), lambda: nn.MultiheadAttention(8, 4)),
    "bidirectional": (lambda: nn.LSTM(3, 3), lambda: nn.LSTM(3, 3, batch_first=True)),
    "function": (
        lambda: nn.TransformerEncoderLayer(8, 2, 8, activation="relu"),
        lambda: nn.TransformerEncoderLayer(8, 2, 8, activation="gelu"),
    ),
    "blocks swapped": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(3, 3)),
    ),
    "order of names": (lambda: Swapped("a", "b"), lambda: Swapped("b", "a")),
    "names": (lambda: Swapped("a", "b"), lambda: Swapped("a", "c")),
    "dtype": (lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2).bfloat16()),
    "buffer": (Net, lambda: Net(extra="kept")),
    "temporary buffer": (Net, lambda: Net(extra="temporary")),
    "persistence": (lambda: Net(extra="kept"), lambda: Net(extra="temporary")),
    "ties": (lambda: Net(tied=True), lambda: Net(tied=False)),
    "own setting": (lambda: Net(scale=0.5), lambda: Net(scale=0.25)),
    "a layer more": (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.ReLU(), nn.ReLU())),
    "bare parameter": (
        lambda: nn.ParameterList([torch.zeros(2)]),
        lambda: nn.ParameterList([torch.zeros(3)]),
    ),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_hc6_unlike_architectures_have_unlike_digests(case: str) -> None:
    """HC6: different names, shapes, dtypes, order, ties, settings give different segments."""
    first, second = UNLIKE[case]
    assert digest(first()) != digest(second())


@pytest.mark.parametrize("case", UNLIKE)
def test_hc6_the_same_class_built_twice(case: str) -> None:
    """HC6: the same class built twice, or moved, gives the same segment; so do other weights."""
    for make in UNLIKE[case]:
        model = make()
        before = digest(model)
        assert digest(make()) == before
        assert digest(copy.deepcopy(model)) == before
        assert digest(model.eval().requires_grad_(False)) == before
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.fill_(1)
        assert digest(model) == before


def test_the_step_it_was_initialised_at_counts() -> None:
    """'MODEL — model architecture + the step it was initialized at'."""
    assert digest(nn.Linear(2, 2), 0) != digest(nn.Linear(2, 2), 1)
    for wrong in (-1, True, 1.0, None):
        with pytest.raises(InvalidInputError, match="init_step"):
            describe(nn.Linear(2, 2), wrong)  # type: ignore[arg-type]


def test_another_device() -> None:
    for make in (lambda: nn.LSTM(3, 4), nn.Sequential, lambda: nn.Conv2d(1, 1, 1)):
        assert digest(make().to("meta")) == digest(make())
    with torch.device("meta"):
        assert digest(Net()) == digest(Net().to("meta"))
    last: Any = nn.Conv2d(2, 2, 3)
    assert digest(last.to(memory_format=torch.channels_last)) == digest(nn.Conv2d(2, 2, 3))


def test_wrappers_are_looked_through() -> None:
    """No ``module.`` or ``_orig_mod.`` in names, wherever the wrapper stands."""
    plain = digest(nn.Sequential(Net(), nn.Linear(2, 2)))

    def eager(model: nn.Module) -> Any:
        return torch.compile(model, backend="eager")

    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    whole = nn.Sequential(Net(), nn.Linear(2, 2))
    for wrap in (eager, nn.DataParallel, DistributedDataParallel):
        assert digest(wrap(whole)) == plain
        assert digest(nn.Sequential(wrap(Net()), nn.Linear(2, 2))) == plain
    assert digest(eager(nn.DataParallel(whole))) == plain

    class Holder:
        model = whole

    assert digest(Holder()) == plain
    assert digest(nn.Sequential(nn.Sequential(Net(), nn.Linear(2, 2)))) != plain


def test_running_does_not_change_it() -> None:
    """A counter moved on by ``forward``, running statistics, hooks, and gradients do not count."""
    for model, batch in (
        (Net(), torch.tensor([1, 2])),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3)),
    ):
        before = describe(model)
        model.register_forward_hook(lambda *_: None)
        model(batch).sum().backward()
        assert describe(model) == before
        assert "seen" not in before.modules[0].settings


def test_a_setting_changed_on_a_live_layer_counts() -> None:
    model: Any = nn.Sequential(nn.Dropout(0.1))
    before = digest(model)
    model[0].p = 0.2
    assert digest(model) != before


def test_what_counts_as_a_setting() -> None:
    """Set by a constructor alone, plain, no device, no address, not private."""

    class Base(nn.Module):
        __constants__ = ("listed",)

        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width
            self.listed = 1
            self.kind = torch.float16
            self.pair = [1, (2.5, "x")]
            self.act = nn.functional.relu
            self.sum = torch.sum
            self.cut = functools.partial(print)
            self.layer = nn.ReLU
            self.long = list(range(1000))
            self.odd = [object()]
            self._private = 3
            self.moved = self.decorated = self.by_property = 0

        def forward(self, x: Any) -> Any:
            def inner() -> None:
                self.moved = 5

            inner()
            self.listed = 2
            return x

        @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
        def step(self) -> None:
            self.decorated += 1

        @property
        def read(self) -> int:
            self.by_property += 1
            return 1

    class Child(Base):
        def __init__(self) -> None:
            super().__init__(3)
            self.depth = "1e-3"

    settings = dict(describe(Child()).modules[0].settings)
    long = settings.pop("long")
    assert settings == {
        "width": 3,
        "listed": 1,
        "kind": "torch.float16",
        "pair": [1, (2.5, "x")],
        "act": {"function": "relu"},
        "sum": {"function": "sum"},
        "depth": 0.001,
    }
    assert long["values"] == 1000 and len(long["blake3"]) == 64


def test_two_names_for_one_module() -> None:
    shared = nn.Linear(2, 2)
    tied, apart = nn.Sequential(shared, shared), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert describe(tied).ties == (("0.weight", "1.weight"), ("0.bias", "1.bias"))
    assert digest(tied) != digest(apart)


def test_weights_in_one_buffer_are_not_tied() -> None:
    """Recurrent layers on some devices keep all weights in one buffer: no ties for that."""
    flat = torch.zeros(8)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    apart = nn.Module()
    apart.a, apart.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    assert describe(model).ties == () and digest(model) == digest(apart)


def test_lazy_scripted_and_circular_models_are_refused_by_name() -> None:
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(InvalidInputError, match=r"1\.weight has no shape yet: run one batch"):
        describe(lazy)
    with torch.no_grad():
        lazy(torch.zeros(2, 5))
    assert digest(lazy) == digest(nn.Sequential(nn.Flatten(), nn.Linear(5, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(InvalidInputError, match="'0': a scripted or traced module"):
        describe(nn.Sequential(scripted))
    circle = nn.Sequential(nn.ReLU())
    circle.add_module("back", circle)
    with pytest.raises(InvalidInputError, match="'back': it holds itself"):
        describe(circle)
    wrongs: list[Any] = [None, {}, nn.Linear, lambda: 0, torch.zeros(2)]
    for wrong in wrongs:
        with pytest.raises(InvalidInputError, match=r"expected a torch\.nn\.Module"):
            describe(wrong)


def test_parametrizations() -> None:
    from torch.nn.utils.parametrizations import weight_norm

    def normed() -> Any:
        return weight_norm(nn.Linear(2, 2))

    assert digest(normed()) == digest(normed()) != digest(nn.Linear(2, 2))
    assert "parametrizations.weight.original0" in [t.name for t in describe(normed()).tensors]


def test_names_that_look_like_numbers_stay_names() -> None:
    model = nn.ModuleDict({"1e-3": nn.Linear(1, 1), "$set": nn.ReLU()})
    found = Description.decode(describe(model).encode())
    assert [m.name for m in found.modules] == ["", "1e-3", "$set"]
    assert digest(model) != digest(nn.ModuleDict({"1E-3": nn.Linear(1, 1), "$set": nn.ReLU()}))


def test_a_description_goes_round() -> None:
    for pair in UNLIKE.values():
        for make in pair:
            description = describe(make(), 7)
            assert Description.decode(description.encode()) == description
            assert description.encode().isascii()


def test_decode_refuses_other_documents() -> None:
    good = describe(nn.Linear(2, 2)).encode()
    newer = good.replace(b'"format":1', b'"format":2')
    for data in (
        b"",
        b"{}",
        good[:-1],
        good + b"\n",
        newer,
        good.replace(b'"ties":[]', b'"ties":1'),
    ):
        with pytest.raises(FormatError, match="there"):
            Description.decode(data, "there")
    extra = canonical.spell({**canonical.decode(good), "zeal": 1})
    with pytest.raises(FormatError, match="unknown"):
        Description.decode(extra)


PROGRAM = """
from torch import nn
from castore_experiments.architecture import describe
print(describe(nn.TransformerEncoderLayer(8, 2, 8), 3).digest())
"""


def test_equal_in_every_process() -> None:
    found = set()
    for seed in ("0", "5"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout.strip())
    assert found == {digest(nn.TransformerEncoderLayer(8, 2, 8), 3)}


PINNED: dict[str, Maker] = {
    "Sequential(Linear(4, 8), ReLU(), Linear(8, 2))": lambda: nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)
    ),
    "Conv2d(3, 4, 3, stride=2, padding=1)": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1),
    "LSTM(4, 5, num_layers=2)": lambda: nn.LSTM(4, 5, num_layers=2),
    "BatchNorm2d(3)": lambda: nn.BatchNorm2d(3),
    "Dropout(0.1)": lambda: nn.Dropout(0.1),
}


def test_pinned_vectors() -> None:
    vectors = json.loads((HERE / "vectors.json").read_text())["architectures"]
    assert {v["model"] for v in vectors} == set(PINNED)
    for vector in vectors:
        description = describe(PINNED[vector["model"]](), vector["init_step"])
        assert description.encode().decode() == vector["canonical"]
        assert description.digest() == vector["digest"]


def test_what_is_not_covered_is_documented() -> None:
    """HC6: "What is not covered (e.g. forward code) is documented"."""

    def make(sign: int) -> nn.Module:
        class Same(nn.Module):
            def forward(self, x: Any) -> Any:
                return sign * x

        return Same()

    assert digest(make(1)) == digest(make(-1))
    assert "the code of ``forward``" in (architecture.__doc__ or "")
