"""Names of the experiments layout."""

from __future__ import annotations

import pytest

from castore import InvalidInputError
from castore_experiments import layout
from castore_experiments.layout import Document

HASH = "01234567" + "1234e567" + "00000000"
HOSTILE = [
    "../../x",
    "/etc/passwd",
    "a/../../b",
    "%2e%2e/",
    "..\\x",
    "C:x",
    "0123456\0",
    "s3://other/x",
    "file://x",
    "01234567#",
    "01234567\n",
    "ABCDEF01",
    "٠١٢٣٤٥٦٧",
    "",
]


def test_documented_places() -> None:
    """``models/<MODEL>/<HASH24>_step_%06d.pt`` and the others, as the layout has them."""
    hp, model, data = layout.split(HASH)
    assert layout.weights_path(HASH, 100) == f"models/1234e567/{HASH}_step_000100.pt"
    assert layout.architecture_path(model) == "models/1234e567/1234e567_architecture.pkl"
    assert layout.architecture_ref_path(model) == "models/1234e567/1234e567_architecture_ref.json"
    assert layout.config_path(hp) == "HP/01234567/01234567_config.yaml"
    assert layout.data_json_path(data) == "data/00000000/00000000_data_snapshot.json"
    assert layout.data_parquet_path(data) == "data/00000000/00000000_data_snapshot.parquet"
    assert layout.in_root("manifest.yaml") == layout.MANIFEST
    assert layout.join(hp, model, data) == HASH


@pytest.mark.parametrize("step", [0, 7, 999_999, 1_000_000, layout.MAX_STEP])
def test_steps_of_any_size_keep_the_documented_name(step: int) -> None:
    path = layout.weights_path(HASH, step)
    assert path.endswith(f"_step_{step:06d}.pt")
    assert layout.parse(path) == Document("weights", "1234e567", HASH, step)


@pytest.mark.parametrize("step", [-1, layout.MAX_STEP + 1, True, 1.0, "1"])
def test_no_step(step: int) -> None:
    with pytest.raises(InvalidInputError, match="step"):
        layout.weights_path(HASH, step)


def test_what_a_path_is() -> None:
    assert layout.parse(layout.config_path("0000000a")) == Document("config", "0000000a")
    kinds = {
        "data/00000000/00000000_data_snapshot.json": "data_json",
        "data/00000000/00000000_data_snapshot.parquet": "data_parquet",
        "data/00000000/00000000_data_snapshot.data.json": "data_rows",
        "models/00000000/00000000_architecture.pkl": "architecture",
        "models/00000000/00000000_architecture.txt": "architecture_text",
        "models/00000000/00000000_architecture_ref.json": "architecture_ref",
    }
    for path, kind in kinds.items():
        assert layout.parse(path) == Document(kind, "00000000")  # type: ignore[arg-type]
    old = layout.parse("models/1234e567/1234e567_step_12.pt")
    assert old == Document("weights", "1234e567", None, 12)


@pytest.mark.parametrize(
    "path",
    [
        "manifest.yaml",
        "data/data.h5",
        "models/1234e567/projection/x.pt",
        f"models/00000000/{HASH}_step_000001.pt",
        "models/1234e567/00000000_step_000001.pt",
        f"models/1234e567/{HASH}_step_.pt",
        f"models/1234e567/{HASH}_step_-1.pt",
        f"models/1234e567/{HASH}_step_٣.pt",
        f"models/1234e567/{HASH}_step_99999999999999999999.pt",
        f"models/1234e567/{HASH}_step_000001.pt\n",
        f"models/1234e567/../1234e567/{HASH}_step_000001.pt",
        f"/models/1234e567/{HASH}_step_000001.pt",
        "HP/01234567/01234568_config.yaml",
        "hp/01234567/01234567_config.yaml",
        "HP/01234567/01234567_data_snapshot.json",
    ],
)
def test_what_is_nobodys_document(path: str) -> None:
    assert layout.parse(path) is None


@pytest.mark.parametrize("text", HOSTILE)
def test_ids_are_checked_before_a_path_is_built_se2(text: str) -> None:
    """SE2: fields are ids checked by an allow-list before any path is built."""
    for build in (layout.config_path, layout.data_json_path, layout.architecture_path):
        with pytest.raises(InvalidInputError):
            build(text)
    for call in (layout.split, lambda t: layout.weights_path(t, 1)):
        with pytest.raises(InvalidInputError):
            call(text + text + text)
    assert not layout.is_label(text)
    assert not layout.is_hash(text * 3)
