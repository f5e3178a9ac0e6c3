"""Random streams: field cases RS1, RS7, CC1."""

from __future__ import annotations

import copy
import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from castore import FormatError
from castore_experiments import rng

FIXTURE = Path(__file__).parent / "fixtures" / "weightslab" / "single.tar.xz"


def draw() -> tuple[Any, ...]:
    """One of each; two normal deviates, of which NumPy and Python keep the second half."""
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        np.random.randint(1 << 30),
        torch.randn(3).tolist(),
    )


def odd() -> None:
    """Leave every stream within a pair of normal deviates."""
    random.gauss(0, 1)
    np.random.normal()
    torch.randn(1)


def test_what_follows_is_drawn_again() -> None:
    odd()
    state = rng.capture()
    expected = [draw() for _ in range(3)]
    report = rng.restore(state)
    assert [draw() for _ in range(3)] == expected
    assert report.exact
    assert list(report.streams) == ["python_random", "numpy_random", "torch_rng"]


def test_numpy_keeps_all_five_items() -> None:
    odd()
    state = rng.capture()
    (name, words, place), (has_gauss, gauss) = state["numpy_random"], state["numpy_gauss"]
    assert (name, len(words), has_gauss) == ("MT19937", 624, 1)
    assert 0 <= place <= 624 and gauss != 0.0


def test_five_items_in_one_place_are_read_and_a_damaged_rest_is_not() -> None:
    odd()
    state = rng.capture()
    gauss = state.pop("numpy_gauss")
    expected = draw()
    assert rng.restore({**state, "numpy_random": (*state["numpy_random"], *gauss)}).exact
    assert draw() == expected
    for wrong in ((1,), (1, "x"), (1, 0.5, 0.5)):
        with pytest.raises(FormatError, match="numpy_random: refused"):
            rng.restore({**state, "numpy_gauss": wrong})


def test_capturing_draws_nothing() -> None:
    first = rng.capture()
    assert rng.capture() == first


def test_a_weight_file_gives_it_back() -> None:
    """CC1: readable with weights_only=True."""
    odd()
    state, out = rng.capture(), io.BytesIO()
    torch.save(state, out)
    out.seek(0)
    expected = draw()
    assert rng.restore(torch.load(out, weights_only=True)).exact
    assert draw() == expected


def test_json_gives_it_back() -> None:
    odd()
    state = rng.capture()
    expected = draw()
    text = json.dumps(rng.to_json(state), allow_nan=False)
    found = rng.from_json(json.loads(text))
    assert found == state
    assert rng.restore(found).exact
    assert draw() == expected


def test_tensors_become_json_too() -> None:
    state = {**rng.capture(), "torch_rng": torch.get_rng_state()}
    assert rng.to_json(state)["torch_rng"] == torch.get_rng_state().tolist()


def public_json() -> dict[str, Any]:
    with tarfile.open(FIXTURE) as archive:
        names = [n for n in archive.getnames() if n.endswith("_data_snapshot.json")]
        file = archive.extractfile(names[0])
        assert file is not None
        return dict(json.load(file)["rng_state"])


def test_the_public_tools_three_items_are_taken_and_reported() -> None:
    state = rng.from_json(public_json())
    report = rng.restore(state)
    assert set(report.streams.values()) == {"restored"}
    assert not report.exact
    assert "deviate" in report.reasons["numpy_random"]
    first = draw()
    rng.restore(state)
    assert draw() == first


BROKEN: dict[str, Any] = {
    "numpy_random": [
        ("MT19937", [1] * 623, 5, 0, 0.0),
        ("PCG64", [1] * 624, 5, 0, 0.0),
        ("MT19937", [1 << 40] * 624, 5, 0, 0.0),
        ("MT19937", [1] * 624, 700, 0, 0.0),
        ("MT19937",),
        "text",
        7,
    ],
    "python_random": [(3, (1, 2), None), (99, (1,) * 625, None), 5, [], ("3", "x", "y")],
    "torch_rng": [[1, 2, 3], [300] * 5056, "x", {}, [0.5] * 5056, [0] * 5055],
}
CASES = [(key, value) for key, values in BROKEN.items() for value in values]


@pytest.mark.parametrize(("key", "value"), CASES)
def test_one_damaged_stream_fails_by_name_and_changes_nothing(key: str, value: Any) -> None:
    """RS7: "Default strict: fail, or load and return a report"."""
    state = rng.capture()
    draw()
    before = rng.capture()
    with pytest.raises(FormatError, match=f"{key}: refused"):
        rng.restore({**state, key: value})
    assert rng.capture() == before


@pytest.mark.parametrize("key", BROKEN)
def test_the_other_streams_are_restored_where_that_is_wanted(key: str) -> None:
    """RS7: "one refused entry ... skips all remaining streams"."""
    state = rng.capture()
    draw()
    report = rng.restore({**state, key: BROKEN[key][0]}, strict=False)
    others = [k for k in state if k not in (key, "numpy_gauss")]
    assert report.streams[key] == "refused" and not report.exact
    assert all(report.streams[k] == "restored" for k in others)
    now = rng.capture()
    assert all(now[k] == state[k] for k in others)
    assert any(line.startswith(f"{key}: refused (") for line in report.lines())


@pytest.mark.parametrize("state", [None, {}])
def test_no_state_at_all_is_missing(state: Any) -> None:
    """RS7: "delete the RNG part"."""
    before = rng.capture()
    with pytest.raises(FormatError, match="python_random: missing"):
        rng.restore(state)
    assert set(rng.restore(state, strict=False).streams.values()) == {"missing"}
    assert rng.capture() == before


def test_an_unknown_stream_is_refused_by_name() -> None:
    """RS7: "unknown version field"."""
    with pytest.raises(FormatError, match="jax_rng: refused"):
        rng.restore({**rng.capture(), "jax_rng": [1]})


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
@pytest.mark.parametrize("value", [[[0] * 16] * 4, [0] * 16, [torch.zeros(16, dtype=torch.uint8)]])
def test_streams_of_devices_that_are_not_here(value: Any) -> None:
    """RS1: "RNG list of 4 devices on a 1-device or CPU-only box"."""
    state = {**rng.capture(), "torch_cuda_rng": value}
    expected = draw()
    with pytest.raises(FormatError, match="torch_cuda_rng: refused .of . CUDA"):
        rng.restore(state)
    report = rng.restore(state, strict=False)
    assert report.streams["torch_rng"] == "restored"
    assert draw() == expected


def test_the_cpu_stream_is_restored_on_the_cpu() -> None:
    """RS1: a ``map_location`` of the whole file moves the state's tensor."""
    state = {**rng.capture(), "torch_rng": torch.get_rng_state()}
    expected = draw()
    assert rng.restore(state).exact
    assert draw() == expected
    moved = {**state, "torch_rng": state["torch_rng"].to("meta")}
    with pytest.raises(FormatError, match="meta"):
        rng.restore(moved)


def test_the_state_given_is_not_changed() -> None:
    state = rng.capture()
    same = copy.deepcopy(state)
    rng.restore(state)
    draw()
    assert state == same
