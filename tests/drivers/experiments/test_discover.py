"""Finding roots at and below a place, local and on S3."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from castore import BackendError, Repository
from castore_experiments.discover import discover
from castore_experiments.files import open_files
from castore_experiments.layout import MANIFEST
from castore_experiments.manifest import Change, Manifest, entry_of
from castore_experiments.manifest_file import ManifestFile
from tests.drivers.experiments.places import KINDS, place
from tests.helpers import ODD_ROOTS
from tests.test_backend_local import in_child, root_only

DAYS = [f"2026-11-{day:02}T03:11:40.130644" for day in range(1, 29)]
HASH = "0a" * 12


@pytest.fixture(params=KINDS)
def given(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, request, tmp_path, "scorer_exp")


def make_root(url: str, updated: str, last_used: str | None = None) -> None:
    file = ManifestFile(open_files(url), Manifest, report=print, clock=time.time)
    entry = entry_of(HASH, created=DAYS[0], last_used=last_used or updated)
    file.update(Change({HASH: entry}, HASH, updated))


def put(url: str, name: str, data: bytes) -> None:
    open_files(url).create(name, data)


def urls(given: str, *names: str) -> list[str]:
    return [f"{given}/{n}" if n else given for n in names]


def found(given: str) -> list[str]:
    return [f.url for f in discover(given).roots]


def test_nothing_found(given: str) -> None:
    """Seed: "**Nothing found** (a brand-new, empty directory) — behaves exactly as before: a fresh
    experiment is started there."
    """
    discovery = discover(given)
    assert (discovery.given, discovery.root, discovery.roots) == (given, given, ())
    assert not discovery.is_multi_root


@pytest.mark.parametrize("name", ["", "a", "a/b/c"])
def test_one_root(given: str, name: str) -> None:
    """Seed: "**One root found** (directly, or the sole nested one) — adopted as-is"."""
    (root,) = urls(given, name)
    make_root(root, DAYS[1])
    discovery = discover(given)
    assert (discovery.root, found(given)) == (root, [root])
    assert not discovery.is_multi_root
    assert discovery.problems == ()


def test_the_most_recently_updated_of_several(given: str) -> None:
    """Seed: "**Several roots found** — the one whose manifest was **most recently updated** is
    adopted as the effective root".
    """
    names = ["dataShuffling_tests/v1", "dataShuffling_tests/v2", "lr_tests/v1", "lr_tests/v2"]
    for name, day in zip(names, (2, 9, 3, 4), strict=True):
        make_root(f"{given}/{name}", DAYS[day])
    discovery = discover(given)
    assert found(given) == urls(given, *names)
    assert discovery.is_multi_root
    assert discovery.root == f"{given}/dataShuffling_tests/v2"
    assert discovery.siblings == tuple(urls(given, names[0], names[2], names[3]))


def test_a_weight_save_counts_as_an_update(given: str) -> None:
    make_root(f"{given}/a", DAYS[3], last_used=DAYS[20])
    make_root(f"{given}/b", DAYS[10])
    assert discover(given).root == f"{given}/a"


def test_of_equals_the_last_by_name(given: str) -> None:
    for name in "bca":
        make_root(f"{given}/{name}", DAYS[3])
    assert discover(given).root == f"{given}/c"


def test_three_levels_below_and_no_deeper(given: str) -> None:
    """Seed: "recursively searches up to 3 levels of subdirectories below the given root for
    anything containing ``checkpoints/manifest.yaml`` (so ``scorer_exp/lr_tests/v1`` — 2 levels down
    — is found; deeper than that is not)".
    """
    names = ["", "1", "1/2", "1/2/3", "1/2/3/4"]
    for day, name in enumerate(names):
        make_root(urls(given, name)[0], DAYS[day])
    assert found(given) == urls(given, *names[:4])
    assert discover(given).root == f"{given}/1/2/3"


def test_where_it_does_not_go(given: str) -> None:
    """Dot folders, ``checkpoints`` and repositories are not entered."""
    make_root(given, DAYS[1])
    for name in (".castore/x", ".hidden", "checkpoints/x", "a/.git/b", "store/objects"):
        make_root(f"{given}/{name}", DAYS[9])
    put(f"{given}/store", "config.json", b"{}")
    put(f"{given}/store", "snapshots/x/y.json", b"")
    assert found(given) == [given]


def test_a_real_repository_in_the_root(given: str) -> None:
    repository = Repository.init(f"{given}/.castore")
    other = Repository.init(f"{given}/shared")
    for each in (repository, other):
        each.commit([__file__], namespace="x")
    make_root(given, DAYS[1])
    assert found(given) == [given]


@pytest.mark.parametrize("name", ODD_ROOTS)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_names_s37(
    kind: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """S37: nested roots are discovered under names that look like patterns or escapes."""
    given = place(kind, request, tmp_path, "runs")
    roots = urls(given, name, f"{name}/plain/{name}")
    for root, day in zip(roots, (5, 4), strict=True):
        make_root(root, DAYS[day])
    assert found(given) == sorted(roots)
    assert discover(given).root == roots[0]
    assert found(roots[0]) == sorted(roots)


@pytest.mark.parametrize("bad", [b"", b"experiments: [", b"experiments: {}\ncastore: {format: 9}"])
def test_a_damaged_manifest_ranks_last_and_is_listed(given: str, bad: bytes) -> None:
    put(f"{given}/z", MANIFEST, bad)
    alone = discover(given)
    assert alone.root == f"{given}/z" and len(alone.problems) == 1
    make_root(f"{given}/a", DAYS[1])
    discovery = discover(given)
    assert discovery.root == f"{given}/a"
    assert found(given) == urls(given, "a", "z")
    assert f"{given}/z/{MANIFEST}" in discovery.problems[0]


def test_a_trailing_slash(given: str) -> None:
    make_root(f"{given}/a", DAYS[1])
    discovery = discover(given + "/")
    assert (discovery.given, discovery.root) == (given + "/", f"{given}/a")


# -- local only


def test_relative_paths_and_path_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_root(str(tmp_path / "x/y"), DAYS[1])
    monkeypatch.chdir(tmp_path)
    assert discover("x").root == str(tmp_path / "x/y")
    assert discover(Path("x")).root == str(tmp_path / "x/y")
    assert discover(f"file://{tmp_path}/x").root == str(tmp_path / "x/y")


def test_links_and_loops(tmp_path: Path) -> None:
    """Dot folders and symlink loops are not entered; a linked root counts once, by its own name."""
    given = tmp_path / "given"
    make_root(str(given / "v2"), DAYS[1])
    make_root(str(tmp_path / "elsewhere/v3"), DAYS[2])
    (given / "best").symlink_to("v2")
    (given / "away").symlink_to(tmp_path / "elsewhere")
    (given / "v2/loop").symlink_to(given)
    (given / "up").symlink_to("/")
    (given / "self").symlink_to("self")
    (given / "nowhere").symlink_to("gone")
    discovery = discover(given)
    assert [f.url for f in discovery.roots] == urls(str(given), "away/v3", "v2")
    assert discovery.problems == ()


def test_a_link_reaches_deeper_than_the_way_round(tmp_path: Path) -> None:
    make_root(str(tmp_path / "given/a/b/c/d"), DAYS[1])
    (tmp_path / "given/near").symlink_to("a/b/c")
    assert found(str(tmp_path / "given")) == [str(tmp_path / "given/near/d")]


def test_a_file_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BackendError, match="file"):
        discover(tmp_path / "file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("x")
    assert discover(tmp_path / "run").roots == ()


@root_only
def test_no_permission_is_never_nothing_there() -> None:
    """A folder that cannot be listed is told; a manifest that cannot be read is an error."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        make_root(f"{folder}/a", DAYS[1])
        Path(folder, "lost").mkdir(mode=0)

        def told() -> None:
            assert "lost" in discover(folder).problems[0]

        def refused() -> None:
            with pytest.raises(BackendError, match=MANIFEST):
                discover(folder)

        assert in_child(told, uid=65534) == 0
        Path(folder, "a", MANIFEST).chmod(0)
        assert in_child(refused, uid=65534) == 0


# -- S3 only


def test_a_store_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(BackendError):
        discover("s3://nowhere/exp")
