"""Weight files: field cases CC1, CC2, CC3, CC5, PT1, SE1."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import hashlib
import io
import json
import pickle
import random
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from castore import (
    Draft,
    FormatError,
    InvalidInputError,
    MemoryFile,
    Repository,
    UntrustedPickleError,
)
from castore_experiments import archive, rng, weights
from castore_experiments.weights import Buffers, apply, capture, decode, encode

FIXTURES = Path(__file__).parent / "fixtures" / "weightslab"
HASH = "0123456789abcdef01234567"


class Holder:
    """Something with a state."""

    def __init__(self, state: Mapping[str, Any]):
        self.state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self.state


def written(state: Any, **parts: Any) -> bytes:
    """The file of a model with this state."""
    model = state if isinstance(state, nn.Module) else Holder(state)
    captured = capture(model, buffers=Buffers(), **parts)
    return finished(captured)


def finished(captured: weights.Captured, **head: Any) -> bytes:
    how: dict[str, Any] = {"step": 7, "exp_hash": HASH, "timestamp": "2026-01-01T00:00:00"}
    return bytes(encode(captured, **{**how, "rng_state": {}, **head}))


def read(data: bytes) -> Any:
    """The model's state by torch alone; the archive is whole by zipfile's word."""
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        assert z.testzip() is None
    return torch.load(io.BytesIO(data), weights_only=True)["model_state_dict"]


def storages(data: bytes) -> list[int]:
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        return [i.file_size for i in z.infolist() if "/data/" in i.filename]


def trained(width: int = 300) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer, width)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 300) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, width)).square().sum().backward()
    optimizer.step()


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, tensors by dtype, shape and bytes."""
    if isinstance(a, torch.Tensor):
        plain = [t.detach().resolve_conj().resolve_neg().contiguous() for t in (a, b)]
        x, y = (t.reshape(-1).view(torch.uint8) for t in plain)
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(x, y)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


# -- the file


def test_the_documented_keys_and_nothing_else(tmp_path: Path) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    captured = capture(model, optimizer, scheduler, buffers=Buffers())
    loaders = {"train": {"samples_yielded": 8, "batch_size": 4}}
    data = finished(captured, rng_state=rng.capture(), loaders=loaders, metadata={"val": 0.5})
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    for mapped in (False, True):
        found = torch.load(path, weights_only=True, mmap=mapped)
        assert set(found) == {
            *("step", "model_state_dict", "timestamp", "exp_hash", "rng_state"),
            *("optimizer_state_dict", "scheduler_state_dict", "dataloader_iteration_state"),
            "metadata",
        }
        assert same(found["model_state_dict"], model.state_dict())
        assert found["model_state_dict"]._metadata == model.state_dict()._metadata
        assert same(found["optimizer_state_dict"], optimizer.state_dict())
        assert (found["step"], found["exp_hash"]) == (7, HASH)
    file = decode(data, "x.pt")
    assert same(file.scheduler_state, scheduler.state_dict())
    assert file.loaders == loaders and file.metadata == {"val": 0.5}
    assert file.rng_state == rng.capture()


def test_storages_start_where_memory_maps_want_them() -> None:
    data = written(trained()[0])
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        for info in z.infolist():
            name, extra = (
                int.from_bytes(data[info.header_offset + i :][:2], "little") for i in (26, 28)
            )
            assert (info.header_offset + 30 + name + extra) % 64 == 0


PROGRAM = """
import sys, torch
from castore_experiments.weights import Buffers, capture, encode
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30))
names = ["_".join(["a", "b"]) for _ in range(3)]
model.register_buffer("x_" + names[0], torch.zeros(2))
data = encode(capture(model, torch.optim.SGD(model.parameters(), lr=.1), buffers=Buffers()),
    step=1, exp_hash="0" * 24, timestamp="t", rng_state={"k": names, "set": {"b", "a", "c"}})
sys.stdout.buffer.write(data)
"""


def test_equal_content_gives_equal_bytes() -> None:
    """HC8: in every process, whichever objects hold equal texts, and in reused memory."""
    outs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={"PYTHONHASHSEED": s},
            capture_output=True,
            check=True,
        ).stdout
        for s in ("1", "2")
    ]
    assert outs[0] == outs[1]
    model, optimizer = trained()
    buffers = Buffers()
    files = []
    for _ in range(3):
        captured = capture(model, optimizer, buffers=buffers)
        files.append(finished(captured, rng_state={"a": "x" * 5}))
        captured.release()
        other = capture(Holder({"w": torch.randn(200_000)}), buffers=buffers)
        finished(other)
        other.release()
    assert files[0] == files[1] == files[2]


def test_what_the_caller_does_next_does_not_change_the_copy() -> None:
    model, optimizer = trained()
    buffers = Buffers()
    captured = capture(model, optimizer, buffers=buffers)
    expected = finished(captured)
    second = capture(model, optimizer, buffers=buffers)
    step(model, optimizer)
    with torch.no_grad():
        model[0].weight.fill_(3)
    optimizer.param_groups[0]["lr"] = 9.0
    assert finished(captured) == expected == finished(second)
    captured.release()
    captured.release()
    third = capture(model, optimizer, buffers=buffers)
    assert finished(second) == expected != finished(third)
    with pytest.raises(InvalidInputError, match="released"):
        finished(captured)


def test_large_sizes_take_64_bits() -> None:
    """With the limit lowered: torch and zipfile read the wide fields."""
    content = {"data/0": b"a" * 300, "data/1": b"b" * 20, "version": b"3\n"}
    places = archive.plan([(n, len(c)) for n, c in content.items()], limit=100)
    memory = memoryview(bytearray(places[-1].stop + archive.tail_size(places)))
    for place, c in zip(places, content.values(), strict=True):
        memory[place.start : place.stop] = c
    data = bytes(memory[: archive.close(memory, places, limit=100)])
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        assert z.testzip() is None
        assert {n: z.read(f"archive/{n}") for n in content} == content
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    assert reader.get_record("data/0") == content["data/0"]
    assert b"PK\x06\x06" in data


def test_many_members_take_the_wide_end(tmp_path: Path) -> None:
    """CC5: a file of very many tensors opens again."""
    n = 70_000
    places = archive.plan([(f"data/{i}", 1) for i in range(n)])
    memory = memoryview(bytearray(places[-1].stop + archive.tail_size(places)))
    with zipfile.ZipFile(io.BytesIO(memory[: archive.close(memory, places)])) as z:
        assert len(z.namelist()) == n


def test_a_state_of_many_small_tensors_opens_again() -> None:
    state = {f"t{'x' * 200}{i}": torch.tensor([float(i)]) for i in range(2000)}
    assert same(read(written(state)), state)


# -- tensors


def test_views_cost_what_is_visible() -> None:
    """CC2: "Stored bytes about equal to the visible elements; identical digest for view and
    clone".
    """
    big = torch.randn(1_000_000)
    for view in (big[:1000], big.chunk(1000)[3], big.narrow(0, 5, 1000), big.view(1000, -1)[:, 1]):
        data = written({"w": view})
        assert len(data) < 4000 + 2000
        assert data == written({"w": view.clone()})
        assert same(read(data), {"w": view})


ODD: dict[str, torch.Tensor] = {
    "channels-last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(30, 20).t(),
    "expanded": torch.randn(1, 5).expand(7, 5),
    "flipped": torch.randn(4, 4)[:, ::2],
    "bf16": torch.randn(9).bfloat16(),
    "fp16": torch.randn(9).half(),
    "fp8": torch.randn(9).to(torch.float8_e4m3fn),
    "fp8-transposed": torch.randn(4, 6).to(torch.float8_e5m2).t(),
    "uint16": torch.tensor([0, 1, 65535], dtype=torch.uint16),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "negative-view": torch.randn(3, dtype=torch.complex64).conj().imag,
    "empty": torch.empty(0),
    "empty-matrix": torch.empty(0, 5, dtype=torch.int64),
    "scalar": torch.tensor(3.5),
    "not-finite": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
    "nan-payload": torch.tensor([0x7FC00123, -1], dtype=torch.int32).view(torch.float32),
    "parameter": nn.Parameter(torch.randn(3)).data,
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_come_back_bit_for_bit(kind: str) -> None:
    """CC3: saves; values equal; equal values give equal bytes regardless of strides."""
    tensor = ODD[kind]
    data = written({"w": tensor})
    assert same(read(data), {"w": tensor})
    plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert data == written({"w": plain})


@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_of_a_module_load_into_it(kind: str) -> None:
    """'Saved right or refused by name at save, never at load': expanded buffers too, whose memory
    torch does not write to."""
    tensor, model, fresh = ODD[kind], nn.Module(), nn.Module()
    model.register_buffer("odd", tensor)
    own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    fresh.register_buffer("odd", own)
    apply(decode(written(model), "x.pt"), fresh)
    assert same(fresh.state_dict(), model.state_dict())


class Weird(nn.Module):
    def __init__(self, extra: Any):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Color(enum.Enum):
    RED = "red"


GOOD: list[Any] = [
    "text",
    7,
    None,
    1.5,
    10**40,
    b"bytes",
    bytearray(b"x"),
    (1, ("a", [2])),
    {"k": {1: 2}},
    {1, 2},
    collections.OrderedDict(a=1),
    collections.Counter("aab"),
    torch.Size([2, 3]),
    torch.float16,
    torch.device("cpu"),
    complex(1, 2),
    {"t": torch.ones(3)},
]


@pytest.mark.parametrize("extra", GOOD, ids=repr)
def test_extra_state_that_is_plain_is_kept(extra: Any) -> None:
    """CC3: "a str and an int entry via get_extra_state"."""
    model, fresh = Weird(extra), Weird(None)
    data = written(model)
    assert type(read(data)["_extra_state"]) is type(extra)
    apply(decode(data, "x"), fresh)
    assert same(fresh.extra, extra)
    assert same(fresh.conv.state_dict(), model.conv.state_dict())


@dataclasses.dataclass
class Data:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "plain"),
    [(np.float64(0.5), 0.5), (np.int64(3), 3), (np.bool_(True), True), (Color.RED, "red")],
)
def test_foreign_numbers_are_converted_at_save(value: Any, plain: Any) -> None:
    """CC1: "an `np.float64` lr"."""
    found = read(written({"lr": value}))
    assert found == {"lr": plain} and type(found["lr"]) is type(plain)


BAD: list[Any] = [
    np.zeros(3),
    argparse.Namespace(a=1),
    Data(),
    collections.deque([1]),
    collections.defaultdict(int, a=1),
    frozenset({1}),
    range(3),
    print,
    object,
    torch.randn(3, 3).to_sparse(),
    torch.empty(3, device="meta"),
    nn.UninitializedParameter(),
]


@pytest.mark.parametrize("value", BAD, ids=lambda v: type(v).__name__)
def test_what_could_not_be_read_back_is_refused_at_save(value: Any) -> None:
    """CC1: "refused at save, not at load", by its path."""
    with pytest.raises(InvalidInputError, match="^/model_state_dict/deep/1/here: "):
        written({"deep": [0, {"here": value}]})


def test_a_circle_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(InvalidInputError, match="circle"):
        written({"a": circle})


# -- ties


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(500, 40)
        self.encoder = nn.Embedding(500, 40)
        self.head = nn.Linear(40, 500, bias=False)
        self.encoder.weight = self.head.weight = self.shared.weight


def test_ties_are_stored_once_and_come_back() -> None:
    """PT1: "Tied embed/head; three-way tie"; "ties restored (same data_ptr)"."""
    model = Tied()
    data = written(model)
    assert storages(data) == [500 * 40 * 4]
    assert len({t.data_ptr() for t in read(data).values()}) == 1
    fresh = Tied()
    apply(decode(data, "x"), fresh)
    assert fresh.head.weight is fresh.shared.weight
    assert same(fresh.state_dict(), model.state_dict())


def test_a_tensor_within_another_is_stored_once() -> None:
    """PT1: "one tensor that is a slice of another"; and its transpose."""
    whole = torch.randn(50, 20)
    state = {"part": whole[10:20], "whole": whole, "turned": whole.t(), "one": whole[3, 4]}
    data = written(state)
    assert storages(data) == [4000]
    found = read(data)
    assert same(found, state)
    assert found["part"].data_ptr() == found["whole"].data_ptr() + 10 * 20 * 4
    assert found["turned"].data_ptr() == found["whole"].data_ptr()


def test_views_of_a_flat_buffer_are_stored_apart() -> None:
    """PT1: "non-overlapping views stored separately"."""
    flat = torch.randn(3000)
    state = {"a": flat[:1000].view(10, 100), "b": flat[1000:1500], "c": flat[2000:]}
    data = written(state)
    assert storages(data) == [4000, 2000, 4000]
    assert data == written({k: v.clone() for k, v in state.items()})


def test_partly_overlapping_and_reinterpreted_views_have_their_values() -> None:
    flat = torch.randn(100)
    state = {"a": flat[:60], "b": flat[40:], "c": flat.view(torch.int32), "d": flat[::3]}
    assert same(read(written(state)), state)


# -- what the store makes of it


def added(repository: Repository, data: bytes, base: str | None = None) -> tuple[int, str]:
    entries = {"w.pt": MemoryFile(data)}
    done = repository.commit(Draft(entries, base=base), namespace="n")
    return done.added, str(done.name)


def test_the_store_cuts_it_at_its_tensors(tmp_path: Path) -> None:
    """What did not change is stored once; what moved a little is stored as a difference."""
    model, optimizer = trained(500)
    repository = Repository.init(tmp_path / "store")
    buffers = Buffers()

    def save(**head: Any) -> bytes:
        captured = capture(model, optimizer, buffers=buffers)
        try:
            return finished(captured, rng_state=rng.capture(), **head)
        finally:
            captured.release()

    whole, name = added(repository, save())
    again, _ = added(repository, save(step=8, timestamp="2026-01-01T00:00:01"), name)
    assert whole > 2_000_000
    assert again < 0.05 * whole
    with torch.no_grad():
        model[0].weight.mul_(1 + 1e-4 * torch.randn(500, 500))
    moved, _ = added(repository, save(step=9), name)
    assert moved < 0.3 * whole


# -- reading


def test_the_public_tools_files_are_read() -> None:
    """SE1, CC1: with weights_only=True, its one enumeration stubbed."""
    expected = json.loads((FIXTURES / "single.expected.json").read_text())["roots"]["."]
    with tarfile.open(FIXTURES / "single.tar.xz") as tar:
        for hash, known in expected["hashes"].items():
            for number, one in known["steps"].items():
                member = tar.extractfile(f"single/checkpoints/{one['file']}")
                assert member is not None
                file = decode(member.read(), one["file"])
                assert (file.step, file.exp_hash) == (int(number), hash)
                assert file.model_state is not None
                assert file.model_state["tracking_mode"] in ("train", "eval", "disabled")
                for name, digest in one["tensors"].items():
                    assert fingerprint(file.model_state[name]) == digest, name
                assert file.loaders == one["dataloader_iteration_state"]
                rng.restore(file.rng_state)
                assert next_randoms() == one["next_randoms_after_rng_restore"]
                bare = {k: v for k, v in file.model_state.items() if isinstance(v, torch.Tensor)}
                apply(file, Loadable(bare), strict=True)


def fingerprint(tensor: torch.Tensor) -> str:
    """As the fixture's: digest of type, shape and values."""
    head = f"{tensor.dtype}|{tuple(tensor.shape)}|".encode()
    return hashlib.sha256(head + tensor.contiguous().numpy().tobytes()).hexdigest()


def next_randoms() -> list[list[float]]:
    two = range(2)
    python, numpy = [random.random() for _ in two], [float(np.random.rand()) for _ in two]
    return [python, numpy, [torch.rand(1).item() for _ in two]]


class Loadable(nn.Module):
    """A module of these tensors, and no more."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        super().__init__()
        for name, t in tensors.items():
            at: nn.Module = self
            *folders, last = name.split(".")
            for folder in folders:
                if not hasattr(at, folder):
                    at.add_module(folder, nn.Module())
                at = getattr(at, folder)
            at.register_buffer(last, torch.zeros_like(t))


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("where", ["model_state_dict", "optimizer_state_dict", "rng_state", "step"])
def test_a_file_that_runs_code_is_never_opened(tmp_path: Path, where: str) -> None:
    """SE1: "Put a pickle with a `__reduce__` side effect as weights, optimizer, RNG"."""
    mark, out = tmp_path / "mark", io.BytesIO()
    torch.save({"step": 1, "exp_hash": HASH, "model_state_dict": {}, where: Evil(mark)}, out)
    with pytest.raises(UntrustedPickleError, match="root/x.pt"):
        decode(out.getvalue(), "root/x.pt")
    with pytest.raises(UntrustedPickleError, match="bare pickle"):
        decode(pickle.dumps(Evil(mark)), "root/x.pt")
    assert not mark.exists()


@pytest.mark.parametrize("arguments", [b"K\x05\x85", b"(K\x05t", b"K\x05q\x01\x85"])
def test_memory_is_not_asked_for_by_a_number(arguments: bytes) -> None:
    """SE6: ``bytearray(n)`` takes n bytes at torch's restricted reader, before anything fails."""
    pickled = b"\x80\x02cbuiltins\nbytearray\n" + arguments + b"R."
    with pytest.raises(FormatError, match="memory by a number"):
        decode(replaced(written({"w": torch.ones(2)}), pickled), "x.pt")
    out = io.BytesIO()
    torch.save({"step": 1, "exp_hash": HASH, "metadata": {"b": bytearray(b"xyz")}}, out)
    assert decode(out.getvalue(), "x.pt").metadata == {"b": bytearray(b"xyz")}


def replaced(data: bytes, pickled: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """The archive with another pickle, or with its own where that is empty."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(out, "w") as after:
        for info in before.infolist():
            is_pickle = info.filename.endswith("data.pkl")
            content = pickled if is_pickle and pickled else before.read(info)
            after.writestr(info.filename, content, method if is_pickle else zipfile.ZIP_STORED)
    return out.getvalue()


def test_a_packed_member_is_refused() -> None:
    """SE6: torch packs none; one of 300 kB may be 300 MB, and a damaged one is no `OSError`."""
    data = replaced(written({"w": torch.ones(2)}), b"", zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match=r"data\.pkl' is compressed"):
        decode(data, "x.pt")


def test_damage_is_named() -> None:
    """CC7: cut by 1 byte, by half, to 0 and to 7 bytes; a text pointer, a page of HTML."""
    data = written({"w": torch.randn(100)})
    samples = [
        data[:-1],
        data[: len(data) // 2],
        b"",
        data[:7],
        b"version https://git-lfs",
        b"<html>",
    ]
    samples += [b"PK\x03\x04" + b"\0" * 100]
    for damaged in samples:
        with pytest.raises(FormatError, match="here/x.pt"):
            decode(damaged, "here/x.pt")


@pytest.mark.parametrize("kind", ["short", "none", "shape"])
def test_a_shape_and_its_bytes_that_disagree(kind: str) -> None:
    """SE6: 'Declared shape and byte range disagree'; the legal empty tensor is accepted."""
    data, out = written({"w": torch.ones(4, 2), "empty": torch.empty(0)}), io.BytesIO()
    assert read(data)["empty"].shape == (0,)
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            held = source.read(name)
            if name.endswith("/data.pkl") and kind == "shape":
                assert held.count(b"K\x04K\x02\x86") == 1
                held = held.replace(b"K\x04K\x02\x86", b"J\x00\x00\x00\x10K\x02\x86")
            if "/data/" in name and len(held) == 32 and kind != "shape":
                held = held[:4]
                if kind == "none":
                    continue
            target.writestr(name, held)
    with pytest.raises(FormatError, match="here/x.pt"):
        decode(out.getvalue(), "here/x.pt")


@pytest.mark.parametrize(
    "value",
    [
        [1],
        {"step": "x", "exp_hash": HASH},
        {"step": 1},
        {"step": 1, "exp_hash": HASH, "rng_state": 3},
    ],
)
def test_another_file_of_torch_is_no_weight_file(value: Any) -> None:
    out = io.BytesIO()
    torch.save(value, out)
    with pytest.raises(FormatError, match="x.pt"):
        decode(out.getvalue(), "x.pt")


# -- applying


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    file = decode(written(nn.Linear(4, 3)), "x")
    for model, word in (
        (nn.Linear(4, 2), "weight: .2, 4. here, .3, 4. saved"),
        (nn.Linear(4, 3, bias=False), "names"),
    ):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(InvalidInputError, match=word):
            apply(file, model)
        assert same(dict(model.state_dict()), before)
    with pytest.raises(InvalidInputError, match="no optimizer state"):
        apply(file, optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1))
    apply(file, optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1), strict=False)


def test_wrappers_need_not_agree() -> None:
    inner = nn.Linear(3, 2)
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module._orig_mod = nn.Linear(3, 2)
    apply(decode(written(inner), "x"), wrapped)
    assert same(dict(wrapped.module._orig_mod.state_dict()), dict(inner.state_dict()))
    fresh = nn.Linear(3, 2)
    apply(decode(written(wrapped), "x"), fresh)
    assert same(dict(fresh.state_dict()), dict(inner.state_dict()))


def test_an_optimizers_tensors_get_their_parameters_strides() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        return conv, torch.optim.AdamW(conv.parameters())

    model, optimizer = made()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    captured = capture(model, optimizer, buffers=Buffers())
    fresh, other = made()
    apply(decode(finished(captured), "x"), fresh, other)
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert a["exp_avg"].stride() == b["exp_avg"].stride()
        assert same(dict(a), dict(b))
