"""The spread of a pool, streaming; and full files made small afterwards."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from castore import IntegrityError, InvalidInputError, LayoutError
from castore_pools import assemble, open_checkpoint, pool_stats, reduce_files, verify_zoo
from castore_pools import stats as stats_module
from castore_pools.layout import survey
from castore_pools.places import FolderPlace
from castore_pools.stats import spread
from tests.drivers.pools.models import FROZEN, cell

# -- stats


def states(zoo: Path, arch: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    where = cell(arch)
    files = [torch.load(zoo / where.pool_path(i), weights_only=True) for i in range(4)]
    base = torch.load(zoo / where.base_path, weights_only=True)["model_state_dict"]
    return [f["model_state_dict"] for f in files], base


@pytest.mark.parametrize("arch", ["bertbase", "wordavg"])
@pytest.mark.parametrize("stretch", [7, 1 << 20])
def test_the_spread_against_numpy(
    zoo: Path, arch: str, stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_module, "STRETCH", stretch)
    place = FolderPlace(zoo)
    (files,) = (f for f in survey(place).cells if f.cell.arch == arch)
    members, base = states(zoo, arch)
    found = {s.key: s for s in pool_stats(place, files)}
    floating = [k for k, v in members[0].items() if v.is_floating_point()]
    assert list(found) == floating
    for key in floating:
        values = np.stack([m[key].double().numpy() for m in members])
        one, variance = found[key], values.var(0)
        assert one.mean == pytest.approx(values.mean())
        assert (one.min, one.max) == (values.min(), values.max())
        assert one.std == pytest.approx(math.sqrt(variance.mean()), abs=1e-12)
        assert one.largest == pytest.approx(math.sqrt(variance.max()), abs=1e-12)
        away = values - base[key].double().numpy()
        assert one.from_base == pytest.approx(math.sqrt((away**2).mean()))
        assert (one.elements, one.files) == (values[0].size, 4)


def saved(folder: Path, states: list[dict[str, torch.Tensor]]) -> list[Any]:
    for i, state in enumerate(states):
        torch.save({"model_state_dict": state}, folder / f"{i}.pth")
    return [open_checkpoint(folder / f"{i}.pth") for i in range(len(states))]


def test_memory_is_that_of_a_stretch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming, in bounded memory: whatever the tensor's size and the number of files."""
    monkeypatch.setattr(stats_module, "STRETCH", 1 << 12)
    members = saved(tmp_path, [{"w": torch.randn(1 << 18)} for _ in range(6)])
    asked = []
    for member in members:
        fill = member.source.fill

        def watched(start: int, view: memoryview, fill: Any = fill) -> None:
            asked.append(len(view))
            fill(start, view)

        member.source.fill = watched
    tracemalloc.start()
    (found,) = spread(members, None)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert found.from_base is None
    assert max(asked) == 4 << 12
    assert sum(n for n in asked if n > 100) == 6 * (4 << 18)  # and each member's header


def test_odd_pools(tmp_path: Path) -> None:
    one = saved(
        tmp_path, [{"w": torch.tensor([1.0, 3.0]), "e": torch.zeros(0), "n": torch.arange(3)}]
    )
    found = {s.key: s for s in spread(one, one[0])}
    assert found.keys() == {"w", "e"}
    assert (found["w"].std, found["w"].mean, found["w"].from_base) == (0, 2, 0)
    assert math.isnan(found["e"].mean)
    with pytest.raises(LayoutError, match="without files"):
        list(spread([], None))
    with pytest.raises(LayoutError, match="'x'"):
        list(spread(one, None, ["x"]))
    bad = torch.tensor([1.0, float("nan")])
    (found_bad,) = spread(saved(tmp_path, [{"w": bad}, {"w": bad}]), None)
    assert math.isnan(found_bad.mean) and math.isnan(found_bad.max)
    mixed = saved(tmp_path, [{"w": torch.ones(2)}, {"w": torch.ones(3)}])
    with pytest.raises(LayoutError, match="another shape"):
        list(spread(mixed, None))
    turned = torch.randn(3, 4).bfloat16()
    (found_turned,) = spread(saved(tmp_path, [{"w": turned.t()}, {"w": turned.t() * 2}]), None)
    assert found_turned.mean == pytest.approx(float(turned.double().mean() * 1.5))


def test_a_large_offset_loses_nothing(tmp_path: Path) -> None:
    """Welford's recurrence: the spread of values around 10^6 is that of values around 0."""
    torch.manual_seed(0)
    around = [torch.randn(100, dtype=torch.float64) * 1e-3 for _ in range(5)]
    near = spread(saved(tmp_path, [{"w": a} for a in around]), None)
    expected = next(iter(near)).std
    far = spread(saved(tmp_path, [{"w": a + 1e6} for a in around]), None)
    assert next(iter(far)).std == pytest.approx(expected, rel=1e-6)


# -- reduce


def full(zoo: Path, root: Path, arch: str) -> Path:
    """A layout whose pool files are full."""
    shutil.copytree(zoo, root)
    where = cell(arch)
    for i in range(4):
        path = root / where.pool_path(i)
        fields = torch.load(path, weights_only=True)
        del fields["pin"]
        whole = assemble(zoo / where.base_path, zoo / where.pool_path(i))
        torch.save(fields | {"model_state_dict": whole, "frozen_keys": []}, path)
    return root / where.base_path


@pytest.mark.parametrize("arch", ["bertbase", "t5small"])
def test_keys_that_never_changed_are_taken_out(zoo: Path, tmp_path: Path, arch: str) -> None:
    base, where = full(zoo, tmp_path / "z", arch), cell(arch)
    folder = tmp_path / "z" / where.pool_folder
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    planned = reduce_files(base, folder, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    done = reduce_files(base, folder, tmp_path / "out")
    assert done.keys == planned.keys
    assert set(done.keys) >= set(FROZEN[arch])
    assert done.after < done.before == sum(map(len, before.values()))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    for i in range(4):
        found = assemble(base, tmp_path / "out" / f"collect_{i:03d}.pth", require_pin=True)
        expected = assemble(zoo / where.base_path, zoo / where.pool_path(i))
        assert all(torch.equal(found[k], v) for k, v in expected.items())
        fields = torch.load(tmp_path / "out" / f"collect_{i:03d}.pth", weights_only=True)
        assert fields["collect_step"] == i


def test_in_place_the_record_follows(zoo: Path, tmp_path: Path) -> None:
    base, where = full(zoo, tmp_path / "z", "t5small"), cell("t5small")
    folder = tmp_path / "z" / where.pool_folder
    done = reduce_files(base, folder, folder)
    bodies = json.loads((tmp_path / "z" / where.registry_path).read_text())
    body = next(b for b in bodies if b["arch"] == "t5small")
    assert body["frozen_keys"] == list(done.keys)
    assert body["total_params"] == body["frozen_params"] + body["generated_params"]
    assert not [f for f in verify_zoo(tmp_path / "z") if f.broken]
    again = reduce_files(base, folder, folder)
    assert again.keys == done.keys


def test_a_tie_goes_as_a_whole(tmp_path: Path) -> None:
    """A tied key is taken out with all its names; copies that differ are refused."""
    tied = torch.randn(4)
    torch.save(
        {"model_state_dict": {"a": tied, "b": tied, "c": torch.ones(2)}}, tmp_path / "base.pth"
    )
    (tmp_path / "pool").mkdir()
    state = {"a": tied.clone(), "b": tied + 1, "c": torch.zeros(2)}
    torch.save({"model_state_dict": state}, tmp_path / "pool/collect_000.pth")
    with pytest.raises(IntegrityError, match="a and b are tied and differ"):
        reduce_files(tmp_path / "base.pth", tmp_path / "pool", tmp_path / "out")
    state["b"] = state["a"]
    torch.save({"model_state_dict": state}, tmp_path / "pool/collect_000.pth")
    done = reduce_files(tmp_path / "base.pth", tmp_path / "pool", tmp_path / "out")
    assert done.keys == ("a", "b")


def test_what_cannot_be_reduced(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    torch.save({"model_state_dict": state}, tmp_path / "base.pth")
    (tmp_path / "pool").mkdir()
    with pytest.raises(LayoutError, match="no collect_NNN"):
        reduce_files(tmp_path / "base.pth", tmp_path / "pool", tmp_path / "out")
    torch.save({"model_state_dict": state}, tmp_path / "pool/collect_000.pth")
    with pytest.raises(InvalidInputError, match="nothing differs"):
        reduce_files(tmp_path / "base.pth", tmp_path / "pool", tmp_path / "out")
    torch.save({"model_state_dict": {"a": state["a"]}}, tmp_path / "pool/collect_000.pth")
    with pytest.raises(LayoutError, match="missing from both: b"):
        reduce_files(tmp_path / "base.pth", tmp_path / "pool", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_reducing_vouches_for_no_other_base(zoo: Path, tmp_path: Path) -> None:
    """What was taken out before cannot be compared: its pin decides, and none is made up."""
    where = cell("wordavg")
    base, folder = zoo / where.base_path, tmp_path / "pool"
    shutil.copytree(zoo / where.pool_folder, folder)
    other = torch.load(base, weights_only=True)
    other["model_state_dict"]["words.weight"] += 1
    torch.save(other, tmp_path / "other.pth")
    with pytest.raises(IntegrityError, match=r"not the one it was collected from: words\.weight"):
        reduce_files(tmp_path / "other.pth", folder, folder)
    assert reduce_files(base, folder, tmp_path / "same").keys == ("words.weight",)
    for path in folder.iterdir():
        fields = torch.load(path, weights_only=True)
        del fields["pin"]
        torch.save(fields, path)
    for given in (base, tmp_path / "other.pth"):
        with pytest.raises(LayoutError, match=r"words\.weight taken out already and no pin"):
            reduce_files(given, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_value_that_comes_back_is_still_a_change(tmp_path: Path) -> None:
    """The bytes never changed: one file that differs is enough to keep a key."""
    base = {"a": torch.ones(2), "b": torch.zeros(2)}
    torch.save({"model_state_dict": base}, tmp_path / "base.pth")
    (tmp_path / "pool").mkdir()
    for i, a in enumerate([1.0, 2.0, 1.0]):
        state = {"a": torch.full((2,), a), "b": torch.full((2,), -0.0)}
        torch.save({"model_state_dict": state}, tmp_path / f"pool/collect_{i:03d}.pth")
    done = reduce_files(tmp_path / "base.pth", tmp_path / "pool", tmp_path / "out")
    assert done.keys == ()  # -0.0 is not the base's 0.0, byte by byte
