"""Lazy reading: which bytes are transferred for a tensor, for rows, and for a whole model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch

from castore import (
    Draft,
    IntegrityError,
    InvalidInputError,
    LayoutError,
    MemoryFile,
    NotFoundError,
    Repository,
    Slice,
)
from castore_pools import assemble, import_zoo, open_checkpoint, open_pool
from castore_pools.addresses import open_source
from castore_pools.sources import SnapshotSource, UrlSource
from castore_pools.values import tensor_digest, value_digest
from tests.drivers.pools.models import FROZEN, cell, collect

MIB = 1 << 20


@pytest.fixture(params=["memory", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder behind an fsspec URL."""
    if request.param == "memory":
        return f"memory://pools-{os.getpid()}-{tmp_path.name}"
    request.getfixturevalue("s3_env")
    found: str = request.getfixturevalue("s3_url")
    return found


def put(url: str, path: Path) -> str:
    fs, target = fsspec.url_to_fs(url)
    fs.pipe_file(target, path.read_bytes())
    return url


def large(folder: Path, kind: str) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A base and a pool file of 4 MiB tensors, as torch zips or safetensors."""
    torch.manual_seed(3)
    state = {k: torch.randn(1024, 1024) for k in ("words", "a", "b", "c")}
    state["alias"] = state["words"]
    frozen = ["words", "alias"]
    kept = {k: v for k, v in state.items() if k not in frozen}
    if kind == "pth":
        torch.save({"model_state_dict": state}, folder / "base.pth")
        pool = {"model_state_dict": kept, "frozen_keys": frozen}
        torch.save(pool, folder / "pool.pth")
        return folder / "base.pth", folder / "pool.pth", state
    whole = {k: v for k, v in state.items() if k != "alias"}
    safetensors.torch.save_file(whole, folder / "base.st", {"alias": "words"})
    safetensors.torch.save_file(kept, folder / "pool.st", {"frozen_keys": '["words", "alias"]'})
    return folder / "base.st", folder / "pool.st", state


def fetched(*sources: Any) -> int:
    assert all(isinstance(s, UrlSource | SnapshotSource) for s in sources)
    return sum(s.fetched for s in sources)


@pytest.mark.parametrize("kind", ["pth", "st"])
def test_only_what_is_asked_for_is_transferred(remote: str, tmp_path: Path, kind: str) -> None:
    """``open_pool(...)`` gives one tensor, or a row range of one, without reading the rest."""
    base, member, state = large(tmp_path, kind)
    urls = [put(f"{remote}/{p.name}", p) for p in (base, member)]
    pool = open_pool(*urls)
    sources = pool.base.source, pool.member.source
    headers = fetched(*sources)
    assert headers < 2 * MIB
    assert torch.equal(pool.rows("a", 100, 140), state["a"][100:140])
    assert torch.equal(pool.rows("words", 0, 3), state["words"][:3])
    assert fetched(*sources) - headers < 2 * MIB
    before = fetched(*sources)
    assert torch.equal(pool.tensor("b"), state["b"])
    assert fetched(*sources) - before < 5 * MIB
    before = fetched(*sources)
    whole = pool.assemble()
    # words, a and c; not b, which is in the process, and the two names of words once
    assert 12 * MIB <= fetched(*sources) - before < 13.5 * MIB
    assert all(torch.equal(whole[k], v) for k, v in state.items())
    assert whole["words"].data_ptr() == whole["alias"].data_ptr()
    before = fetched(*sources)
    again = pool.assemble()
    assert fetched(*sources) == before
    again["a"].zero_()  # what is given is the caller's own
    again["words"].zero_()
    assert torch.equal(pool.tensor("a"), state["a"])
    assert torch.equal(pool.assemble()["words"], state["words"])


def test_another_member_shares_what_the_base_has_read(remote: str, tmp_path: Path) -> None:
    base, member, state = large(tmp_path, "pth")
    urls = [put(f"{remote}/{p.name}", p) for p in (base, member)]
    first = open_pool(*urls)
    first.assemble()
    before = fetched(first.base.source)
    second = open_pool(first.base, urls[1])
    assert torch.equal(second.assemble()["words"], state["words"])
    assert fetched(first.base.source) == before


def test_addresses_of_snapshots(repository: Repository, zoo: Path) -> None:
    """``castore://<namespace>/<snapshot>/<path>`` with ``CASTORE_REPOSITORY``."""
    names = {c.name.key: c.name for c in import_zoo(repository, zoo, "team")}
    where = cell("t5small")
    snapshot = names["pool.t5small__agnews.t5small_010"]
    base = f"castore://team/{snapshot.id[:8]}/{where.base_path}"
    member = f"castore://team/{snapshot.id}/{where.pool_path(3)}"
    found = assemble(base, member, require_pin=True)
    expected = assemble(zoo / where.base_path, zoo / where.pool_path(3))
    assert all(torch.equal(found[k], v) for k, v in expected.items())
    assert len({found[k].data_ptr() for k in FROZEN["t5small"]}) == 1
    mixed = assemble(zoo / where.base_path, member)
    assert all(torch.equal(mixed[k], v) for k, v in expected.items())
    with pytest.raises(NotFoundError, match=r"gone\.pth"):
        open_source(f"castore://team/{snapshot.id}/gone.pth")


def test_a_snapshot_is_read_lazily(repository: Repository, tmp_path: Path) -> None:
    base, member, state = large(tmp_path, "pth")
    made = repository.commit([base, member], namespace="n")
    pool = open_pool(*(f"castore://n/{made.name.id}/{p.name}" for p in (base, member)))
    sources = pool.base.source, pool.member.source
    assert fetched(*sources) < MIB
    assert torch.equal(pool.rows("a", 5, 9), state["a"][5:9])
    assert fetched(*sources) < 5 * MIB


def test_castore_addresses_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("castore://", "castore://ns", "castore://ns/"):
        with pytest.raises(InvalidInputError, match="expected castore://"):
            open_source(address)
    monkeypatch.delenv("CASTORE_REPOSITORY", raising=False)
    with pytest.raises(InvalidInputError, match="CASTORE_REPOSITORY"):
        open_source("castore://ns/latest/x.pth")


def test_urls_that_are_not_there(remote: str) -> None:
    with pytest.raises(NotFoundError, match=r"nothing\.pth"):
        open_source(f"{remote}/nothing.pth")


def test_pins_of_single_tensors(zoo: Path, tmp_path: Path) -> None:
    """A frozen tensor's pin is checked when it is read alone, too."""
    where = cell("bertbase")
    word = FROZEN["bertbase"][0]
    other = torch.load(zoo / where.base_path, weights_only=True)
    other["model_state_dict"][word] += 1
    torch.save(other, tmp_path / "other.pth")
    pool = open_pool(tmp_path / "other.pth", zoo / where.pool_path(0))
    assert pool.pinned
    with pytest.raises(IntegrityError, match=word):
        pool.tensor(word)
    with pytest.raises(IntegrityError, match=word):
        pool.assemble()
    good = open_pool(zoo / where.base_path, zoo / where.pool_path(0))
    assert good.tensor(word).shape == good.info(word).shape == (64, 16)
    assert good.fields["collect_step"] == 0
    assert good.keys() == list(other["model_state_dict"])


def test_frozen_tensors_have_the_recorded_dtype(tmp_path: Path) -> None:
    """One by one, in rows, and after they were kept, as in the reassembled model."""
    collect(tmp_path, "wordavg", count=1, dtype="float16")
    where = cell("wordavg")
    pool = open_pool(tmp_path / where.base_path, tmp_path / where.pool_path(0))
    rows = pool.rows("words.weight", 1, 3)
    whole = pool.assemble()
    for key, value in whole.items():
        assert pool.tensor(key).dtype == value.dtype
        assert torch.equal(pool.tensor(key), value)
    for found in (rows, pool.rows("words.weight", 1, 3)):
        assert found.dtype == torch.float16
        assert torch.equal(found, whole["words.weight"][1:3])


def test_what_a_pool_does_not_give(zoo: Path) -> None:
    where = cell("wordavg")
    pool = open_pool(zoo / where.base_path, zoo / where.pool_path(0))
    with pytest.raises(LayoutError, match="nothing"):
        pool.tensor("nothing")
    with pytest.raises(LayoutError, match="no such rows"):
        pool.rows("norm.num_batches_tracked", 0, 1)
    assert pool.rows("head.weight", 2, 99).shape == (1, 8)
    assert pool.rows("head.weight", 50, 99).shape == (0, 8)
    with pytest.raises(LayoutError, match="lacks"):
        open_pool(zoo / where.base_path, zoo / cell("bertbase").pool_path(0))


def test_rows_of_any_strides(tmp_path: Path) -> None:
    """CC3: transposed and channels-last tensors, rows of slices."""
    big = torch.arange(10_000.0)
    state = {
        "t": big[:600].reshape(20, 30).t(),
        "slice": big[100:400].reshape(30, 10),
        "last": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    }
    torch.save({"model_state_dict": state}, tmp_path / "x.pth")
    found = open_checkpoint(tmp_path / "x.pth")
    for key, tensor in state.items():
        assert torch.equal(found.rows(key, 1, 4), tensor[1:4])


def test_digests_are_those_of_the_page(zoo: Path) -> None:
    """docs/layouts/pools.md: a text of dtype and shape, then a line for each 16 MiB."""
    from blake3 import blake3

    tensor = torch.arange(5 << 20, dtype=torch.float32).reshape(5, -1)
    raw = tensor.numpy().tobytes()
    pieces = [blake3(raw[a : a + (16 << 20)]).hexdigest() for a in (0, 16 << 20)]
    text = f"float32:5,1048576\n{pieces[0]}\n{pieces[1]}\n"
    assert tensor_digest(tensor) == blake3(text.encode()).hexdigest()
    scalar = torch.tensor(3, dtype=torch.int64)
    line = blake3(scalar.numpy().tobytes()).hexdigest()
    assert tensor_digest(scalar) == blake3(f"int64:\n{line}\n".encode()).hexdigest()
    assert tensor_digest(torch.zeros(0, 2)) == blake3(b"float32:0,2\n").hexdigest()
    assert value_digest(["a", 1]) == blake3(b'value:["a",1]').hexdigest()
    pin = torch.load(zoo / cell("bertbase").pool_path(0), weights_only=True)["pin"]
    base = torch.load(zoo / cell("bertbase").base_path, weights_only=True)["model_state_dict"]
    lines = sorted((k, tensor_digest(v)) for k, v in base.items())
    state = "".join(f'{digest} "{key}"\n' for key, digest in lines)
    assert pin["base"] == blake3(state.encode()).hexdigest()


def test_a_repository_knows_digests_by_its_blobs(repository: Repository, tmp_path: Path) -> None:
    """What was read from a snapshot is not hashed twice; small and strided tensors are hashed."""
    torch.manual_seed(4)
    state = {
        "large": torch.randn(5 << 20),
        "one": torch.randn(100, 300),
        "small": torch.randn(10),
        "turned": torch.randn(300, 200).t(),
    }
    torch.save({"model_state_dict": state}, tmp_path / "x.pth")
    made = repository.commit([tmp_path / "x.pth"], namespace="n")
    opened = open_checkpoint(f"castore://n/{made.name.id}/x.pth")
    start, stop = opened.file.range(opened.state["large"])
    assert opened.source.proven(start, stop) is None  # not read yet: nothing is shown
    loaded = opened.load(opened.keys())
    known = opened.source.proven(start, stop)
    assert known is not None and len(known) == 2
    assert opened.source.proven(*opened.file.range(opened.state["small"])) is None
    for key, tensor in state.items():
        assert opened.digest(key, loaded[key]) == tensor_digest(tensor)
        assert torch.equal(loaded[key], tensor)


def test_tensors_of_a_snapshot_are_ones_own(repository: Repository, tmp_path: Path) -> None:
    """What is changed in place changes nothing that is read later."""
    torch.save(
        {"model_state_dict": {"w": torch.zeros(50_000), "s": torch.zeros(3)}}, tmp_path / "x"
    )
    made = repository.commit([tmp_path / "x"], namespace="n")
    opened = open_checkpoint(f"castore://n/{made.name.id}/x")
    for key in ("w", "s"):
        opened.tensor(key).fill_(7)
        assert not opened.tensor(key).any()


def test_a_blob_that_large_slices_share_is_decoded_once(tmp_path: Path) -> None:
    """Of a file whose blobs others cut: a slice of 1 MiB is no whole blob."""
    repository, data = Repository.init(tmp_path / "r"), bytes(range(256)) * (8 << 12)
    name = repository.commit(Draft({"f": MemoryFile(data)})).name
    (file,) = (f for _, f in repository.tree(name).files())
    (blob,) = file.blobs()
    parts = [Slice(blob, at, MIB) for at in reversed(range(0, len(data), MIB))]
    source = SnapshotSource(repository, replace(file, slices=tuple(parts)), "f")
    expected = b"".join(data[s.offset : s.offset + MIB] for s in parts)
    assert source.read(0, len(data)) == expected
    assert source.fetched == len(data)
