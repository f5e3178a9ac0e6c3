"""Valid and nearly valid files of each format, small, for a fuzzer to begin from."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from typing import Any

import numpy as np
import safetensors.torch
import torch

from castore import document, frame
from castore.digest import digest_of
from castore.snapshot import Snapshot, name_of
from castore.tree import File, Folder, Link, Slice, build_tree
from castore_experiments import config_yaml, manifest, rng
from castore_experiments.documents import DataDocument
from castore_receipts import documents as receipts
from castore_receipts.arrays import tensor, write_safetensors
from castore_receipts.traces import write_npz

DIGEST, SHA256 = "ab" * 32, "cd" * 32
HASH = "0123456789abcdef01234567"


def seeds(target: str) -> list[bytes]:
    """What the fuzzing of ``target`` begins with."""
    return _SEEDS[target]()


def saved(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def npy(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def member(data: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith(name)))


# -- tensors


def _tensors() -> dict[str, torch.Tensor]:
    w = torch.arange(6.0).reshape(2, 3)
    return {"a.weight": w, "tied": w, "t": w.t(), "b": torch.zeros(4, dtype=torch.bfloat16)}


def _states() -> list[Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    plain = {"n": [1, (2.5, None, True)], "s": "x", "o": OrderedDict(a=1), "e": torch.zeros(0)}
    return [_tensors(), plain, {"model": model.state_dict(), "opt": optimizer.state_dict()}]


def _torch_files() -> list[bytes]:
    states = _states()
    return [*(saved(s) for s in states), saved(states[0], pickle_protocol=4)]


def _safetensors_files() -> list[bytes]:
    plain = {k: v.clone().contiguous() for k, v in _tensors().items()}
    return [safetensors.torch.save(plain, m) for m in (None, {"a": "b"}, {"é\\": 'q"\n'})]


def _npz_files() -> list[bytes]:
    out = io.BytesIO()
    np.savez_compressed(out, a=np.arange(9), b=np.ones((2, 2), "f2", order="F"))
    objects = zipped({"o.npy": npy(np.array([{"a": 1}], object))})
    return [npz(a=np.arange(3), b=np.zeros((0, 2), "c16")), out.getvalue(), objects]


def _pickles() -> list[bytes]:
    return [member(d, "data.pkl") for d in _torch_files()]


def _headers() -> list[bytes]:
    found = [d[8 : 8 + struct.unpack("<Q", d[:8])[0]] for d in _safetensors_files()]
    entry = {"dtype": "U8", "shape": [1 << 16], "data_offsets": [0, 1 << 16]}
    return [*found, json.dumps({"__metadata__": {"a": "b"}, "w": entry}).encode()]


# -- castore


def _frames() -> list[bytes]:
    base, new = bytes(range(64)) * 4, bytes(range(1, 65)) * 4
    made = [frame.raw(new, 2), frame.packed(bytes(400), 4)]
    made.append(frame.delta(new, base, digest_of(base), 0, 4))
    return [b"".join(parts) for parts in made]


def _unsealed() -> list[bytes]:
    return [f[:48] + f[64:] for f in _frames()]


def _trees() -> list[bytes]:
    file = File(10, SHA256, True, (Slice(DIGEST, 0, 4), Slice("ef" * 32, 2, 6)))
    trees = [{}, {"a/b": file, "a/c": Link("../x"), "d": Folder(), "é": File(0, SHA256)}]
    return [build_tree(t).encode() for t in trees]


def _snapshots() -> list[bytes]:
    plain = Snapshot(DIGEST, 1_700_000_000_000_000, "main")
    return [plain.encode(), *_odd_snapshots(plain)]


def _odd_snapshots(plain: Snapshot) -> list[bytes]:
    from dataclasses import replace

    more = replace(plain, labels={"a": "b"}, driver="experiments")
    return [more.encode(), more.encode().replace(b'"format":1', b'"format":2')]


def _names() -> list[bytes]:
    data = Snapshot(DIGEST, 1_700_000_000_000_000, "main").encode()
    name = name_of(data, "main", "snapshot", 1_700_000_000_000_000)
    return [p.encode() for p in (name.path, name.pending, name.forgotten, f"x/../{name.path}")]


def _small_documents() -> list[bytes]:
    return [
        document.encode("config", {"hash": "blake3-256", "id": "ab" * 16}),
        document.encode("prune", {"id": "ab" * 16, "end": 1.5}),
        document.encode("experiment-root", {"repository": "x", "namespace": "n"}),
    ]


# -- experiments


def _manifests() -> list[bytes]:
    entry = {
        "hp_hash": HASH[:8], "model_hash": HASH[8:16], "data_hash": HASH[16:],
        "created": "2026-01-02T03:04:05", "last_used": "2026-01-02T03:04:05",
    }  # fmt: skip
    found = {"experiments": {HASH: entry}, "latest_hash": HASH, "last_updated": entry["created"]}
    import yaml

    text = yaml.safe_dump(found)
    own = manifest.render(manifest.parse(text.encode(), "seed"))
    return [own, text.encode(), b"experiments: {}\n"]


def _yamls() -> list[bytes]:
    texts = [
        "a: 1\nb: [1e-3, 1.5, .inf, ~, yes, 0x1F, 0o7, 017, 1:30, 2026-01-02]\n",
        "? {a: b}\n: c\n", "- !!python/object/apply:os.system [x]\n", "a: &x [1]\nb: *x\n",
        "a: |\n  text\n  more\nb: >-\n  x\n", '{"a": "\\u00e9", "b": !!str 1}\n', "--- a\n--- b\n",
        "0x" + "f" * 40 + ": 1_000\n", "1:1:1:1:1: 1:1:1.5\n", "<<: {a: 1}\n=: 2\n",
    ]  # fmt: skip
    return [t.encode() for t in texts]


def _configs() -> list[bytes]:
    config = {"lr": 1e-3, "n": [1, 2.5, None, True], "d": {"a": "x", 2: "é"}, "s": {"p", "q"}}
    return [config_yaml.to_yaml(config, HASH[:8]), *_yamls()]


def _weight_files() -> list[bytes]:
    model = torch.nn.Linear(2, 1).state_dict()
    whole = {
        "step": 3, "exp_hash": HASH, "timestamp": "2026", "model_state_dict": model,
        "rng_state": {"torch": torch.zeros(4, dtype=torch.uint8)}, "metadata": {"a": 1},
        "dataloader_iteration_state": {"train": {"samples_yielded": 3}},
    }  # fmt: skip
    return [saved(whole), saved(argparse.Namespace(a=1)), pickle.dumps({"step": 1})]


def _data_documents() -> list[bytes]:
    streams = {"python_random": [3, [1, 2, 3], None], "numpy_random": ["MT19937", [1], 2, 0, 0.0]}
    loader = {"train": {"samples_yielded": 3, "x": {"$array": ["<f4", [1], "AAAAAA=="]}}}
    odd = {
        "train": {"a": {"$tuple": [{"$float": "nan"}]}, "b": {"$map": [[1, {"$bytes": "AA=="}]]}}
    }
    return [
        DataDocument(HASH, "2026", 2, streams, loader).encode(HASH[16:]),
        DataDocument(HASH, "2026", 2, rng.to_json({"torch_random": [1, 2]}), odd).encode(HASH[16:]),
        json.dumps(
            {"data": [{"id": 1}], "dataloader_iteration_state": {"samples_yielded": 1}}
        ).encode(),
    ]


# -- receipts and pools


def _receipts() -> list[bytes]:
    body = {"step": 40, "mean_return": 1.5, "returns": {"101": -2.0}, "gates": [{"name": "é"}]}
    return [receipts.encode(receipts.seal(body)), json.dumps(body).encode(), b'{"a": NaN}']


def _receipt_arrays() -> list[bytes]:
    arrays = {"a": np.arange(3.0), "b": np.zeros((2, 0), "f2"), "c": np.array(True)}
    found = {k: tensor(v, k) for k, v in arrays.items()}
    return [write_safetensors(found), write_safetensors(found, "{}"), *_safetensors_files()]


def _receipt_traces() -> list[bytes]:
    return [write_npz({"trace_101": np.ones((2, 3)), "actions": np.arange(2)}), *_npz_files()]


def _pool_files() -> list[bytes]:
    pin = {"base": DIGEST, "frozen": {"a.weight": DIGEST}, "dtype": "float32", "ties": [["a", "b"]]}
    state = {"w": torch.ones(2), "n": 3, "t": torch.ones(2, 2).t()}
    fields = {"model_state_dict": state, "frozen_keys": ["a.weight"], "pin": pin, "step": 1}
    old = saved({"model_state_dict": {"w": torch.ones(2)}}, _use_new_zipfile_serialization=False)
    text = {"frozen_keys": '["a"]', "tied": "w", "pin": "null"}
    return [saved(fields), old, safetensors.torch.save({"w": torch.ones(2)}, text)]


def _registries() -> list[bytes]:
    one = {"ckpt_path": "zoo/data/arch/m1.pth", "arch": "arch", "dataset": "data", "val_metric": 1}
    forms: list[Any] = [
        [one],
        {"records": [one]},
        {"arch__data": one, "version": 3},
        [{"ckpt_path": "../x"}],
    ]
    return [json.dumps(f).encode() for f in forms]


_SEEDS = {
    "cut_safetensors": _safetensors_files,
    "cut_torch": _torch_files,
    "cut_npz": lambda: [*_npz_files(), npy(np.arange(4)), npy(np.zeros(3, ">f4"))],
    "cut_header": _headers,
    "pickle_storages": _pickles,
    "frame": _frames,
    "sealed_frame": _unsealed,
    "tree": _trees,
    "snapshot": _snapshots,
    "spelled_tree": _trees,
    "spelled_snapshot": _snapshots,
    "snapshot_name": _names,
    "small_documents": _small_documents,
    "describe": lambda: [*_torch_files(), *_safetensors_files(), *_npz_files()],
    "describe_pickle": _pickles,
    "manifest": _manifests,
    "yaml": _yamls,
    "config": _configs,
    "weight_file": _weight_files,
    "data_document": _data_documents,
    "receipt": _receipts,
    "receipt_arrays": _receipt_arrays,
    "receipt_traces": _receipt_traces,
    "pool_checkpoint": _pool_files,
    "pool_registry": _registries,
}
