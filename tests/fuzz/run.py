"""Fuzz one target with atheris: ``python -m tests.fuzz.run TARGET --seconds 600``.

atheris is a tool of this command alone; no test needs it. The kept corpus
(``tests/fuzz/corpus/TARGET``) and the valid files of `tests.fuzz.seeds` are where it begins. What
it finds beyond them goes to ``--work``; an input that breaks the contract is written there as
``crash-*`` and ends the run. ``--keep`` fuzzes nothing, and puts the last small finds of a working
folder, which reach deepest, into the corpus.
"""

from __future__ import annotations

import argparse
import resource
import sys
from hashlib import sha256
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
LONGEST = 4096
_ADDRESSES = 3 << 30
_KEPT, _KEPT_EACH = 10_000, 2500
_OF_CASTORE = ["castore", "castore_experiments", "castore_receipts", "castore_pools", "yaml"]


def main() -> None:
    """Run until the time is over, or an input breaks the contract."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("target")
    words.add_argument("--seconds", type=int, default=600)
    words.add_argument("--work", type=Path, required=True, help="a folder for what is found")
    words.add_argument("--keep", action="store_true")
    given = words.parse_args()
    folder: Path = given.work / given.target
    folder.mkdir(parents=True, exist_ok=True)
    if given.keep:
        _keep(folder, CORPUS / given.target)
    else:
        _fuzz(given.target, folder, given.seconds)


def _keep(found: Path, corpus: Path) -> None:
    """The last finds of at most `_KEPT_EACH` bytes each, `_KEPT` together."""
    corpus.mkdir(parents=True, exist_ok=True)
    left = _KEPT
    for path in sorted(found.iterdir(), key=lambda p: p.stat().st_mtime_ns, reverse=True):
        data = path.read_bytes()
        if data and len(data) <= min(left, _KEPT_EACH):
            left -= len(data)
            (corpus / sha256(data).hexdigest()[:16]).write_bytes(data)


def _fuzz(target: str, folder: Path, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=_OF_CASTORE, enable_loader_override=False):
        from tests.fuzz import targets

    from tests.fuzz import contract, seeds

    for data in seeds.seeds(target):
        (folder / sha256(data).hexdigest()[:16]).write_bytes(data)
    kept = CORPUS / target
    kept.mkdir(parents=True, exist_ok=True)
    function = targets.TARGETS[target]
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST}",
        f"-timeout={contract.SECONDS}",
        "-rss_limit_mb=3000",
        "-print_final_stats=1",
        f"-artifact_prefix={folder.parent}/{target}-",
    ]
    guard = contract.Guard()
    for data in seeds.seeds(target):  # what is imported or allocated once is no input's doing
        contract.run(function, data, guard)
    _bound_addresses()
    atheris.Setup(
        [sys.argv[0], *options, str(folder), str(kept)],
        lambda data: contract.run_watched(function, data, guard),
    )
    atheris.Fuzz()


def _bound_addresses() -> None:
    """Memory that is asked for and never touched fails too."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
