"""zarr 3 over a repository: tensors of committed files as arrays, and a store whose commit is a
snapshot.

    from castore.zarr_view import SnapshotStore, tensors_group
    group = tensors_group(repository, "me@latest", "model.safetensors")
    rows = group["encoder.weight"][:10]

Needs the extra ``zarr``.
"""

from __future__ import annotations

try:
    from castore.zarr_view.store import SnapshotStore
    from castore.zarr_view.tensors import TensorStore, tensors_group
except ModuleNotFoundError as e:
    if e.name not in ("zarr", "ml_dtypes"):
        raise
    raise ModuleNotFoundError(
        f"castore.zarr_view needs {e.name}: pip install 'castore[zarr]'", name=e.name
    ) from e

__all__ = ["SnapshotStore", "TensorStore", "tensors_group"]
