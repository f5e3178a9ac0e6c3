# ruff: noqa: DTZ001 - dates without a zone are values here
"""Canonical text of a configuration, its digest, its YAML: HC1, HC2, HC3, HC4, HC11, SE3."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import json
import math
import os
import pathlib
import subprocess
import sys
import types
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from castore import FormatError, InvalidInputError
from castore_experiments import canonical
from castore_experiments.plain import MAX_DEPTH, number_of

HERE = pathlib.Path(__file__).parent


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


class Level(enum.IntEnum):
    HIGH = 3


class Name(str):
    def __str__(self) -> str:
        return f"at {id(self)}"


@dataclasses.dataclass
class Optimizer:
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)


class Pair(NamedTuple):
    x: int
    y: int


class Keyed:
    """Has keys() and [], as configuration classes of several libraries do, but is no Mapping."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def keys(self) -> Any:
        return self._values.keys()

    def __getitem__(self, key: str) -> Any:
        return self._values[key]


def typed(value: Any) -> Any:
    """``value`` with every type spelled out, so that == tells 1, 1.0 and True apart."""
    if isinstance(value, dict):
        return dict, frozenset((typed(k), typed(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(typed, value))
    if isinstance(value, set | frozenset):
        return set, frozenset(map(typed, value))
    return type(value), value if isinstance(value, int) else repr(value)


# -- strategies ------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(
    ["$set", "$dict", "on", "1e-3", "01234567", "1:30", "~", "", " ", "a: b", "\ud83d\ude00", "😀"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 2)
    | st.floats()
    | st.sampled_from([0.0, -0.0, 1.0, math.nan, 2**64, -(2**64), 10**400])
    | st.complex_numbers()
    | texts
    | st.binary(max_size=4)
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(timezone(timedelta(hours=5, minutes=30))))
    | st.times()
    | st.timedeltas()
)
hashables = st.recursive(
    scalars,
    lambda s: st.lists(s, max_size=3).map(tuple) | st.frozensets(s, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    scalars,
    lambda s: (
        st.lists(s, max_size=4)
        | st.lists(s, max_size=4).map(tuple)
        | st.dictionaries(hashables, s, max_size=4)
        | st.sets(hashables, max_size=4)
    ),
    max_leaves=12,
)
configs = st.dictionaries(hashables, values, max_size=5)


def normal_or_none(config: Any) -> Any:
    """A drawn set may hold what becomes equal (1 and True within tuples, two nans): refused."""
    try:
        return canonical.normal(config)
    except InvalidInputError as e:
        if "become" in str(e):
            return None
        raise


@given(configs)
@settings(deadline=None)
def test_decode_gives_back_the_normal_form(config: dict[Any, Any]) -> None:
    plain = normal_or_none(config)
    if plain is None:
        return
    data = canonical.encode(config)
    assert data.isascii() and b"\n" not in data
    assert typed(canonical.decode(data)) == typed(plain)
    assert canonical.encode(plain) == data == canonical.encode(canonical.decode(data))


@given(configs, configs)
@settings(deadline=None)
def test_injective(a: dict[Any, Any], b: dict[Any, Any]) -> None:
    """Two normal forms have one text only if they are equal and of equal types."""
    x, y = normal_or_none(a), normal_or_none(b)
    if x is not None and y is not None:
        assert (canonical.encode(a) == canonical.encode(b)) == (typed(x) == typed(y))


@given(values, values)
@settings(deadline=None)
def test_injective_close_together(a: Any, b: Any) -> None:
    wraps: list[Callable[[Any], Any]] = [
        lambda v: [v],
        lambda v: (v,),
        lambda v: [[v]],
        lambda v: {"a": v},
        lambda v: {"$a": v},
        lambda v: {"$tuple": v},
        lambda v: {"$dict": [["a", v]]},
        lambda v: [v, v],
    ]
    for value in (a, b):
        forms = [wrap(value) for wrap in wraps]
        plain = [normal_or_none({"k": form}) for form in forms]
        if None not in plain:
            assert len({canonical.encode({"k": form}) for form in forms}) == len(wraps)


@given(st.dictionaries(texts, values, max_size=6), st.randoms())
@settings(deadline=None)
def test_the_order_of_keys_does_not_count(config: dict[Any, Any], random: Any) -> None:
    if normal_or_none(config) is None:
        return
    keys = list(config)
    random.shuffle(keys)
    assert canonical.encode({k: config[k] for k in keys}) == canonical.encode(config)


DISTINCT: list[Any] = [
    None, False, True, 0, 1, 0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 1j, -1j, "", "0", "1",
    "None", "true", b"", b"1", [], [[]], (), ((),), {}, {"a": 1}, {1: "a"}, {"1": "a"}, {1.0: "a"},
    {True: "a"}, {None: "a"}, {"None": "a"}, set(), {1}, {1.0}, {True}, {"a"}, {(1,)}, ["a"],
    ("a",), [1, 2], [2, 1], [12], ["1", "2"], ["1,2"], {"$set": []}, {"$tuple": []},
    {"$float": "nan"}, "nan", "é", "e\u0301", "😀", "\ud83d\ude00", "\ud83d",
    date(2020, 1, 1), "2020-01-01",
    datetime(2020, 1, 1), datetime(2020, 1, 1, tzinfo=UTC), time(0), timedelta(0),
    datetime(2020, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), 2**64, 2**64 - 1, float(2**64),
    10**5000, -(10**5000), {"a": {"b": 1}}, {"a.b": 1}, {"a": None}, [None], "a\0", "a",
]  # fmt: skip


def test_unlike_values_have_unlike_digests() -> None:
    digests = [canonical.hp_digest({"k": value}) for value in DISTINCT]
    assert len(set(digests)) == len(DISTINCT)


def test_hc1_a_float_and_what_yaml_makes_of_it() -> None:
    """HC1: 1e-3 in YAML, 0.001 in YAML, and 0.001 in Python are one HP segment, and a float."""
    digest = canonical.hp_digest({"lr": 0.001})
    for text in ("lr: 1e-3", "lr: 0.001", "lr: 1.0e-3", "lr: 1E-3", "lr: +1e-3"):
        assert canonical.hp_digest(yaml.safe_load(text)) == digest
        ours = canonical.from_yaml(text.encode())
        assert ours == {"lr": 0.001} and type(ours["lr"]) is float
    assert canonical.normal(yaml.safe_load("lr: 1.0e10")) == {"lr": 1e10}
    document = canonical.to_yaml({"lr": "1e-3"}, "00000000")
    assert yaml.safe_load(document)["hyperparameters"] == {"lr": 0.001}


@pytest.mark.parametrize(
    "text",
    ["1234e567", "61e9540", "12e4567", "1e999", "1e-999", "1e", "e1", "0x1e3", "1_0e3", "٣e٣",
     "1.5", "nan", "inf", " 1e3", "1e3 ", "1e3\n", "01e3", "--1e3", "1e5.0", "", "1e+"],
)  # fmt: skip
def test_hc1_text_that_stays_text(text: str) -> None:
    """Ids that look like numbers, what YAML itself reads, and what is no number."""
    assert number_of(text) is None
    assert canonical.normal({"k": text}) == {"k": text}


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-3", 1e-3), ("5E6", 5e6), ("1e10", 1e10), ("1.0e10", 1e10), ("-.5", -0.5), ("0e0", 0.0),
     ("-1e+3", -1e3), (".5e3", 500.0), ("1234567e-3", 1234.567), ("-0e0", -0.0)],
)  # fmt: skip
def test_hc1_text_that_is_a_number(text: str, number: float) -> None:
    found = canonical.normal({"k": text, text: [text]})
    assert repr(found) == repr({"k": number, text: [number]}), "keys stay text"


PROGRAM = """
from castore_experiments.canonical import encode, hp_digest
c = {"tags": {"a", "b", "c"}, "drop": frozenset("xyzpq"), "n": {1, 2.5, None, (1, "a")}, 1: "z"}
print(hp_digest(c), hp_digest(dict(reversed(c.items()))), encode(c).decode())
"""


def test_hc2_sets_in_every_process() -> None:
    """HC2: equal HP segment in every process and for every insertion order."""
    found = set()
    for seed in ("0", "1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        first, second, _ = done.stdout.split(" ", 2)
        assert first == second
        found.add(done.stdout)
    assert len(found) == 1


EQUIVALENTS: list[tuple[Any, Any]] = [
    (np.float64(1e-3), 1e-3),
    (np.float32(0.5), 0.5),
    (np.int64(8), 8),
    (np.uint8(255), 255),
    (np.bool_(True), True),
    (np.str_("x"), "x"),
    (np.bytes_(b"x"), b"x"),
    (np.complex64(1j), 1j),
    (np.datetime64("2020-01-01"), date(2020, 1, 1)),
    (np.array(2.5), 2.5),
    (np.arange(3), [0, 1, 2]),
    (np.eye(2), [[1.0, 0.0], [0.0, 1.0]]),
    (np.array(["a", None], dtype=object), ["a", None]),
    (np.dtype("float32"), "float32"),
    (torch.tensor(3), 3),
    (torch.tensor(0.5, requires_grad=True), 0.5),
    (torch.tensor([True]), [True]),
    (torch.nn.Parameter(torch.zeros(2)), [0.0, 0.0]),
    (torch.ones(1, dtype=torch.bfloat16), [1.0]),
    (torch.Size([2, 3]), (2, 3)),
    (torch.device("cuda:0"), "cuda:0"),
    (torch.float32, "torch.float32"),
    (torch.channels_last, "torch.channels_last"),
    (torch.strided, "torch.strided"),
    (pathlib.Path("a/b"), "a/b"),
    (pathlib.PurePosixPath("/x"), "/x"),
    (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (Colour.RED, "red"),
    (Colour.ONE, 1),
    (Level.HIGH, 3),
    (Name("n"), "n"),
    (bytearray(b"a"), b"a"),
    (memoryview(b"a"), b"a"),
    (collections.OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
    (collections.defaultdict(list, a=[1]), {"a": [1]}),
    (collections.deque([1, 2]), [1, 2]),
    (Pair(1, 2), (1, 2)),
    (range(3), [0, 1, 2]),
    (types.MappingProxyType({"a": 1}), {"a": 1}),
    (argparse.Namespace(a=1), {"a": 1}),
    (types.SimpleNamespace(a=1), {"a": 1}),
    (Optimizer(lr=0.1), {"lr": 0.1, "betas": (0.9, 0.999)}),
    (Keyed(a=1, b=[2]), {"a": 1, "b": [2]}),
    (datetime(2020, 1, 1, fold=1), datetime(2020, 1, 1)),
    (
        datetime(2020, 7, 1, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2020, 7, 1, tzinfo=timezone(timedelta(hours=2))),
    ),
]


@pytest.mark.parametrize(("given", "plain"), EQUIVALENTS, ids=lambda v: type(v).__name__)
def test_hc3_hashes_as_its_plain_equivalent(given: Any, plain: Any) -> None:
    """HC3: re-loads with a safe loader, has no python tags, hashes as the plain equivalent."""
    assert typed(canonical.normal({"k": given})) == typed({"k": plain})
    assert canonical.hp_digest({"k": [given]}) == canonical.hp_digest({"k": [plain]})
    document = canonical.to_yaml({"k": given}, "0a1b2c3d")
    assert b"!" not in document and b"np." not in document
    assert document == canonical.to_yaml({"k": plain}, "0a1b2c3d")
    assert yaml.safe_load(document)["exp_hash"] == "0a1b2c3d"


def test_whole_configurations_that_are_no_dictionaries() -> None:
    digest = canonical.hp_digest({"lr": 0.1, "betas": (0.9, 0.999)})
    spelled = [Optimizer(0.1), argparse.Namespace(**vars(Optimizer(0.1)))]
    assert {canonical.hp_digest(c) for c in [*spelled, Keyed(**vars(Optimizer(0.1)))]} == {digest}
    wrongs: list[Any] = [[], None, "lr: 1", 3, Optimizer, Colour.RED, {1}]
    for wrong in wrongs:
        with pytest.raises(InvalidInputError, match="top level"):
            canonical.encode(wrong)


def test_attrs_and_pydantic() -> None:
    import attrs
    import pydantic

    @attrs.define
    class A:
        lr: float

    class P(pydantic.BaseModel):
        lr: float

    assert canonical.normal({"k": A(0.1), "m": P(lr=0.2)}) == {"k": {"lr": 0.1}, "m": {"lr": 0.2}}


REFUSED: list[Any] = [
    lambda x: x,
    print,
    object(),
    object,
    int,
    Optimizer,
    torch.nn.ReLU,
    torch.nn.ReLU(),
    torch.zeros(2, device="meta"),
    torch.Generator(),
    np.longdouble(1),
    np.datetime64("2020-01-01T00:00:00.000000001"),
    np.datetime64("NaT"),
    np.zeros(1, dtype=[("a", "i4")]),
    np.zeros(1, dtype="M8[ns]"),
    iter([1]),
    (x for x in [1]),
    types,
    __import__("decimal").Decimal("1.5"),
    __import__("fractions").Fraction(1, 2),
    __import__("re").compile("a"),
    __import__("pandas").NaT,
    __import__("pandas").NA,
    __import__("pandas").Timestamp(1),
    time(0, tzinfo=ZoneInfo("Europe/Berlin")),
    NotImplemented,
    ...,
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda v: type(v).__name__)
def test_hc4_what_has_no_encoding_names_its_key_path(value: Any) -> None:
    """HC4: an error naming the key path; never an address, never a constant digest."""
    with pytest.raises(InvalidInputError) as caught:
        canonical.hp_digest({"net": {"layers": [1, {"act fn": value}]}})
    assert "net.layers[1]['act fn']" in str(caught.value)
    assert "0x" not in str(caught.value)


def test_hc4_mixed_keys() -> None:
    """HC4 (b): ``{1: "a", "b": 2}`` has an encoding of its own."""
    found = canonical.decode(canonical.encode({1: "a", "b": 2, None: 3, (1, 2): 4}))
    assert found == {1: "a", "b": 2, None: 3, (1, 2): 4}
    assert canonical.hp_digest({1: "a", "b": 2}) != canonical.hp_digest({"1": "a", "b": 2})


def test_hc4_keys_that_become_the_same() -> None:
    for keys in ((pathlib.Path("a"), "a"), (Colour.ONE, 1), (math.nan, float("nan"))):
        with pytest.raises(InvalidInputError, match=r"k.*two keys of it become the same"):
            canonical.encode({"k": dict.fromkeys(keys, 1)})
    with pytest.raises(InvalidInputError, match="become equal but not the same"):
        canonical.encode({"k": {Colour.ONE, True}})
    assert canonical.normal({"k": {pathlib.Path("a"), "a"}}) == {"k": {"a"}}


def test_what_holds_itself_and_what_is_too_deep_or_too_large() -> None:
    cycle: dict[str, Any] = {"a": [1]}
    cycle["a"].append(cycle)
    with pytest.raises(InvalidInputError, match=r"a\[1\].*holds itself"):
        canonical.encode(cycle)
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert canonical.decode(canonical.encode({"k": deep})) == {"k": deep}
    with pytest.raises(InvalidInputError, match="levels deep"):
        canonical.encode({"k": [deep]})
    bomb: Any = 1
    for _ in range(30):
        bomb = [bomb, bomb]
    with pytest.raises(InvalidInputError, match="more than 500000 values"):
        canonical.encode({"k": bomb})
    with pytest.raises(InvalidInputError, match="cannot hold that"):
        canonical.encode({"k": np.zeros(2_000_000)})
    shared = [1, 2]
    assert canonical.normal({"a": shared, "b": shared}) == {"a": [1, 2], "b": [1, 2]}


def test_a_value_that_cannot_be_read_names_its_path() -> None:
    class Missing(dict[str, Any]):
        def items(self) -> Any:
            raise KeyError("mandatory value is missing")

    with pytest.raises(InvalidInputError, match=r"a\.b: its values cannot be read"):
        canonical.encode({"a": {"b": Missing(x=1)}})


def test_the_caller_keeps_its_objects() -> None:
    config = {"a": [1, {"b": {2}}]}
    found = canonical.normal(config)
    found["a"][1]["b"].add(3)
    assert config == {"a": [1, {"b": {2}}]}


def test_where_things_are_kept_does_not_count() -> None:
    """ "a moved root keeps its hash": docs/decisions/0012."""
    plain = {"lr": 0.1}
    moved = {
        "lr": 0.1,
        "root_log_dir": object(),
        "checkpoint_manager": {"repository": "s3://a", "keep": lambda: 0},
        "experiment_name": "x",
        "is_training": True,
        "pause_at_step": 5,
    }
    assert canonical.hp_digest(moved) == canonical.hp_digest(plain)
    assert canonical.hyperparameters(moved) == plain
    nested = {"inner": {"root_log_dir": "a"}}
    assert canonical.hp_digest(nested) != canonical.hp_digest({"inner": {}})


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"1", b"{", b'{"a": 1}', b'{"b":1,"a":1}', b'{"a":1,"a":1}', b'{"a":NaN}',
     b'{"a":1e5}', b'{"a":1e999}', b'{"a":-0}', b'{"a":"\xc3\xa9"}', b'{"a":{"$odd":1}}',
     b'{"a":{"$tuple":[],"b":1}}', b'{"a":{"$float":"0.5"}}', b'{"a":{"$int":"0x1"}}',
     b'{"a":{"$set":[2,1]}}', b'{"a":{"$set":[1,1]}}', b'{"a":{"$set":[1,true]}}',
     b'{"a":{"$set":[[]]}}', b'{"a":{"$dict":[["b",1]]}}', b'{"a":{"$dict":[[1]]}}',
     b'{"a":{"$date":"x"}}', b'{"a":{"$bytes":"A0"}}', b'{"a":{"$text":"61"}}', b'{"a":1}\n',
     b'{"a":{"$tuple":{"b":1}}}', b'{"a":{"$complex":[1,2]}}',
     b'{"a":{"$timedelta":[0,0,1000000]}}',
     b'{"a":' + b"[" * 100_000],
)  # fmt: skip
def test_decode_takes_nothing_but_canonical_text(data: bytes) -> None:
    with pytest.raises(FormatError, match="here"):
        canonical.decode(data, "here")


def test_pinned_vectors() -> None:
    """One value of every type, fixed for all machines and versions of Python."""
    vectors = json.loads((HERE / "vectors.json").read_text())["configurations"]
    kinds = set()
    for vector in vectors:
        config = canonical.decode(vector["canonical"].encode())
        kinds |= {type(v).__name__ for v in config.values()}
        assert canonical.encode(config).decode() == vector["canonical"]
        assert canonical.hp_digest(config) == vector["digest"]
    assert kinds >= {"NoneType", "bool", "int", "float", "complex", "str", "bytes", "list", "tuple"}
    assert kinds >= {"set", "dict", "date", "datetime", "time", "timedelta"}
    python = {"opt": {"name": "adam", "betas": (0.9, 0.999)}, "lr": 1e-3, "aug": {"flip", "crop"}}
    assert canonical.hp_digest(python) == vectors[0]["digest"]


# -- YAML ------------------------------------------------------------------------------------------

yaml_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(
        ["on", "y", "1e-3x", "01234567", "1:30", "~", "=", "<<", "- a", "a: b", "#", "0o7"]
    )
    | st.dates()
    | st.datetimes(min_value=datetime(1000, 1, 1))
)
yaml_values = st.recursive(
    yaml_scalars,
    lambda s: st.lists(s, max_size=4) | st.dictionaries(yaml_scalars, s, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(yaml_scalars, yaml_values, max_size=5))
@settings(deadline=None)
def test_hp_yaml_reads_back(config: dict[Any, Any]) -> None:
    """By PyYAML's safe loader, by ours, and by a YAML 1.2 reader (but for dates)."""
    plain = normal_or_none(config)
    if plain is None:
        return
    document = canonical.to_yaml(config, "01234567")
    expected = typed(plain)
    assert typed(yaml.safe_load(document)["hyperparameters"]) == expected
    ours, label = canonical.hp_file(document)
    assert typed(ours) == expected and label == "01234567"
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 2)
    modern = reader.load(document.decode())
    assert modern["exp_hash"] == "01234567"
    assert typed(modern["hyperparameters"]) == expected


@given(configs)
@settings(deadline=None, max_examples=50)
def test_hp_yaml_of_any_configuration_is_plain_and_stable(config: dict[Any, Any]) -> None:
    if normal_or_none(config) is None:
        return
    try:
        document = canonical.to_yaml(config, "ffffffff")
    except InvalidInputError as e:
        if "two keys are both" in str(e):
            return
        raise
    again = canonical.to_yaml(dict(reversed(config.items())), "ffffffff")
    assert document == again
    assert isinstance(yaml.safe_load(document)["hyperparameters"], dict)
    assert canonical.hp_file(document)[1] == "ffffffff"


def test_hp_yaml_of_keys_with_one_text() -> None:
    with pytest.raises(InvalidInputError, match="two keys are both"):
        canonical.to_yaml({"k": {(1, 2): 1, "(1, 2)": 2}}, "ffffffff")


def test_hp_yaml_in_full() -> None:
    config = {
        "lr": 1e-5,
        "t": (1, [2]),
        "s": {"b", "a"},
        "b": b"\x01",
        "e": {},
        "o": "on",
        "n": None,
    }
    expected = """\
exp_hash: "01234567"
hyperparameters:
  b: "01"
  e: {}
  lr: 1.0e-05
  n: null
  o: "on"
  s:
    - a
    - b
  t:
    - 1
    -
      - 2
"""
    # "n" is a word of YAML 1.1 for false, so it is quoted where it is a key.
    expected = expected.replace("  n: null\n", "").replace(":\n  b:", ':\n  "n": null\n  b:')
    assert canonical.to_yaml(config, "01234567").decode() == expected


@pytest.mark.parametrize("label", ["01234567", "12345678", "1234e567", "00000000", "61e95400"])
def test_hc11_labels_are_quoted(label: str) -> None:
    """HC11: ids always quoted; a YAML 1.2 parser reads them as text too."""
    document = canonical.to_yaml({"id": label, label: 1}, label)
    modern = YAML(typ="safe", pure=True).load(document.decode())
    for found in (yaml.safe_load(document), modern, canonical.from_yaml(document)):
        assert found == {"exp_hash": label, "hyperparameters": {"id": label, label: 1}}


@pytest.mark.parametrize("label", ["01234567", "12345678", "00000000"])
def test_hc11_a_label_without_quotes_is_refused(label: str) -> None:
    """HC11: the loader refuses a non-string id instead of looking up another one."""
    document = canonical.to_yaml({"a": 1}, label).replace(b'"', b"")
    with pytest.raises(FormatError, match="exp_hash: expected 8 hexadecimal characters in quotes"):
        canonical.hp_file(document)


def test_yaml_11_as_everybody_reads_it() -> None:
    """The traps of YAML 1.1 are read as PyYAML reads them: one file is one HP in all ways in."""
    text = "a: on\nb: 1:30\nc: 017\nd: 2020-01-01\ne: ~\nf: 0x1F\ng: 1_000\nh: 'on'\ni: .5\nj: <\n"
    assert canonical.from_yaml(text.encode()) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/object/apply:os.system ['true']", "line 1: tag"),
        ("b: 1\na: !!python/tuple [1, 2]", "line 2: tag"),
        ("a: !local 1", "tag '!local'"),
        ("a: !!omap [b: 1]", "tag"),
        ("a: [1, 2", "line 1"),
        ("a: b: c", "line 1"),
        ("- 1", "expected a mapping"),
        ("text", "expected a mapping"),
        ("a: 1\nb: 2\na: 3", "'a' stands twice.*line 3"),
        ("a: &x [*x]", "holds itself"),
        ("a: *nowhere", "undefined alias"),
        ("a: 1\n---\nb: 2", "single document"),
        ("? [1]\n: 2", "unhashable"),
        ("a: 2020-13-45", "bad value"),
        ("a: 0x_", "bad value"),
        ("a: " + "9" * 5000, "bad value"),
        ("\x00", "line|special characters|control"),
    ],
)
def test_se3_refused_with_the_place(text: str, message: str) -> None:
    """SE3: safe loader only; a foreign tag is an error with its line."""
    with pytest.raises(FormatError, match=message) as caught:
        canonical.from_yaml(text.encode(), "config.yaml")
    assert str(caught.value).startswith("config.yaml: ")


def test_se3_bombs() -> None:
    """SE3: limits for size, depth and aliases, kept before anything is built."""
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
    )
    with pytest.raises(FormatError, match="aliases followed"):
        canonical.from_yaml(bomb.encode())
    with pytest.raises(FormatError, match="levels|nesting depth"):
        canonical.from_yaml(b"a: " + b"[" * 1_000_000)
    with pytest.raises(FormatError, match="levels"):
        canonical.from_yaml("".join(f"{' ' * n}k:\n" for n in range(200)).encode())
    with pytest.raises(FormatError, match="bytes; a configuration has at most"):
        canonical.from_yaml(b"[" * 50_000_000)
    with pytest.raises(FormatError):
        canonical.from_yaml(b"a: \xff\xfe")


def test_se3_numbers_and_documents_that_take_long() -> None:
    """SE3: base 60 takes the square of its length; each of many documents was read."""
    with pytest.raises(FormatError, match="a number of 10001 characters"):
        canonical.from_yaml(b"a: 1" + b":1" * 5000)
    with pytest.raises(FormatError, match="line 2: expected a single document"):
        canonical.from_yaml(b"---\n---\n" + b"!!python/none\n")
    text = "1:1" * 5000
    assert canonical.from_yaml(f"a: '{text}'\nb: 1:30\n".encode()) == {"a": text, "b": 90}


def test_aliases_merges_and_standard_tags_are_read() -> None:
    text = "d: &d {x: 1, y: 2}\ne:\n  <<: *d\n  y: 3\nf: *d\n"
    text += "g: !!str 1\nh: !!binary YQ==\ni: !!set {q}\n"
    assert canonical.from_yaml(text.encode()) == yaml.safe_load(text)
    assert canonical.from_yaml(b"") == {} == canonical.from_yaml(b"# nothing\n")
    assert canonical.from_yaml(b"1e-3: 1e-3\nq: '1e-3'\n") == {"1e-3": 0.001, "q": "1e-3"}
    assert canonical.hp_file(b"lr: 1e-3\n") == ({"lr": 0.001}, None)
    with pytest.raises(FormatError, match="hyperparameters: expected a mapping"):
        canonical.hp_file(b"hyperparameters: 3\nexp_hash: '01234567'\n")
