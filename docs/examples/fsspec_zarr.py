"""zarr: a store that was committed as files, opened in place."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import zarr
from zarr.storage import FsspecStore

from castore import Repository

with TemporaryDirectory() as folder:
    store = Path(folder, "store")
    group = zarr.open_group(Path(folder, "run.zarr"), mode="w")
    values = np.arange(10_000, dtype="float32").reshape(100, 100)
    group.create_array("activations", shape=(100, 100), chunks=(10, 100), dtype="f4")[:] = values
    Repository.init(store).commit([Path(folder, "run.zarr")], namespace="me")

    opened = FsspecStore.from_url(
        "castore://me/latest", storage_options={"repository": str(store)}, read_only=True
    )
    array = zarr.open_group(opened, mode="r")["activations"]
    assert np.array_equal(array[20:30], values[20:30])
    print(array.info)
