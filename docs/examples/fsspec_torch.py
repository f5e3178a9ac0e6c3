"""PyTorch: weights of a snapshot, loaded without a copy on disk and without running a pickle."""

from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec
import torch

from castore import Repository

with TemporaryDirectory() as folder:
    run, store = Path(folder, "run"), Path(folder, "store")
    run.mkdir()
    model = torch.nn.Linear(8, 2)
    torch.save(model.state_dict(), run / "weights.pt")
    Repository.init(store).commit([run], namespace="me")

    with fsspec.open("castore://me/latest/weights.pt", repository=str(store)) as file:
        loaded = torch.load(file, weights_only=True)
    model.load_state_dict(loaded)
    print({name: tuple(tensor.shape) for name, tensor in loaded.items()})
