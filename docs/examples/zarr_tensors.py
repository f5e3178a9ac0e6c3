"""Look into committed checkpoints as arrays: a slice fetches only the blobs it lies in."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from castore import Repository
from castore.zarr_view import tensors_group


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        run.mkdir()
        weight = torch.randn(512, 256)
        saved = {"encoder.weight": weight, "head": weight.t().bfloat16()}
        torch.save({"model": saved, "step": 3}, run / "step3.pt")
        repository = Repository.init(Path(folder, "store"))
        name = repository.commit([run], namespace="me").name

        # Dictionaries are groups; dots stay in names; nothing is unpickled.
        model = tensors_group(repository, name, "step3.pt")["model"]
        for key, array in model.arrays():
            print(f"{key}: {array.shape} {array.dtype}")
        rows = model["encoder.weight"][10:12]
        np.testing.assert_array_equal(rows, weight[10:12].numpy())
        assert model["head"].shape == (256, 512)
        assert str(model["head"].dtype) == "bfloat16"


if __name__ == "__main__":
    main()
