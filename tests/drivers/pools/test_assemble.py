"""Assembly: the seed's rule on real models, every refusal, and files of all origins."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from castore import (
    FormatError,
    IntegrityError,
    InvalidInputError,
    LayoutError,
    NotFoundError,
    UntrustedPickleError,
)
from castore_pools import Checkpoint, assemble, find_base, open_checkpoint
from castore_pools.values import tensor_digest
from tests.drivers.pools.models import FROZEN, base_of, build, cell, evaluate

ARCHS = ["bertbase", "t5small", "wordavg"]


def paths(zoo: Path, arch: str, index: int = 0) -> tuple[Path, Path]:
    return zoo / cell(arch).base_path, zoo / cell(arch).pool_path(index)


def document(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def saved(tmp_path: Path, value: Any, name: str = "changed.pth") -> Path:
    torch.save(value, tmp_path / name)
    return tmp_path / name


# -- what it gives


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("index", [0, 3])
def test_reassembled_models_reproduce_their_metric(zoo: Path, arch: str, index: int) -> None:
    """Seed: "sd = assemble(...); model.load_state_dict(sd, strict=True)", and "the reassembled
    collect_000.pth reproduces its logged validation metric"."""
    base, pool = paths(zoo, arch, index)
    model = build(arch, seed=99)
    model.load_state_dict(assemble(base, pool), strict=True)
    fields = document(pool)
    assert evaluate(model) == (fields["val_metric"], fields["val_loss"])


@pytest.mark.parametrize("arch", ARCHS)
def test_it_is_the_documents_rule(zoo: Path, arch: str) -> None:
    """Seed: "copies each key in frozen_keys from the base's model_state_dict into the pool
    model_state_dict and returns the full state_dict"."""
    base, pool = paths(zoo, arch)
    expected = dict(document(pool)["model_state_dict"])
    for key in document(pool)["frozen_keys"]:
        expected[key] = document(base)["model_state_dict"][key]
    found = assemble(str(base), str(pool))
    assert list(found) == list(document(base)["model_state_dict"])
    assert all(torch.equal(found[k], expected[k]) for k in expected)
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("arch", ARCHS)
def test_pool_files_are_what_the_document_says(zoo: Path, arch: str) -> None:
    """Seed: "every tensor of the model except the frozen keys (float32)"; "frozen_keys",
    "frozen_source", "collect_step, train_step, val_metric, val_loss"."""
    base, pool = paths(zoo, arch, 2)
    fields = document(pool)
    assert fields["frozen_keys"] == FROZEN[arch]
    keys = document(base)["model_state_dict"].keys()
    assert fields["model_state_dict"].keys() == keys - set(FROZEN[arch])
    floating = [t for t in fields["model_state_dict"].values() if t.is_floating_point()]
    assert {t.dtype for t in floating} == {torch.float32}
    assert fields["frozen_source"] == str(base)
    assert (fields["collect_step"], fields["train_step"]) == (2, 6)


def test_tied_copies_are_filled_and_stay_tied(zoo: Path) -> None:
    """PT1, PT2; seed: "for t5small the three tied copies transformer.shared.weight,
    transformer.encoder.embed_tokens.weight, transformer.decoder.embed_tokens.weight"."""
    state = assemble(*paths(zoo, "t5small"))
    assert len({state[k].data_ptr() for k in FROZEN["t5small"]}) == 1
    model = build("t5small", 5)
    model.load_state_dict(state, strict=True)
    assert model.transformer.shared.weight is model.transformer.encoder.embed_tokens.weight
    with torch.device("meta"):
        hollow = build("t5small", 5)
    hollow.load_state_dict(state, strict=True, assign=True)
    assert not [n for n, p in hollow.named_parameters() if p.is_meta]


def test_a_base_whose_ties_were_stored_apart(zoo: Path, tmp_path: Path) -> None:
    """PT2: three equal copies in the base become one tensor; different ones are refused."""
    base, pool = paths(zoo, "t5small")
    apart = document(base)
    apart["model_state_dict"] = {k: v.clone() for k, v in apart["model_state_dict"].items()}
    state = assemble(saved(tmp_path, apart), pool)
    assert len({state[k].data_ptr() for k in FROZEN["t5small"]}) == 1
    apart["model_state_dict"][FROZEN["t5small"][2]][0, 0] += 1
    with pytest.raises(IntegrityError, match=r"decoder\.embed_tokens\.weight"):
        assemble(saved(tmp_path, apart), pool)
    unpinned = document(pool)
    del unpinned["pin"]
    with pytest.raises(IntegrityError, match="tied and differ"):
        assemble(tmp_path / "changed.pth", saved(tmp_path, unpinned, "unpinned.pth"))


def test_state_dict_metadata_is_kept(zoo: Path) -> None:
    found = assemble(*paths(zoo, "wordavg"))
    assert found._metadata == build("wordavg").state_dict()._metadata  # type: ignore[attr-defined]


# -- files of other origins


def plain(zoo: Path, tmp_path: Path, arch: str = "bertbase") -> tuple[Path, Path]:
    """A base and a pool file as the document's own script writes them: no pin, no registry."""
    base, pool = paths(zoo, arch)
    kept = {k: v for k, v in document(pool).items() if k != "pin"}
    whole = {
        "model_state_dict": document(base)["model_state_dict"],
        "config": {},
        "val_metric": 0.5,
    }
    return saved(tmp_path, whole, "base.pth"), saved(tmp_path, kept, "pool.pth")


def test_files_without_a_pin(zoo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files without a pin, such as the document's own, assemble and are reported as unpinned."""
    base, pool = plain(zoo, tmp_path)
    with caplog.at_level(logging.WARNING, "castore.pools"):
        found = assemble(base, pool)
    assert "unpinned" in caplog.text and str(pool) in caplog.text
    pinned = assemble(*paths(zoo, "bertbase"))
    assert all(torch.equal(found[k], pinned[k]) for k in pinned)
    with pytest.raises(IntegrityError, match="unpinned"):
        assemble(base, pool, require_pin=True)


def test_frozen_source_is_text_and_never_opened(zoo: Path, tmp_path: Path) -> None:
    """PT4, SE2; seed: "the local path of the base checkpoint at collection time"."""
    base, pool = paths(zoo, "bertbase")
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)  # opening it would wait for ever
    for source in (str(fifo), "/nowhere/else.pth", "file:///etc/passwd", "s3://other/x", "../../x"):
        fields = document(pool) | {"frozen_source": source}
        assert assemble(base, saved(tmp_path, fields))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_other_pickle_protocols(zoo: Path, tmp_path: Path, protocol: int) -> None:
    base, pool = paths(zoo, "bertbase")
    torch.save(document(pool), tmp_path / "p.pth", pickle_protocol=protocol)
    assert assemble(base, tmp_path / "p.pth")


def test_files_of_torch_before_1_6(zoo: Path, tmp_path: Path) -> None:
    base, pool = paths(zoo, "t5small")
    old = [tmp_path / "base.pth", tmp_path / "pool.pth"]
    for path, target in zip((base, pool), old, strict=True):
        torch.save(document(path), target, _use_new_zipfile_serialization=False)
    found = assemble(*old)
    assert len({found[k].data_ptr() for k in FROZEN["t5small"]}) == 1
    torch.save(pickle.loads, tmp_path / "bad.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(UntrustedPickleError):
        assemble(base, tmp_path / "bad.pth")


def test_safetensors_pools(zoo: Path, tmp_path: Path) -> None:
    """Fields stand in the header as JSON, aliases as texts that name a tensor."""
    base, pool = paths(zoo, "t5small")
    whole = document(base)["model_state_dict"]
    first, *others = FROZEN["t5small"]
    kept = {k: v for k, v in whole.items() if k not in others}
    safetensors.torch.save_file(kept, tmp_path / "base.safetensors", dict.fromkeys(others, first))
    fields = document(pool)
    texts = {k: json.dumps(v) for k, v in fields.items() if k != "model_state_dict"}
    safetensors.torch.save_file(fields["model_state_dict"], tmp_path / "p.safetensors", texts)
    found = assemble(tmp_path / "base.safetensors", tmp_path / "p.safetensors", require_pin=True)
    assert all(torch.equal(found[k], v) for k, v in assemble(base, pool).items())
    assert len({found[k].data_ptr() for k in FROZEN["t5small"]}) == 1


def test_extra_state_that_is_no_tensor(tmp_path: Path) -> None:
    """CC3: a text and a number in the state dict pass through; a frozen one comes from the base."""
    state: dict[str, Any] = {"w": torch.ones(2), "note": "a", "n": 3, "frozen": "f"}
    base = saved(tmp_path, {"model_state_dict": state}, "base.pth")
    pool: dict[str, Any] = {
        "model_state_dict": {k: state[k] for k in ("w", "note", "n")},
        "frozen_keys": ["frozen"],
    }
    found: dict[str, Any] = dict(assemble(base, saved(tmp_path, pool)))
    assert torch.equal(found.pop("w"), torch.ones(2))
    assert found == {"note": "a", "n": 3, "frozen": "f"}
    pool["model_state_dict"]["n"] = "three"
    with pytest.raises(LayoutError, match="n: a plain str"):
        assemble(base, saved(tmp_path, pool))


def test_views_and_strides(tmp_path: Path) -> None:
    """CC2, CC3: slices, transposed, channels-last and expanded tensors assemble to their values."""
    big = torch.randn(1000)
    state = {
        "slice": big[10:20],
        "t": torch.randn(3, 4).t(),
        "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(3),
        "empty": torch.zeros(0, 2),
        "frozen": big[500:900].reshape(20, 20).t(),
    }
    base = saved(tmp_path, {"model_state_dict": state}, "base.pth")
    kept = {k: v for k, v in state.items() if k != "frozen"}
    pool = saved(tmp_path, {"model_state_dict": kept, "frozen_keys": ["frozen"]})
    found = assemble(base, pool)
    assert all(torch.equal(found[k], v) for k, v in state.items())
    assert tensor_digest(state["t"]) == tensor_digest(state["t"].contiguous())


# -- generated weights


def test_generated_weights(zoo: Path) -> None:
    """Seed: "The same function applies to generated weights: fill the generated tensors, then add
    the frozen keys from the base checkpoint"; the keys are by default the registry record's."""
    base, pool = paths(zoo, "t5small")
    generated = {k: torch.randn_like(v) for k, v in document(pool)["model_state_dict"].items()}
    found = assemble(base, generated)
    assert all(found[k] is v for k, v in generated.items())
    build("t5small", 3).load_state_dict(found, strict=True)
    again = assemble(base, generated, frozen_keys=FROZEN["t5small"])
    assert all(torch.equal(again[k], v) for k, v in found.items())


def test_generated_weights_that_are_refused(zoo: Path, tmp_path: Path) -> None:
    """PT2: tensors without values are named; PT4: missing, unknown and frozen keys too."""
    base, pool = paths(zoo, "bertbase")
    good = document(pool)["model_state_dict"]
    hollow = good | {"classifier.bias": torch.empty(3, device="meta")}
    with pytest.raises(LayoutError, match=r"meta.*classifier\.bias"):
        assemble(base, hollow)
    with pytest.raises(LayoutError, match=r"missing from both: classifier\.bias"):
        assemble(base, {k: v for k, v in good.items() if k != "classifier.bias"})
    alone = tmp_path / "base.pth"
    alone.write_bytes(base.read_bytes())
    with pytest.raises(LayoutError, match="frozen_keys"):
        assemble(alone, good)


# -- refusals


def broken(
    zoo: Path, tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]
) -> Any:
    base, pool = paths(zoo, "bertbase")
    fields = document(pool)
    change(fields, fields["model_state_dict"])
    return assemble(base, saved(tmp_path, fields))


WORDS = FROZEN["bertbase"][0]


def test_a_frozen_key_that_the_base_lacks(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"frozen keys that the base lacks: other\.weight"):
        broken(zoo, tmp_path, lambda f, s: f["frozen_keys"].append("other.weight"))


def test_a_key_both_frozen_and_present(zoo: Path, tmp_path: Path) -> None:
    """PT4 (e): the member also contains a frozen key."""
    with pytest.raises(LayoutError, match=f"both frozen and present: {WORDS}"):
        broken(zoo, tmp_path, lambda f, s: s.update({WORDS: torch.ones(64, 16)}))


def test_a_key_missing_from_both(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"missing from both: classifier\.bias"):
        broken(zoo, tmp_path, lambda f, s: s.pop("classifier.bias"))


def test_an_unknown_key(zoo: Path, tmp_path: Path) -> None:
    """PT4 (f)."""
    with pytest.raises(LayoutError, match="keys that the base lacks: extra"):
        broken(zoo, tmp_path, lambda f, s: s.update(extra=torch.ones(1)))


def test_a_shape_that_differs(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"classifier\.bias: \(4,\), the base has \(3,\)"):
        broken(zoo, tmp_path, lambda f, s: s.update({"classifier.bias": torch.ones(4)}))


def test_a_dtype_that_differs(zoo: Path, tmp_path: Path) -> None:
    """The dtype is float32 by default and otherwise what the collection record says."""
    half = torch.ones(3).bfloat16()
    with pytest.raises(LayoutError, match=r"classifier\.bias: bfloat16, expected float32"):
        broken(zoo, tmp_path, lambda f, s: s.update({"classifier.bias": half}))
    with pytest.raises(LayoutError, match=r"classifier\.bias: int64, expected float32"):
        broken(zoo, tmp_path, lambda f, s: s.update({"classifier.bias": half.long()}))


def test_dtypes_of_files_that_record_none(zoo: Path, tmp_path: Path) -> None:
    base, pool = plain(zoo, tmp_path)
    fields = document(pool)
    fields["model_state_dict"] = {k: v.half() for k, v in fields["model_state_dict"].items()}
    half = saved(tmp_path, fields)
    with pytest.raises(LayoutError, match=r"say dtype=.*float16, expected float32"):
        assemble(base, half)
    assert {t.dtype for t in assemble(base, half, dtype="float16").values()} == {torch.float16}
    whole = document(base)
    whole["model_state_dict"] = {k: v.half() for k, v in whole["model_state_dict"].items()}
    with pytest.raises(LayoutError, match="the base has float16"):
        assemble(saved(tmp_path, whole, "half.pth"), pool)


@pytest.mark.parametrize("change", ["other", "one value", "sign of zero"])
def test_another_base(zoo: Path, tmp_path: Path, change: str) -> None:
    """PT4 (b), (c): another base of equal shapes, one changed value; key and both digests are
    named."""
    base, pool = paths(zoo, "bertbase")
    other = document(base)
    if change == "other":
        other = document(base_of(tmp_path, "bertbase", seed=7))
    elif change == "one value":
        other["model_state_dict"][WORDS][5, 5] += 1e-6
    else:
        other["model_state_dict"][WORDS][0] = -other["model_state_dict"][WORDS][0]
    with pytest.raises(IntegrityError, match=WORDS) as refused:
        assemble(saved(tmp_path, other), pool)
    found = tensor_digest(other["model_state_dict"][WORDS])
    assert found in str(refused.value) and document(pool)["pin"]["frozen"][WORDS] in str(
        refused.value
    )


def test_a_base_that_is_not_there(zoo: Path, tmp_path: Path) -> None:
    """PT4 (d)."""
    with pytest.raises(NotFoundError, match=r"gone\.pth"):
        assemble(tmp_path / "gone.pth", paths(zoo, "bertbase")[1])


@pytest.mark.parametrize(
    "pin",
    [
        {},
        {"base": "", "frozen": {}, "dtype": "float99", "ties": []},
        {"base": 1, "frozen": {}, "dtype": "float32", "ties": []},
        {"base": "", "frozen": {"x": "0"}, "dtype": "float32", "ties": []},
        ["pin"],
    ],
)
def test_malformed_pins(zoo: Path, tmp_path: Path, pin: Any) -> None:
    with pytest.raises(LayoutError, match="pin"):
        broken(zoo, tmp_path, lambda f, s: f.update(pin=pin))


@pytest.mark.parametrize("keys", [None, "words", [1], [WORDS, WORDS]])
def test_malformed_frozen_keys(zoo: Path, tmp_path: Path, keys: Any) -> None:
    with pytest.raises(LayoutError, match="frozen_keys"):
        broken(zoo, tmp_path, lambda f, s: f.update(frozen_keys=keys))


class Runs:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("where", ["base", "pool"])
@pytest.mark.parametrize("new_format", [True, False])
def test_nothing_is_run(zoo: Path, tmp_path: Path, where: str, new_format: bool) -> None:
    """SE1: read with weights_only=True; nothing is unpickled that could run code."""
    given = list(paths(zoo, "bertbase"))
    fields = document(given[where == "pool"]) | {"note": Runs(tmp_path / "ran")}
    bad = tmp_path / "bad.pth"
    torch.save(fields, bad, _use_new_zipfile_serialization=new_format)
    given[where == "pool"] = bad
    with pytest.raises(UntrustedPickleError, match=r"bad\.pth"):
        assemble(*given)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_checkpoint(zoo: Path, tmp_path: Path) -> None:
    """CC7: the file is named."""
    base, pool = paths(zoo, "bertbase")
    cut = tmp_path / "cut.pth"
    for data in (b"", pool.read_bytes()[:-1], pool.read_bytes()[:5000], b"version https://git-lfs"):
        cut.write_bytes(data)
        with pytest.raises(FormatError, match=r"cut\.pth"):
            assemble(base, cut)
    with pytest.raises(LayoutError, match="model_state_dict"):
        assemble(base, saved(tmp_path, {"weights": 1}))
    with pytest.raises(InvalidInputError, match="regular"):
        assemble(base, tmp_path)
    with zipfile.ZipFile(cut, "w") as z:
        z.writestr("x", b"")
    with pytest.raises(LayoutError, match=r"cut\.pth"):
        assemble(base, cut)


# -- finding the base


def test_the_base_is_found_by_the_registry(zoo: Path) -> None:
    """Seed: "on the Hub it is the ckpt_path of the registry record"."""
    base, pool = paths(zoo, "t5small", 1)
    assert zoo / find_base(zoo, open_checkpoint(pool)) == base


def test_the_base_is_found_by_its_digest(zoo: Path, tmp_path: Path) -> None:
    """PT4 (a): right base moved elsewhere, and others of equal shapes beside it."""
    _, pool = paths(zoo, "bertbase", 1)
    for seed in (5, 6):
        base_of(tmp_path, "bertbase", seed, cell=cell("bertbase", model_id=f"other_{seed}"))
    moved = tmp_path / "zoo/elsewhere/bert/moved.pth"
    moved.parent.mkdir(parents=True)
    moved.write_bytes((zoo / cell("bertbase").base_path).read_bytes())
    loose = tmp_path / "collect_001.pth"
    loose.write_bytes(pool.read_bytes())
    assert find_base(tmp_path, open_checkpoint(loose)) == "zoo/elsewhere/bert/moved.pth"
    moved.unlink()
    with pytest.raises(NotFoundError, match=WORDS):
        find_base(tmp_path, open_checkpoint(loose))


def test_an_unpinned_files_base_is_found_by_name_only(zoo: Path, tmp_path: Path) -> None:
    base, pool = plain(zoo, tmp_path)
    target = tmp_path / cell("bertbase").pool_path(0)
    target.parent.mkdir(parents=True)
    target.write_bytes(pool.read_bytes())
    there = tmp_path / "zoo/agnews/bertbase/other_010.pth"
    there.parent.mkdir(parents=True)
    there.write_bytes(base.read_bytes())
    with pytest.raises(NotFoundError):
        find_base(tmp_path, open_checkpoint(target))
    there.rename(tmp_path / cell("bertbase").base_path)
    assert find_base(tmp_path, open_checkpoint(target)) == cell("bertbase").base_path


@pytest.mark.parametrize(
    "ckpt_path",
    [
        "../../x.pth",
        "/etc/passwd",
        "zoo/../a/b.pth",
        "zoo/a/%2e%2e/b.pth",
        "zoo\\a\\b\\c.pth",
        "C:x",
        "zoo/a/b/c\0.pth",
        "s3://other/zoo/a/b/c.pth",
        "file:///zoo/a/b/c.pth",
        "zoo/a/b/c#.pth",
        "zoo/a/b/c?;.pth",
        None,
        3,
    ],
)
def test_a_registrys_paths_are_checked(zoo: Path, tmp_path: Path, ckpt_path: Any) -> None:
    """SE2: refused with the field's name, before anything is opened."""
    registry = tmp_path / cell("bertbase").registry_path
    registry.parent.mkdir(parents=True)
    registry.write_text(json.dumps([{"cell": "bertbase__agnews", "ckpt_path": ckpt_path}]))
    with pytest.raises(LayoutError, match="ckpt_path"):
        find_base(tmp_path, open_checkpoint(paths(zoo, "bertbase")[1]))


def test_opened_checkpoints_are_taken(zoo: Path) -> None:
    base, pool = (open_checkpoint(p) for p in paths(zoo, "bertbase"))
    assert isinstance(base, Checkpoint)
    assert list(assemble(base, pool)) == base.keys()


def test_nan_is_compared_by_its_bits(tmp_path: Path) -> None:
    """A frozen NaN equals itself; tied copies of it too."""
    t = torch.tensor([float("nan"), 1.0])
    state = {"shared.weight": t, "encoder.embed_tokens.weight": t.clone(), "w": torch.ones(1)}
    base = saved(tmp_path, {"model_state_dict": state}, "base.pth")
    keys = list(state)[:2]
    pool = saved(tmp_path, {"model_state_dict": {"w": state["w"]}, "frozen_keys": keys})
    found = assemble(base, pool)
    assert found[keys[0]] is found[keys[1]]


def test_a_checkpoint_in_memory(zoo: Path) -> None:
    from castore_pools.sources import BytesSource

    base, pool = paths(zoo, "bertbase")
    given = open_checkpoint(BytesSource(pool.read_bytes(), "memory"))
    assert assemble(base, given)
    with pytest.raises(FormatError, match="memory"):
        open_checkpoint(BytesSource(io.BytesIO(b"x").getvalue(), "memory"))
