"""safetensors: the header, then the bytes of some tensors; nothing else is fetched."""

import json
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from castore import Repository
from castore.filesystem import CastoreFileSystem

with TemporaryDirectory() as folder:
    run, store = Path(folder, "run"), Repository.init(Path(folder, "store"))
    run.mkdir()
    tensors = {f"layer{i}": np.full((200, 100), i, "float32") for i in range(8)}
    save_file(tensors, run / "model.safetensors")
    store.commit([run], namespace="me")

    fs, path = CastoreFileSystem.of(store), "me/latest/model.safetensors"
    (length,) = struct.unpack("<Q", fs.cat_file(path, 0, 8))
    header = json.loads(fs.cat_file(path, 8, 8 + length))
    wanted = ["layer2", "layer5"]
    spans = [header[name]["data_offsets"] for name in wanted]
    parts = fs.cat_ranges(
        [path] * 2,
        [8 + length + a for a, _ in spans],
        [8 + length + b for _, b in spans],
        on_error="raise",
    )
    for name, part in zip(wanted, parts, strict=True):
        array = np.frombuffer(part, "float32").reshape(header[name]["shape"])
        assert np.array_equal(array, tensors[name])
    print(f"{fs.cached} of {fs.size(path)} bytes were fetched")
