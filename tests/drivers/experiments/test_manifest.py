"""The manifest: its text, and how changes come together."""

from __future__ import annotations

import io
import lzma
import math
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as some

from castore import FormatError, InvalidInputError
from castore_experiments import manifest as m
from castore_experiments import yaml_subset
from castore_experiments.manifest import Change, Manifest, entry_of, merge, parse, render

DIGITS = ["01234567", "12345678", "1234e567", "00000000"]
HASH = "".join(DIGITS[:3])
OTHER = "f" * 24
TIME = "2026-11-30T03:11:40.130644"
LATER = "2026-11-30T03:11:41.000000"

PUBLIC = b"""\
experiments:
  bccaa27957854ac35637b652:
    hp_hash: bccaa279
    model_hash: 57854ac3
    data_hash: 5637b652
    created: '2026-11-30T03:11:40.130644'
    last_used: '2026-11-30T03:11:40.683805'
    latest_weight_checkpoint: bccaa27957854ac35637b652_step_000006.pt
    latest_weight_step: 6
    experiment_name: fixture
    notes: ''
    odd: [1, {a: no}, .inf, 1e5, 2026-11-30]
latest_hash: bccaa27957854ac35637b652
last_updated: '2026-11-30T03:11:41.610852'
somebody:
  else: 007
"""


def one(**keys: Any) -> Manifest:
    entry = entry_of(HASH, created=TIME, last_used=TIME)
    return Manifest({HASH: {**entry, **keys}}, HASH, TIME)


def text_of(*lines: str, latest: str = f'"{HASH}"') -> bytes:
    head = ["experiments:", f'  "{HASH}":', *(f"    {line}" for line in lines)]
    return "\n".join([*head, f"latest_hash: {latest}", f"last_updated: '{TIME}'", ""]).encode()


# -- what is read


def test_the_public_tools_manifest_is_read_and_kept() -> None:
    manifest = parse(PUBLIC, "x")
    entry = manifest.entries["bccaa27957854ac35637b652"]
    assert entry["hp_hash"] == "bccaa279"
    assert entry["created"] == TIME
    assert entry["latest_weight_step"] == 6
    assert entry["notes"] == ""
    assert entry["odd"] == [1, {"a": False}, math.inf, "1e5", "2026-11-30"]
    assert manifest.latest_hash == "bccaa27957854ac35637b652"
    assert manifest.rest == {"somebody": {"else": 7}}
    again = parse(render(manifest), "x")
    assert (again.entries, again.rest) == (manifest.entries, manifest.rest)
    assert again.last_updated == "2026-11-30T03:11:41.610852"


def test_a_manifest_that_the_public_tool_wrote() -> None:
    fixture = Path(__file__).parent / "fixtures/weightslab/single.tar.xz"
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(fixture.read_bytes()))) as archive:
        file = archive.extractfile("single/checkpoints/manifest.yaml")
        assert file is not None
        data = file.read()
    manifest = parse(data, "x")
    expected = yaml.safe_load(data)
    assert manifest.entries == expected["experiments"]
    assert manifest.latest_hash == expected["latest_hash"]
    assert yaml.safe_load(render(manifest)).items() >= expected.items()


@pytest.mark.parametrize("label", DIGITS)
def test_ids_are_always_quoted_hc11(label: str) -> None:
    """HC11: ids always quoted."""
    hash = label * 3
    entry = entry_of(hash, created=TIME, last_used=TIME)
    data = render(Manifest({hash: entry}, hash, TIME))
    assert data.count(label.encode()) == 3 + 3 + 3  # key, latest_hash, three segments
    assert data.count(f'"{label}'.encode()) == 2 + 3
    assert yaml.safe_load(data)["experiments"] == {hash: entry}
    assert yaml.safe_load(data)["latest_hash"] == hash
    assert parse(data, "x").entries == {hash: entry}


@pytest.mark.parametrize("label", ["01234567", "12345678", "00000000"])
def test_an_id_that_lost_its_quotes_is_refused_hc11(label: str) -> None:
    """HC11: the loader refuses a non-string id instead of looking up another one."""
    data = render(Manifest({label * 3: entry_of(label * 3, created=TIME, last_used=TIME)}))
    for quoted in (f'"{label}"', f'"{label * 3}"'):
        bare = data.replace(quoted.encode(), quoted.strip('"').encode(), 1)
        assert bare != data
        with pytest.raises(FormatError, match="quoted"):
            parse(bare, "x")


def test_an_id_without_quotes_that_is_text_all_the_same_hc11() -> None:
    """HC11: PyYAML leaves 1234e567 unquoted, and reads it back as text."""
    data = yaml.dump(yaml.safe_load(render(one())), sort_keys=False).encode()
    assert b"model_hash: '12345678'" in data and b"data_hash: 1234e567" in data
    assert parse(data, "x").entries == one().entries


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hp_hash: 1", "hp_hash"),
        ("hp_hash: null", "hp_hash"),
        ("hp_hash: '../../xy'", "hp_hash"),
        ("model_hash: ABCDEF01", "model_hash"),
        ("latest_weight_checkpoint: ../../x.pt", "latest_weight_checkpoint"),
        ("latest_weight_checkpoint: /etc/passwd", "latest_weight_checkpoint"),
        ("latest_weight_checkpoint: '%2e%2e/x_step_1.pt'", "latest_weight_checkpoint"),
        ("latest_weight_step: '6'", "latest_weight_step"),
        ("latest_weight_step: -1", "latest_weight_step"),
        ("latest_weight_step: true", "latest_weight_step"),
        ("created: 5", "created"),
        ("notes: {a: 1}", "notes"),
        ("castore: 1", "castore"),
        ("castore: {time: x}", "castore"),
        ("hp_hash: &a '01234567'", "line 3"),
        ("hp_hash: *a", "line 3"),
        ("hp_hash: !!python/object/apply:os.system ['true']", "line 3"),
        ("notes: !!python/tuple [1]", "line 3"),
        ("notes: !!binary aGk=", "line 3"),
        ("notes: a\n    notes: b", "twice"),
        ("? [a]\n    : b", "scalar"),
        ("x: " + "[" * 40 + "]" * 40, "levels"),
        ("x: 'unfinished", "not YAML"),
        ("x: \x00", "not YAML"),
    ],
)
def test_what_is_refused_se2_se3(line: str, words: str) -> None:
    """SE2: fields are ids, checked by an allow-list. SE3: safe loading, with limits."""
    with pytest.raises(FormatError, match=words) as error:
        parse(text_of(line), "the manifest")
    assert "the manifest" in str(error.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"# only a comment\n",
        b"[]",
        b"experiments",
        b"experiments: []",
        b"experiments: {1: {}}",
        b"other: 1",
        b"\xff\xfe\xff",
        b"a: 1\n---\na: 2\n",
        b"experiments: {}\ncastore: {format: 2}\n",
        b"experiments: {}\ncastore: {format: '1'}\n",
        b"experiments: {}\ncastore: {format: true}\n",
        b"experiments: {}\nlatest_hash: 5\n",
        b"[" * 1_000_000,
        b"- " * 100_000,
        b"a: &a [x]\nb: &b [*a, *a]\n" * 2,
    ],
)
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse(data, "x")


@pytest.mark.parametrize("data", [PUBLIC, render(one(castore={"parent": None}))])
def test_cut_off_anywhere_it_is_never_shorter_history(data: bytes) -> None:
    """A truncated manifest is damaged, or lost nothing of the entries; it is never empty."""
    whole = parse(data, "x")
    for end in range(len(data)):
        try:
            found = parse(data[:end], "x")
        except FormatError:
            continue
        assert found.entries == whole.entries
        assert found.latest_hash == whole.latest_hash


def test_too_large() -> None:
    with pytest.raises(FormatError, match="at most"):
        parse(b" " * (yaml_subset.MAX_BYTES + 1), "x")


# -- what is written


def test_the_text() -> None:
    manifest = Manifest(
        {
            HASH: entry_of(
                HASH,
                created=TIME,
                last_used=LATER,
                experiment_name="fixture",
                weights=f"{HASH}_step_000006.pt",
                step=6,
                castore={"parent": None, "held": [6, 12]},
            )
        },
        HASH,
        LATER,
    )
    assert (
        render(manifest).decode()
        == f"""\
experiments:
  "{HASH}":
    hp_hash: "01234567"
    model_hash: "12345678"
    data_hash: "1234e567"
    created: "{TIME}"
    last_used: "{LATER}"
    latest_weight_checkpoint: "{HASH}_step_000006.pt"
    latest_weight_step: 6
    experiment_name: "fixture"
    notes: ""
    castore: {{"parent": null, "held": [6, 12]}}
latest_hash: "{HASH}"
last_updated: "{LATER}"
castore: {{"format": 1}}
"""
    )
    assert render(Manifest()).decode() == (
        'experiments: {}\nlatest_hash: null\nlast_updated: null\ncastore: {"format": 1}\n'
    )


scalars = (
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats(allow_nan=False)
    | some.text(some.characters(exclude_categories=["Cs"]))
    | some.sampled_from(["yes", "1e5", "007", "0x1f", "~", "a: b", "x\u2028y", "\x85", "\ufeff"])
)
values = some.recursive(
    scalars,
    lambda v: (
        some.lists(v, max_size=3)
        | some.dictionaries(some.text(some.characters(exclude_categories=["Cs"])), v, max_size=3)
    ),
    max_leaves=6,
)
names = some.text(min_size=1, max_size=20) | some.sampled_from(
    ["on", "no", "y", "a b", '"x"', "null"]
)
foreign = some.dictionaries(names.filter(str.isprintable), values, max_size=4)


@settings(max_examples=300, deadline=None)
@given(foreign, foreign, some.text(some.characters(exclude_categories=["Cs"])))
def test_ours_is_yaml_too(inner: dict[str, Any], outer: dict[str, Any], notes: str) -> None:
    """What we write comes back the same by our reading of lines, and by any reader of YAML."""
    known = {"experiments", "latest_hash", "last_updated", "castore"}
    rest = {k: v for k, v in outer.items() if k not in known}
    extra = {k: v for k, v in inner.items() if k not in m._KEYS}
    manifest = Manifest(
        {
            HASH: {**entry_of(HASH, created=TIME, last_used=TIME, notes=notes), **extra},
            OTHER: {"castore": {"x": extra}},
        },
        HASH,
        TIME,
        {"format": 1},
        rest,
    )
    data = render(manifest)
    assert render(parse(data, "x")) == data
    assert parse(data, "x") == manifest
    loaded = yaml.load(data, yaml.CSafeLoader)
    assert loaded["experiments"] == manifest.entries
    slow = yaml_subset.load(data, "x")
    assert slow["experiments"] == manifest.entries
    assert {k: v for k, v in slow.items() if k not in known} == rest


@pytest.mark.parametrize("key", [": ", '": "', "a: b", ' "', '\\": ', "\\", " ", ":", "#", '"'])
def test_a_key_that_looks_like_the_end_of_one_comes_back(key: str) -> None:
    manifest = Manifest({}, None, None, {"format": 1}, {key: None, "other": 1})
    entries = {HASH: {**entry_of(HASH, created=TIME, last_used=TIME, notes=""), key: 2}}
    for one_ in (manifest, Manifest(entries, HASH, TIME, {"format": 1}, {key: {key: 1}})):
        data = render(one_)
        assert parse(data, "x") == one_
        assert yaml_subset.load(data, "x") == yaml.safe_load(data)
        assert yaml.safe_load(data).get(key) == one_.rest[key]


def test_a_manifest_that_lost_its_entries_is_not_taken_for_an_empty_one() -> None:
    """Also where all that is left is spelled as we spell it."""
    rest = f'latest_hash: "{HASH}"\nlast_updated: "{TIME}"\ncastore: {{"format": 1}}\n'
    with pytest.raises(FormatError, match="not a manifest"):
        parse(f"experiments:\n{rest}".encode(), "x")
    assert yaml.safe_load(f"experiments:\n{rest}")["experiments"] is None


def test_our_own_spelling_is_read_line_by_line() -> None:
    """Else each update would cost what YAML costs."""
    data = render(
        one(notes='emoji 🎉, "quotes", back\\slash, new\nline', strange={"a": [1.5, -0.0]})
    )
    assert m._own(data) is not None
    assert m._own(data) == yaml.safe_load(data)
    assert m._own(PUBLIC) is None


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ('notes: ""', "notes: 1e5", "1e5"),
        ('notes: ""', "notes: 'single'", "single"),
        ('notes: ""', 'notes: "a"  # a comment', "a"),
        ('notes: ""', 'notes: "a\\/b"', None),
        ('notes: ""', 'notes: "x","created": "y"', None),
        ('notes: ""', "notes: |\n      a\n      b", "a\nb\n"),
        ('notes: ""', "notes: on", True),
        ('notes: ""', 'notes: ""\n', ""),
        ('notes: ""', 'notes: ""\n    # a comment', ""),
    ],
)
def test_edited_by_hand_it_means_what_yaml_says(old: str, new: str, value: object) -> None:
    """The quick reader must never read a line otherwise than YAML does."""
    data = render(one()).replace(old.encode(), new.encode())
    try:
        expected = yaml.safe_load(data)["experiments"][HASH]["notes"]
    except yaml.YAMLError:
        with pytest.raises(FormatError):
            parse(data, "x")
        return
    assert parse(data, "x").entries[HASH]["notes"] == expected
    assert value is None or expected == value


def test_what_cannot_be_written_is_refused() -> None:
    for wrong in (
        Manifest({"x": {}}),
        Manifest({HASH: {"hp_hash": 1}}),
        Manifest({HASH: {"latest_weight_checkpoint": "../x"}}),
        Manifest({HASH: {"odd": object()}}),
        Manifest({HASH: {"odd": b"bytes"}}),
        Manifest({HASH: {"odd": "\ud800"}}),
        Manifest({HASH: {"k" * 2000: 1}}),
        Manifest(latest_hash="x"),
        Manifest(castore={"format": 2}),
    ):
        with pytest.raises(InvalidInputError):
            render(wrong)


# -- how changes come together


def test_merge_adds_and_keeps() -> None:
    foreign = parse(PUBLIC, "x")
    hash = foreign.latest_hash
    assert hash is not None
    change = Change(
        {hash: {"last_used": LATER, "castore": {"a": 1}}, HASH: one().entries[HASH]}, HASH, LATER, 5
    )
    merged = merge(foreign, change)
    assert list(merged.entries) == [hash, HASH]
    assert merged.entries[hash]["odd"] == foreign.entries[hash]["odd"]
    assert merged.entries[hash]["last_used"] == LATER
    assert merged.entries[hash]["created"] == TIME
    assert merged.entries[hash]["castore"] == {"a": 1}
    assert merged.latest_hash == HASH
    assert merged.rest == foreign.rest
    assert merge(merged, change) == merged
    assert "castore" not in foreign.entries[hash]
    more = merge(merged, Change({hash: {"castore": {"b": 2}}}))
    assert more.entries[hash]["castore"] == {"a": 1, "b": 2}
    gone = merge(merged, Change(drop=(HASH,)))
    assert (list(gone.entries), gone.latest_hash) == ([hash], None)


def test_the_later_save_decides_in_whichever_order_it_comes() -> None:
    """ "Latest" means last saved in time, by the store's order."""

    def saved(hash: str, step: int, time: int) -> Change:
        keys = {
            "latest_weight_checkpoint": f"{HASH}_step_{step:06d}.pt",
            "latest_weight_step": step,
        }
        return Change({HASH: keys}, hash, None, time)

    first, second = saved(HASH, 1_000_000, 10), saved(OTHER, 5, 20)
    results = [merge(merge(one(), a), b) for a, b in ((first, second), (second, first))]
    for result in results:
        assert result.latest_hash == OTHER
        assert result.entries[HASH]["latest_weight_step"] == 5
        assert result.entries[HASH]["latest_weight_checkpoint"] == f"{HASH}_step_000005.pt"
    assert render(results[0]) == render(results[1])


def test_times_never_go_back_and_creation_stays() -> None:
    manifest = merge(one(), Change({HASH: {"last_used": LATER, "created": LATER}}, None, LATER))
    manifest = merge(manifest, Change({HASH: {"last_used": TIME}}, None, TIME))
    assert manifest.last_updated == LATER
    assert manifest.entries[HASH]["last_used"] == LATER
    assert manifest.entries[HASH]["created"] == TIME


def test_rendering_after_a_merge_is_rendering_afresh() -> None:
    """What was rendered before is used again only where nothing changed."""
    manifest = one()
    render(manifest)
    merged = merge(manifest, Change({HASH: {"notes": "new"}, OTHER: {"notes": "other"}}))
    fresh = Manifest(merged.entries, merged.latest_hash, merged.last_updated, merged.castore)
    assert render(merged) == render(fresh)
    assert b"new" in render(merged)


# -- times


def test_times_as_the_layout_has_them() -> None:
    text = m.stamp(1_790_000_000.25)
    assert len(text) == 26 and "+" not in text and "Z" not in text
    assert m.parse_time(text) == 1_790_000_000.25
    assert m.parse_time(m.stamp(1_790_000_000.0)) == 1_790_000_000.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2026-11-30T03:11:40Z", 1796008300.0),
        ("2026-11-30T05:11:40.5+02:00", 1796008300.5),
        ("2026-11-30 05:11:40 +0200", 1796008300.0),
        ("20261130T031140Z", 1796008300.0),
        (" 2026-11-30T03:11:40Z ", 1796008300.0),
        (1796008300, 1796008300.0),
        (None, None),
        ("", None),
        ("yesterday", None),
        (True, None),
        (math.nan, None),
        ("9999-99-99", None),
        ([], None),
    ],
)
def test_times_as_others_write_them(value: object, seconds: float | None) -> None:
    assert m.parse_time(value) == seconds


def test_a_weight_save_counts_as_an_update() -> None:
    """Seed: "the one whose manifest was **most recently updated** is adopted"."""
    manifest = one(last_used=LATER)
    assert m.last_use(manifest) == m.parse_time(LATER)
    assert m.last_use(one()) == m.parse_time(TIME)
    assert m.last_use(Manifest()) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        'experiments:\n -"0123456789abcdef01234567":\n    hp_hash: "01234567"\n',
        'experiments:\n  "\\x30":\n    hp_hash: "01234567"\n',
    ],
)
def test_what_only_looks_like_our_spelling_means_what_yaml_says(text: str) -> None:
    """HC11: the quick way of reading took another hash out of it than any YAML reader."""
    assert m._own((text + 'castore: {"format": 1}\n').encode()) is None


def test_a_number_of_any_length_is_read_at_once() -> None:
    """SE3: a number in base 60 takes time that grows with the square of its length."""
    text = "1" + ":1" * 500_000
    assert yaml_subset.load(f"a: {text}\nb: 1:30\n".encode(), "x") == {"a": text, "b": 90}


@pytest.mark.parametrize(
    "lines",
    [
        "experiments: {}",
        '"experiments": {}',
        'one: {"x": 1\ntwo: 2}, "two": 3',
        'one: "a", "b": {"x": 1\ntwo: 2}',
        "one: \r1",
        f"one: {'[' * 25}{']' * 25}",
        f'"{"k" * 1100}": 1',
        f'one: {{"{"k" * 1100}": 1}}',
        f"one: -{'1' * 4300}",
        f"one: 1.{'1' * 4300}",
        'one: "\uffff"',
        'one: {"\ufffe": 1}',
    ],
)
def test_what_json_would_make_of_several_lines_is_left_to_yaml(lines: str) -> None:
    """HC11: a second ``experiments`` took the place of all entries; YAML refuses it."""
    data = render(one()).decode() + lines + "\n"
    assert m._own(data.encode()) is None
    try:
        expected = yaml_subset.load(data.encode(), "x")["one"]
    except FormatError:
        with pytest.raises(FormatError):
            parse(data.encode(), "x")
    else:
        assert parse(data.encode(), "x").rest["one"] == expected
