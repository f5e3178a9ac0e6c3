"""Models, data and pools that the tests of the pools driver share; small, real, deterministic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from castore_pools import Cell, PoolCollector, save_base

CLASSES = 3
LENGTH = 8


class WordModel(nn.Module):
    """A word-level classifier with an embedding for words and one for places."""

    def __init__(self, words: int = 50, width: int = 8):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(LENGTH, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        out: torch.Tensor = self.head(self.norm(x.mean(1)))
        return out


class Classifier(nn.Module):
    """A tied encoder-decoder as a classifier; its keys are those of the layout's t5small."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5Model

        config = T5Config(
            vocab_size=64,
            d_model=16,
            d_kv=4,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
        self.transformer = T5Model(config)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.transformer(input_ids=ids, decoder_input_ids=ids[:, :1]).last_hidden_state
        out: torch.Tensor = self.head(hidden[:, 0])
        return out


class Bert(nn.Module):
    """A BERT-family classifier of the real class, logits only; keys as the real class has them."""

    def __new__(cls) -> Any:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            num_labels=CLASSES,
        )
        return BertForSequenceClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bertbase": Bert,
    "t5small": Classifier,
    "wordavg": WordModel,
}
FROZEN = {
    "bertbase": ["bert.embeddings.word_embeddings.weight"],
    "t5small": [
        "transformer.shared.weight",
        "transformer.encoder.embed_tokens.weight",
        "transformer.decoder.embed_tokens.weight",
    ],
    "wordavg": ["words.weight"],
}


def build(arch: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MODELS[arch]().train()


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = model(ids)
    result: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
    return result


def batch(seed: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (size, LENGTH), generator=g)
    return ids, ids.sum(1) % CLASSES


def batches(n: int = 1000) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return (batch(100 + i) for i in range(n))


def evaluate(model: nn.Module) -> tuple[float, float]:
    """Accuracy and loss on fixed rows; leaves the model in eval mode, as careless code does."""
    model.eval()
    ids, labels = batch(1, 64)
    with torch.no_grad():
        found = logits(model, ids)
    loss = nn.functional.cross_entropy(found.float(), labels)
    return float((found.argmax(1) == labels).float().mean()), float(loss)


def cell(arch: str, dataset: str = "agnews", model_id: str = "") -> Cell:
    return Cell("text_classification", arch, dataset, model_id or f"{arch}_010")


def base_of(root: Path, arch: str, seed: int = 0, **more: Any) -> Path:
    """A base checkpoint of a freshly made model."""
    model = build(arch, seed)
    stoi = {f"w{i}": i for i in range(50)} if arch == "wordavg" else None
    metric, loss = evaluate(model)
    config = {"lr": 1e-3, "seed": seed, "arch": arch}
    where = more.pop("cell", None) or cell(arch)
    return save_base(
        root, where, model, config=config, val_metric=metric, val_loss=loss, stoi=stoi, **more
    )


def train(pool: PoolCollector, model: nn.Module, stop: int | None = None) -> None:
    """Train until the pool is complete, or give up after ``stop`` steps as a crash does."""
    for made, (ids, labels) in enumerate(pool.remaining(batches())):
        if made == stop:
            raise KeyboardInterrupt
        pool.optimizer.zero_grad()
        noise = 1 + 0.1 * torch.randn(())  # draws from the global generator, as dropout does
        (noise * nn.functional.cross_entropy(logits(model, ids), labels)).backward()
        pool.optimizer.step()
        pool.after_step()


def collect(root: Path, arch: str, count: int = 4, seed: int = 0, **more: Any) -> Path:
    """A complete pool; gives the folder of its files."""
    base = base_of(root, arch, seed)
    model = build(arch, seed + 1)
    with PoolCollector(model, base, 2, 1e-3, count=count, evaluate=evaluate, **more) as pool:
        train(pool, model)
    return root / cell(arch).pool_folder
