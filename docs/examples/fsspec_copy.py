"""fsspec: find files, look at them, copy some to a disk, each whole or not at all."""

from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec

from castore import Repository

with TemporaryDirectory() as folder:
    run, store = Path(folder, "run"), Path(folder, "store")
    (run / "step 1").mkdir(parents=True)
    (run / "step 1" / "weights.bin").write_bytes(bytes(1000))
    (run / "notes.txt").write_text("first try\n")
    name = Repository.init(store).commit([run], namespace="me").name

    fs = fsspec.filesystem("castore", repository=str(store))
    assert fs.ls("me", detail=False) == [f"me/{name.id}"]
    for path in fs.find("me/latest"):
        info = fs.info(path)
        print(info["size"], info["sha256"][:16], info["modified"].isoformat(), path)
    fs.get("me/latest", f"{folder}/copy", recursive=True)
    assert Path(folder, "copy", "step 1", "weights.bin").read_bytes() == bytes(1000)
    try:
        fs.pipe("me/latest/new", b"")
    except OSError as e:
        print(e)
