"""One function for each reader of bytes that somebody else may have written.

The contract of each target, for any bytes: it returns, or raises an error of `castore.errors`.
No other exception; time and memory bounded by what `tests.fuzz.contract` states; nothing opened
for writing, no process started, no name looked up for unpickling.
"""

from __future__ import annotations

import io
import itertools
import json
import struct
import zipfile
from collections.abc import Callable

import xxhash

from castore import document, frame
from castore.cut import PIECE, cut
from castore.cutters import storages
from castore.errors import FormatError
from castore.snapshot import Snapshot, parse_name
from castore.tensors import describe
from castore.tree import Tree
from castore_experiments import config_yaml, documents, manifest, packing, rng, weightfile
from castore_experiments import yaml_subset as subset
from castore_experiments.root import Pending, RootRecord
from castore_pools.checkpoint import open_checkpoint
from castore_pools.pins import frozen_keys_of, read_pin
from castore_pools.registry import parse_registry
from castore_pools.sources import BytesSource
from castore_receipts import documents as receipts
from castore_receipts.arrays import arrays_digest, first_nonfinite, read_safetensors
from castore_receipts.traces import read_npz

WHERE = "fuzzed"
_LARGEST_BASE = 1 << 20


# -- castore


def cut_file(data: bytes) -> None:
    """Pieces follow one another over the whole file, whatever is in it."""
    pieces = cut("file", len(data), lambda start, stop: data[start:stop])
    edges = [0, *(p.stop for p in pieces)]
    assert [p.start for p in pieces] == edges[:-1] and edges[-1] == len(data)
    assert all(0 < p.stop - p.start <= PIECE for p in pieces)
    assert not any(a.small and b.small for a, b in itertools.pairwise(pieces))


def cut_header(data: bytes) -> None:
    """``data`` is the JSON header of a safetensors file whose tensors have 64 KiB."""
    cut_file(struct.pack("<Q", len(data)) + data + bytes(64 << 10))


def pickle_storages(data: bytes) -> None:
    """``data`` is the pickle of a torch file."""
    found = storages.widths(data, {"0", "1", "2"})
    assert set(found) <= {"0", "1", "2"} and set(found.values()) <= {1, 2, 4, 8}


def read_frame(data: bytes) -> None:
    """A frame as it is stored; its content has the length that its header promises."""
    header = frame.parse_header(data, WHERE)
    content = frame.decode(data, _base(header), WHERE)
    assert len(content) == header.content_length


def sealed_frame(data: bytes) -> None:
    """The same, with right checksums put in: what a hostile writer would do."""
    head, payload = data[:48].ljust(48, b"\0"), data[48:]
    head = b"cst1\x01" + head[5:12] + struct.pack("<I", len(payload)) + head[16:]
    head += xxhash.xxh3_64_digest(payload)
    read_frame(head + xxhash.xxh3_64_digest(head) + payload)


def _base(header: frame.Header) -> bytes | None:
    small = header.codec == frame.DELTA and header.content_length <= _LARGEST_BASE
    return bytes(header.content_length) if small else None


def read_tree(data: bytes) -> None:
    """A tree that is read is spelled again as it was."""
    tree = Tree.decode(data, WHERE)
    assert tree.encode() == data
    assert sum(1 for _ in tree.files()) <= len(tree.entries)
    tree.blobs(), tree.blob_lengths()


def read_snapshot(data: bytes) -> None:
    """A snapshot that is read is spelled again as it was."""
    assert Snapshot.decode(data, WHERE).encode() == data


def spelled_tree(data: bytes) -> None:
    """A tree's entries in any spelling of JSON, spelled as castore does before they are read."""
    read_tree(_spelled(data, "tree"))


def spelled_snapshot(data: bytes) -> None:
    """The same for a snapshot."""
    read_snapshot(_spelled(data, "snapshot"))


def _spelled(data: bytes, kind: str) -> bytes:
    try:
        body = json.loads(data)
        return document.encode(kind, body) if isinstance(body, dict) else data
    except (ValueError, TypeError, RecursionError):
        return data


def snapshot_name(data: bytes) -> None:
    """A listed name; what is a name gives its parts, anything else is None."""
    name = parse_name(data.decode("utf-8", "surrogateescape"))
    if name is not None:
        assert name.path and name.id and name.time >= 0
        assert ".." not in name.path.split("/")


def small_documents(data: bytes) -> None:
    """The other documents of a repository and of a root."""
    for kind, keys in (("config", ["hash", "id"]), ("prune", ["id", "end"])):
        _tolerant(lambda kind=kind, keys=keys: document.decode(data, kind, keys, WHERE))
    _tolerant(lambda: RootRecord.decode(data, WHERE))
    _tolerant(lambda: Pending.decode(data, WHERE))


def _tolerant(read: Callable[[], object]) -> None:
    try:
        read()
    except FormatError:
        pass


def describe_tensors(data: bytes) -> None:
    """Every range of a described file lies within it."""
    found = describe(lambda start, stop: data[start:stop], len(data))
    for info in found.tensors.values():
        start, stop = found.range(info) if info.contiguous else found.storage_range(info.storage)
        assert 0 <= start <= stop <= len(data)
    found.ties()


def describe_pickle(data: bytes) -> None:
    """``data`` is the pickle of a torch file with two storages."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", bytes(24))
        archive.writestr("archive/data/1", bytes(8))
    describe_tensors(out.getvalue())


# -- experiments


def read_manifest(data: bytes) -> None:
    """What is read can be written and read again; the quick way of reading gives what YAML is."""
    own = manifest._own(data)
    if own is not None:
        assert repr(own) == repr(subset.load(data, WHERE))
    text = manifest.render(manifest.parse(data, WHERE))
    assert manifest.render(manifest.parse(text, WHERE)) == text


def read_yaml(data: bytes) -> None:
    """YAML as a manifest may use it; what was read can be written on a line."""
    subset.write(subset.load(data, WHERE))


def read_config(data: bytes) -> None:
    """Hyperparameters, stored by castore, and as files of anyone's."""
    for read in (config_yaml.from_yaml, config_yaml.hp_file):
        _tolerant(lambda read=read: read(data, WHERE))


def weight_file(data: bytes) -> None:
    """A weight file by torch's restricted reader."""
    weightfile.decode(data, WHERE)


def data_document(data: bytes) -> None:
    """A data state with its random streams and positions."""
    found = documents.DataDocument.decode(data, WHERE)
    if found.rng_state is not None:
        _tolerant(lambda: rng.check(rng.from_json(found.rng_state or {})))
    for state in found.loaders.values():
        _tolerant(lambda state=state: packing.unpack(state))


# -- receipts


def receipt(data: bytes) -> None:
    """A receipt, and the text that its seal is taken of."""
    receipts.digest_of(receipts.parse(data, WHERE))


def receipt_arrays(data: bytes) -> None:
    """The safetensors of a policy or of a training state."""
    file = read_safetensors(data, WHERE)
    first_nonfinite(file.tensors)
    arrays_digest(file.tensors)


def receipt_traces(data: bytes) -> None:
    """The ``.npz`` of validation traces; never an array of objects."""
    assert not any(a.dtype.hasobject for a in read_npz(data, WHERE).values())


# -- pools


def pool_checkpoint(data: bytes) -> None:
    """A base or pool file: its fields, its pin, its ties, and each small tensor."""
    opened = open_checkpoint(BytesSource(data, WHERE))
    opened.ties()
    read_pin(opened.fields.get("pin"), WHERE)
    opened.load(opened.keys()[:50])
    frozen_keys_of(opened.fields, WHERE)


def pool_registry(data: bytes) -> None:
    """A registry of pools."""
    for record in parse_registry(data, "task", WHERE):
        assert ".." not in str(record.cell).split("/")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "cut_safetensors": cut_file,
    "cut_torch": cut_file,
    "cut_npz": cut_file,
    "cut_header": cut_header,
    "pickle_storages": pickle_storages,
    "frame": read_frame,
    "sealed_frame": sealed_frame,
    "tree": read_tree,
    "snapshot": read_snapshot,
    "spelled_tree": spelled_tree,
    "spelled_snapshot": spelled_snapshot,
    "snapshot_name": snapshot_name,
    "small_documents": small_documents,
    "describe": describe_tensors,
    "describe_pickle": describe_pickle,
    "manifest": read_manifest,
    "yaml": read_yaml,
    "config": read_config,
    "weight_file": weight_file,
    "data_document": data_document,
    "receipt": receipt,
    "receipt_arrays": receipt_arrays,
    "receipt_traces": receipt_traces,
    "pool_checkpoint": pool_checkpoint,
    "pool_registry": pool_registry,
}
