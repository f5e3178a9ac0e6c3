"""Collection: what is frozen, what is written, interruptions, several collectors at once."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from castore import (
    AlreadyExistsError,
    IntegrityError,
    InvalidInputError,
    LayoutError,
    UntrustedPickleError,
)
from castore_pools import PoolCollector, assemble, save_base, verify_zoo
from castore_pools.freeze import count_elements, frozen_keys, saved_state
from castore_pools.names import STATE
from castore_pools.registry import read_record
from tests.drivers.pools.models import (
    FROZEN,
    WordModel,
    base_of,
    batch,
    batches,
    build,
    cell,
    collect,
    evaluate,
    logits,
    train,
)


def record(root: Path, arch: str) -> dict[str, Any]:
    found = read_record(root, cell(arch))
    assert found is not None
    return found


def collector(root: Path, arch: str = "wordavg", count: int = 4, **more: Any) -> tuple[Any, Any]:
    """A model of other weights than the base's, and its collector."""
    base = root / cell(arch).base_path
    if not base.exists():
        base_of(root, arch)
    model = build(arch, 1)
    more.setdefault("evaluate", evaluate)
    return model, PoolCollector(model, base, 2, 1e-3, count=count, **more)


def content(root: Path, arch: str = "wordavg") -> dict[str, bytes]:
    folder = root / cell(arch).pool_folder
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


# -- what is written


def test_the_layout(zoo: Path) -> None:
    """Seed: the table of files, and "one record per cell: base training info, collect config,
    per-checkpoint logs, pool statistics"."""
    for arch in FROZEN:
        where, found = cell(arch), record(zoo, arch)
        names = [f"collect_{i:03d}.pth" for i in range(4)]
        assert sorted(os.listdir(zoo / where.pool_folder)) == names
        config = json.loads((zoo / where.config_path).read_text())
        assert config == loaded(zoo / where.base_path)["config"] == found["training_info"]["config"]
        settings = json.loads((zoo / where.collect_config_path).read_text())
        assert settings == found["collect_config"]
        assert (settings["collect_lr"], settings["save_every"]) == (1e-3, 2)
        assert found["ckpt_path"] == where.base_path
        assert [log["file"] for log in found["checkpoints"]] == names
        for log in found["checkpoints"]:
            data = (zoo / where.pool_folder / log["file"]).read_bytes()
            assert log["sha256"] == hashlib.sha256(data).hexdigest()
            fields = loaded(zoo / where.pool_folder / log["file"])
            assert all(fields[k] == log[k] for k in ("val_metric", "val_loss", "train_step"))
        metrics = [log["val_metric"] for log in found["checkpoints"]]
        assert found["pool"]["val_metric"]["mean"] == pytest.approx(np.mean(metrics))
        assert found["pool"]["val_metric"]["std"] == pytest.approx(np.std(metrics))
        assert found["pool"]["count"] == 4


def test_the_base(zoo: Path) -> None:
    """Seed: "full model_state_dict, training config, val metric; word-level models also store the
    vocabulary stoi"."""
    base = loaded(zoo / cell("wordavg").base_path)
    assert base["model_state_dict"].keys() == WordModel().state_dict().keys()
    assert base["stoi"]["w7"] == 7
    assert {"config", "val_metric", "val_loss"} <= base.keys()
    assert "stoi" not in loaded(zoo / cell("bertbase").base_path)


def test_ties_count_once(zoo: Path) -> None:
    """Seed: "generated_params in the registry record (total minus frozen_params)"; PT1."""
    found = record(zoo, "t5small")
    model = build("t5small")
    distinct = sum(p.numel() for p in model.parameters())  # names each parameter once
    assert found["total_params"] == distinct
    assert found["frozen_params"] == 64 * 16
    assert found["generated_params"] == distinct - 64 * 16
    files = loaded(zoo / cell("t5small").pool_path(0))["model_state_dict"]
    assert found["generated_params"] == sum(t.numel() for t in files.values())
    assert found["pin"]["ties"] == [FROZEN["t5small"]]


def test_the_assemble_check_is_recorded(zoo: Path) -> None:
    """Seed: "training_info.assemble_check in the registry"."""
    for arch in FROZEN:
        check = record(zoo, arch)["training_info"]["assemble_check"]
        first = record(zoo, arch)["checkpoints"][0]
        assert check["ok"] is True
        assert check["val_metric"] == check["logged_val_metric"] == first["val_metric"]


def test_a_check_that_fails_is_recorded_and_an_error(tmp_path: Path) -> None:
    calls = iter(range(100))
    model, pool = collector(tmp_path, count=2, evaluate=lambda m: (float(next(calls)), 0.0))
    with pool, pytest.raises(IntegrityError, match=r"collect_000\.pth gives 2\.0, logged 0\.0"):
        train(pool, model)
    assert record(tmp_path, "wordavg")["training_info"]["assemble_check"]["ok"] is False


# -- freezing


@pytest.mark.parametrize("arch", list(FROZEN))
def test_the_token_embedding_is_frozen_with_all_its_names(tmp_path: Path, arch: str) -> None:
    """Seed: "During collection the vocabulary token-embedding matrix is frozen, so it is identical
    in all 200 pool members and in the base model"."""
    model, pool = collector(tmp_path, arch)
    before = {
        k: v.clone() for k, v in loaded(tmp_path / cell(arch).base_path)["model_state_dict"].items()
    }
    with pool:
        assert pool.frozen_keys == FROZEN[arch]
        assert not {id(p) for g in pool.optimizer.param_groups for p in g["params"]} & {
            id(dict(model.named_parameters(remove_duplicate=False))[k]) for k in FROZEN[arch]
        }
        train(pool, model)
    after = model.state_dict()
    assert all(torch.equal(after[k], before[k]) for k in FROZEN[arch])
    assert all(p.requires_grad for p in model.parameters())  # as it was
    moved = [k for k in after.keys() - set(FROZEN[arch]) if not torch.equal(after[k], before[k])]
    assert {k for k in after if k.startswith(("head.", "classifier."))} <= set(moved)


def test_it_starts_from_the_converged_base_with_a_fresh_optimizer(tmp_path: Path) -> None:
    """Seed: "continuing training from the converged base model with a fresh AdamW"."""
    model, pool = collector(tmp_path)
    with pool:
        assert evaluate(model)[1] == loaded(tmp_path / cell("wordavg").base_path)["val_loss"]
        assert type(pool.optimizer) is torch.optim.AdamW
        assert not pool.optimizer.state
        assert pool.optimizer.param_groups[0]["lr"] == 1e-3


def test_a_frozen_parameter_that_changes_is_found(tmp_path: Path) -> None:
    """The digest is checked after collection."""
    model, pool = collector(tmp_path, count=1)
    with pool, pytest.raises(IntegrityError, match=r"words\.weight was frozen and changed"):
        with torch.no_grad():
            model.words.weight[0, 0] += 1e-7
        train(pool, model)
    assert (tmp_path / cell("wordavg").pool_folder / STATE).exists()


def test_frozen_keys_of_ones_own_choice(tmp_path: Path) -> None:
    model, pool = collector(tmp_path, "t5small", frozen=["transformer.shared.weight", "head.bias"])
    with pool:
        assert pool.frozen_keys == [*FROZEN["t5small"], "head.bias"]
        train(pool, model)
    state = assemble(tmp_path / cell("t5small").base_path, tmp_path / cell("t5small").pool_path(3))
    build("t5small", 4).load_state_dict(state, strict=True)


@pytest.mark.parametrize("frozen", ["everything", ["no.such.key"]])
def test_frozen_keys_that_are_none(tmp_path: Path, frozen: Any) -> None:
    _, pool = collector(tmp_path, frozen=frozen)
    with pytest.raises(InvalidInputError, match="frozen"):
        pool.__enter__()


def test_which_embedding_is_the_vocabularys() -> None:
    """A word-level model's is told by its vocabulary; several that fit are asked about."""
    two = nn.ModuleDict({"a": nn.Embedding(9, 2), "b": nn.Embedding(5, 2)})
    assert frozen_keys(two, "token-embedding", {str(i): i for i in range(9)}) == ["a.weight"]
    with pytest.raises(InvalidInputError, match="2 embeddings"):
        frozen_keys(two, "token-embedding", None)
    with pytest.raises(InvalidInputError, match="0 embeddings"):
        frozen_keys(nn.Linear(2, 2), "token-embedding", None)
    bag = nn.Sequential(nn.EmbeddingBag(9, 2), nn.Linear(2, 1))
    assert frozen_keys(bag, "token-embedding", None) == ["0.weight"]
    tied = nn.ModuleDict({"e": nn.Embedding(9, 2), "out": nn.Linear(2, 9, bias=False)})
    tied["out"].weight = tied["e"].weight
    assert frozen_keys(tied, "token-embedding", None) == ["e.weight", "out.weight"]


def test_everything_frozen(tmp_path: Path) -> None:
    _, pool = collector(tmp_path, frozen=list(WordModel().state_dict()))
    with pytest.raises(InvalidInputError, match="nothing is left"):
        pool.__enter__()


# -- interruptions


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adam"])
@pytest.mark.parametrize("stop", [0, 1, 2, 5, 7])
def test_an_interrupted_collection_goes_on(tmp_path: Path, optimizer: str, stop: int) -> None:
    """Resumed at the next file with the same optimizer and RNG state: byte for byte the same."""
    for name in ("whole", "cut"):
        model, pool = collector(tmp_path / name, optimizer=optimizer)
        torch.manual_seed(5)
        if name == "cut":
            with pytest.raises(KeyboardInterrupt), pool:
                train(pool, model, stop)
            torch.manual_seed(1234)
            model, pool = collector(tmp_path / name, optimizer=optimizer)
        with pool:
            assert pool.files == (stop // 2 if name == "cut" else 0)
            train(pool, model)
            assert pool.done
    whole, cut = (tmp_path / n / cell("wordavg").pool_folder for n in ("whole", "cut"))
    assert sorted(p.name for p in cut.iterdir()) == sorted(p.name for p in whole.iterdir())
    for path in whole.iterdir():
        a, b = loaded(path), loaded(cut / path.name)
        assert all(
            torch.equal(a["model_state_dict"][k], v) for k, v in b["model_state_dict"].items()
        )
        assert [a[k] for k in ("val_metric", "val_loss", "train_step")] == [
            b[k] for k in ("val_metric", "val_loss", "train_step")
        ]
    assert not [f for f in verify_zoo(tmp_path / "cut") if f.broken]


def test_all_random_numbers_go_on(tmp_path: Path) -> None:
    model, pool = collector(tmp_path)
    with pytest.raises(KeyboardInterrupt), pool:
        train(pool, model, 5)
    state = loaded(tmp_path / cell("wordavg").pool_folder / STATE)["random"]
    torch.set_rng_state(state["torch"])
    expected = torch.randn(3)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    _, again = collector(tmp_path)
    with again:
        assert torch.equal(torch.randn(3), expected)
        numbers = random.getstate()[1]
        assert list(numbers) == state["python"][1]
        assert list(np.random.get_state()[1]) == state["numpy"][1]  # type: ignore[index]


def test_a_crash_between_a_file_and_its_progress(tmp_path: Path) -> None:
    """The file that the progress does not count is collected again."""
    model, pool = collector(tmp_path)
    with pytest.raises(KeyboardInterrupt), pool:
        train(pool, model, 2)
    folder = tmp_path / cell("wordavg").pool_folder
    before = (folder / STATE).read_bytes()
    model, pool = collector(tmp_path)
    with pytest.raises(KeyboardInterrupt), pool:
        train(pool, model, 3)
    second = (folder / "collect_001.pth").read_bytes()
    (folder / STATE).write_bytes(before)
    model, pool = collector(tmp_path)
    with pool:
        assert pool.files == 1
        train(pool, model)
    assert (folder / "collect_001.pth").read_bytes() == second


def test_a_crash_before_the_last_check(tmp_path: Path) -> None:
    """All files are there, the check is not recorded: entering again makes up for it."""
    model, pool = collector(tmp_path, count=2)
    with pytest.raises(KeyboardInterrupt), pool:
        pool._finish = lambda: (_ for _ in ()).throw(KeyboardInterrupt())
        train(pool, model)
    _, again = collector(tmp_path, count=2)
    with again:
        assert again.done
        assert list(again.remaining(batches())) == []
        with pytest.raises(InvalidInputError, match="all 2 files"):
            again.after_step()
    assert record(tmp_path, "wordavg")["training_info"]["assemble_check"]["ok"] is True
    assert STATE not in content(tmp_path)


def test_other_settings_do_not_go_on(tmp_path: Path) -> None:
    model, pool = collector(tmp_path)
    with pytest.raises(KeyboardInterrupt), pool:
        train(pool, model, 3)
    _, other = collector(tmp_path, count=5)
    with pytest.raises(InvalidInputError, match="'count': 4"):
        other.__enter__()
    base_of(tmp_path, "wordavg", seed=3)
    _, other = collector(tmp_path)
    with pytest.raises(InvalidInputError, match="base"):
        other.__enter__()


def test_a_last_file_that_changed_does_not_go_on(tmp_path: Path) -> None:
    model, pool = collector(tmp_path)
    with pytest.raises(KeyboardInterrupt), pool:
        train(pool, model, 3)
    path = tmp_path / cell("wordavg").pool_path(0)
    fields = loaded(path)
    fields["model_state_dict"]["head.bias"] += 1
    torch.save(fields, path)
    _, again = collector(tmp_path)
    with pytest.raises(IntegrityError, match=r"collect_000\.pth"):
        again.__enter__()


@pytest.mark.parametrize("data", [b"", b"nonsense", "pickle"])
def test_a_damaged_progress_file(tmp_path: Path, data: Any) -> None:
    """SE1: nothing in it is run; what cannot be read is said."""

    class Runs:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    model, pool = collector(tmp_path)
    with pytest.raises(KeyboardInterrupt), pool:
        train(pool, model, 3)
    path = tmp_path / cell("wordavg").pool_folder / STATE
    torch.save({"files": Runs()}, path) if data == "pickle" else path.write_bytes(data)
    _, again = collector(tmp_path)
    with pytest.raises((LayoutError, UntrustedPickleError), match=STATE):
        again.__enter__()
    assert not (tmp_path / "ran").exists()


def test_a_complete_pool_is_never_collected_over(tmp_path: Path) -> None:
    collect(tmp_path, "wordavg", count=2)
    before = content(tmp_path)
    _, pool = collector(tmp_path, count=2)
    with pytest.raises(AlreadyExistsError, match="2 pool files"):
        pool.__enter__()
    assert content(tmp_path) == before


# -- dtypes, metrics, modes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_files_of_another_dtype(tmp_path: Path, dtype: str) -> None:
    """float32 or as asked; the metric is that of what is written, also after an interruption."""
    model, pool = collector(tmp_path, "t5small", dtype=dtype)
    with pytest.raises(KeyboardInterrupt), pool:
        train(pool, model, 5)
    model, pool = collector(tmp_path, "t5small", dtype=dtype)
    with pool:
        train(pool, model)
    where = cell("t5small")
    fields = loaded(tmp_path / where.pool_path(3))
    assert {t.dtype for t in fields["model_state_dict"].values()} == {getattr(torch, dtype)}
    state = assemble(tmp_path / where.base_path, tmp_path / where.pool_path(3), require_pin=True)
    assert {t.dtype for t in state.values()} == {getattr(torch, dtype)}
    assert len({state[k].data_ptr() for k in FROZEN["t5small"]}) == 1
    fresh = build("t5small", 8)
    fresh.load_state_dict(state)
    assert evaluate(fresh) == (fields["val_metric"], fields["val_loss"])
    assert not [f for f in verify_zoo(tmp_path) if f.broken]


def test_weights_and_modes_are_put_back_after_measuring(tmp_path: Path) -> None:
    model, pool = collector(tmp_path, "wordavg", dtype="bfloat16")
    model.norm.eval()
    with pool:
        for ids, labels in pool.remaining(batches()):
            nn.functional.cross_entropy(logits(model, ids), labels).backward()
            pool.optimizer.step()
            before = {k: v.clone() for k, v in model.state_dict().items()}
            pool.after_step()
            assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
            assert model.training and model.head.training and not model.norm.training


@pytest.mark.parametrize("values", [(float("nan"), 0.0), (0.0, float("inf"))])
def test_a_metric_that_is_not_finite(tmp_path: Path, values: tuple[float, float]) -> None:
    model, pool = collector(tmp_path, evaluate=lambda m: values)
    with pool, pytest.raises(InvalidInputError, match=r"step 2: metric"):
        train(pool, model)
    assert list(content(tmp_path)) == [STATE]


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    model, pool = collector(tmp_path)
    with pool, pytest.raises(InvalidInputError, match=r"not finite: \['head\.bias'\]"):
        with torch.no_grad():
            model.head.bias[0] = float("nan")
        pool.after_step()
        pool.after_step()
    assert list(content(tmp_path)) == [STATE]


def test_metrics_of_other_libraries(tmp_path: Path) -> None:
    """CC1: NumPy and torch scalars become plain numbers; files are readable weights-only."""
    model, pool = collector(
        tmp_path, count=1, evaluate=lambda m: (np.float64(0.5), torch.tensor(0.25))
    )
    with pool:
        train(pool, model)
    fields = loaded(tmp_path / cell("wordavg").pool_path(0))
    assert (fields["val_metric"], fields["val_loss"]) == (0.5, 0.25)
    assert type(fields["val_metric"]) is float


def test_bases_hold_plain_values_only(tmp_path: Path) -> None:
    """CC1: converted at save, or refused at save by name; never a failure at load."""
    where, model = cell("wordavg"), build("wordavg")
    config = {"lr": np.float64(0.1), "n": np.int64(3), "layers": (1, 2), "t": torch.tensor(2.0)}
    path = save_base(tmp_path, where, model, config=config, val_metric=np.float32(0.5))
    assert loaded(path)["config"] == {"lr": 0.1, "n": 3, "layers": [1, 2], "t": 2.0}
    for bad in ({"a": object()}, {"a": np.zeros(3)}, {"a": {"b": {1, 2}}}, {"a": float("nan")}):
        with pytest.raises(InvalidInputError, match="a|nan"):
            save_base(tmp_path, where, model, config=bad, val_metric=0.5)
    with pytest.raises(InvalidInputError, match="stoi"):
        save_base(tmp_path, where, model, config={}, val_metric=0, stoi={"a": 0.5})  # type: ignore[dict-item]
    assert loaded(path)["config"]["lr"] == 0.1


def test_settings_that_are_none(tmp_path: Path) -> None:
    base = base_of(tmp_path, "wordavg")
    model = build("wordavg")
    for bad in ({"save_every": 0}, {"count": 0}, {"collect_lr": 0.0}, {"collect_lr": float("nan")}):
        given = {"save_every": 1, "collect_lr": 0.1, "count": 1} | bad
        with pytest.raises(InvalidInputError):
            PoolCollector(model, base, evaluate=evaluate, **given)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="dtype"):
        PoolCollector(model, base, 1, 0.1, evaluate=evaluate, dtype="int8")
    with pytest.raises(InvalidInputError, match="zoo/"):
        PoolCollector(model, tmp_path / "base.pth", 1, 0.1, evaluate=evaluate)
    with pytest.raises(InvalidInputError, match="optimizer"):
        PoolCollector(model, base, 1, 0.1, "lion", evaluate=evaluate).__enter__()
    with pytest.raises(InvalidInputError, match="task"):
        PoolCollector(model, base, 1, 0.1, evaluate=evaluate, task="../x")


def test_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    def make(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, lr=lr)

    model, pool = collector(tmp_path, count=1, optimizer=make)
    with pool:
        train(pool, model)
    assert record(tmp_path, "wordavg")["collect_config"]["optimizer"].endswith("make")


def test_a_model_of_another_architecture(tmp_path: Path) -> None:
    """PT2: keys that the base lacks are named."""
    base = base_of(tmp_path, "bertbase")
    with pytest.raises(LayoutError, match=r"words\.weight"):
        PoolCollector(build("wordavg"), base, 1, 0.1, evaluate=evaluate).__enter__()


# -- what is saved of a state dict


def test_saved_tensors_own_what_they_show() -> None:
    """CC2, CC3, PT1: slices are small, strides are row-major, ties are kept, the rest is named."""
    big = torch.randn(1000)
    tied = torch.randn(4, 3)
    state = saved_state({"s": big[:3], "t": tied.t(), "a": tied, "b": tied, "n": 3, "l": [1, "x"]})
    assert state["s"].untyped_storage().nbytes() == 12
    assert state["t"].is_contiguous() and torch.equal(state["t"], tied.t())
    assert state["a"] is state["b"] and state["a"] is not tied
    assert (state["n"], state["l"]) == (3, [1, "x"])
    halves = saved_state({"a": big[:500], "b": big[500:]})
    assert halves["a"].untyped_storage().nbytes() == 2000
    with pytest.raises(InvalidInputError, match="'o' is a object"):
        saved_state({"o": object()})
    with pytest.raises(InvalidInputError, match="meta"):
        saved_state({"m": torch.empty(2, device="meta")})
    assert count_elements({"a": tied, "b": tied, "c": big}) == 1012
    assert count_elements({"a": tied, "b": tied, "c": big}, ["b"]) == 12


# -- several at once


def collect_in_process(root: str, arch: str) -> None:
    torch.set_num_threads(1)
    collect(Path(root), arch, count=6)


def test_two_collectors_of_different_cells(tmp_path: Path) -> None:
    """Safe against two collectors of different cells at once: no record is lost."""
    spawn = multiprocessing.get_context("spawn")
    both = [
        spawn.Process(target=collect_in_process, args=(str(tmp_path), a))
        for a in ("bertbase", "wordavg")
    ]
    for p in both:
        p.start()
    for p in both:
        p.join(120)
    assert [p.exitcode for p in both] == [0, 0]
    cells = json.loads((tmp_path / cell("wordavg").registry_path).read_text())
    assert [c["cell"] for c in cells] == ["bertbase__agnews", "wordavg__agnews"]
    assert not [f for f in verify_zoo(tmp_path) if f.broken]


def test_two_collectors_of_one_cell(tmp_path: Path) -> None:
    _, first = collector(tmp_path)
    _, second = collector(tmp_path)
    with first, pytest.raises(InvalidInputError, match="another collector"):
        second.__enter__()
    with second:
        pass


# -- transformers.Trainer


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids, labels = batch(i, 1)
        return {"input_ids": ids[0], "labels": labels[0]}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_a_trainer_collects(tmp_path: Path) -> None:
    """The collector as a callback of the real ``transformers.Trainer``."""
    from transformers import Trainer, TrainingArguments

    base = base_of(tmp_path / "zoo-root", "bertbase")
    model = build("bertbase", 1)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        max_steps=100,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    with PoolCollector(model, base, 2, 1e-3, count=3, evaluate=evaluate) as pool:
        trainer = Trainer(
            model, arguments, train_dataset=Rows(), optimizers=(pool.optimizer, None),
            callbacks=[pool.callback()],
        )  # fmt: skip
        trainer.train()
        assert pool.done
        assert trainer.state.global_step == 6
    assert not [f for f in verify_zoo(tmp_path / "zoo-root") if f.broken]
    other = base_of(tmp_path / "other", "bertbase")
    with PoolCollector(model, other, 2, 1e-3, count=3, evaluate=evaluate) as pool:
        trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[pool.callback()])
        with pytest.raises(InvalidInputError, match="optimizers="):
            trainer.train()
