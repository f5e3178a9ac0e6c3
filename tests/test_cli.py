"""Every command, in this process and as a program: what it prints, and what it exits with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from castore.cli import app
from castore.cli.options import parse_duration, parse_share, parse_since
from castore.cli.output import aligned, printable, size


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "a.txt").write_text("hello\n")
    (folder / "sub" / "b.bin").write_bytes(os.urandom(512_000))
    (folder / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "tool.sh").chmod(0o755)
    (folder / "link").symlink_to("a.txt")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = str(tmp_path / "store")
    assert castore("init", "-r", url).exit_code == 0
    return url


def castore(*words: str, env: dict[str, str | None] | None = None) -> Result:
    clean: dict[str, str | None] = {"CASTORE_REPOSITORY": None, "CASTORE_TRACEBACK": None}
    return CliRunner(env=clean).invoke(app, list(words), env=env, prog_name="castore")


def documents(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def committed(store: str, folder: Path, *words: str) -> str:
    result = castore("commit", str(folder), "-r", store, *words)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def damage(store: str) -> str:
    """Flip a byte in the middle of the largest object; gives its digest."""
    objects = [p for p in Path(store, "objects").rglob("*") if p.is_file()]
    path = max(objects, key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    return path.name


# -- the way of a folder


def test_commit_prints_a_name_that_everything_takes(store: str, run_folder: Path) -> None:
    name = committed(store, run_folder, "-n", "me", "--label", "task=x")
    assert name.startswith("me@")
    for text in ("latest", "me@latest", name, name[3:], name[3:9]):
        assert castore("cat", f"{text}:a.txt", "-r", store).stdout == "hello\n"


def test_the_repository_may_come_from_the_environment(store: str, run_folder: Path) -> None:
    env: dict[str, str | None] = {"CASTORE_REPOSITORY": store}
    assert castore("commit", str(run_folder), env=env).exit_code == 0
    assert castore("snapshots", env=env).exit_code == 0


def test_checkout_gives_the_folder_back(store: str, run_folder: Path, tmp_path: Path) -> None:
    committed(store, run_folder)
    target = tmp_path / "out"
    assert castore("checkout", "latest", str(target), "-r", store, "--sha256").exit_code == 0
    assert (target / "sub/b.bin").read_bytes() == (run_folder / "sub/b.bin").read_bytes()
    assert (target / "sub/empty").is_dir()
    assert os.readlink(target / "link") == "a.txt"
    assert os.access(target / "tool.sh", os.X_OK)


def test_checkout_of_a_part(store: str, run_folder: Path, tmp_path: Path) -> None:
    committed(store, run_folder)
    assert (
        castore("checkout", "latest:sub/b.bin", str(tmp_path / "one"), "-r", store).exit_code == 0
    )
    assert os.listdir(tmp_path / "one") == ["b.bin"]


def test_checkout_replaces_only_with_force(store: str, run_folder: Path, tmp_path: Path) -> None:
    committed(store, run_folder)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a.txt").write_text("mine")
    words = ["checkout", "latest", str(tmp_path / "out"), "-r", store]
    refused = castore(*words)
    assert refused.exit_code == 1
    assert "--force" in refused.stderr
    assert (tmp_path / "out/a.txt").read_text() == "mine"
    assert castore(*words, "--force").exit_code == 0
    assert (tmp_path / "out/a.txt").read_text() == "hello\n"


def test_snapshots_are_listed_newest_first(store: str, run_folder: Path) -> None:
    names = [committed(store, run_folder, "-n", n, "--label", f"of={n}") for n in ("a", "b", "a")]
    lines = castore("snapshots", "-r", store).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [n[2:] for n in reversed(names)]
    assert "of=b" in lines[2]
    shown = documents(castore("snapshots", "-r", store, "-n", "a", "--limit", "1", "--json"))
    assert [d["snapshot"] for d in shown] == [names[2]]
    assert shown[0]["files"] == 3


def test_ls_tells_kind_size_and_path(store: str, run_folder: Path) -> None:
    committed(store, run_folder)
    lines = [line.split() for line in castore("ls", "latest", "-r", store).stdout.splitlines()]
    assert lines == [
        ["-", "6", "a.txt"],
        ["l", "0", "link", "->", "a.txt"],
        ["-", "512000", "sub/b.bin"],
        ["d", "0", "sub/empty"],
        ["x", "10", "tool.sh"],
    ]
    assert castore("ls", "latest:sub", "-r", store).stdout.split()[2] == "b.bin"


def test_cat_is_binary_safe(store: str, run_folder: Path) -> None:
    committed(store, run_folder)
    result = castore("cat", "latest:sub/b.bin", "-r", store)
    assert result.stdout_bytes == (run_folder / "sub/b.bin").read_bytes()


def test_forget_unforget_prune(store: str, run_folder: Path) -> None:
    name = committed(store, run_folder)
    assert castore("forget", "latest", "-r", store, "--dry-run").stdout.startswith("would forget")
    assert len(castore("snapshots", "-r", store).stdout.splitlines()) == 2
    assert castore("forget", name, "-r", store).exit_code == 0
    assert len(castore("snapshots", "-r", store).stdout.splitlines()) == 1
    assert name[5:] in castore("snapshots", "-r", store, "--forgotten").stdout
    back = castore("unforget", name[5:], "-r", store)
    assert back.exit_code == 0
    assert castore("cat", f"{back.stdout.strip()}:a.txt", "-r", store).stdout == "hello\n"


def test_forget_refuses_all_if_it_refuses_one(store: str, run_folder: Path) -> None:
    name = committed(store, run_folder)
    assert castore("forget", name, "ffffffff", "-r", store).exit_code == 1
    assert castore("cat", f"{name}:a.txt", "-r", store).exit_code == 0


def test_unforget_refuses_all_if_it_refuses_one_and_takes_one_twice(
    store: str, run_folder: Path
) -> None:
    names = [committed(store, run_folder, "--label", f"n={i}") for i in "12"]
    assert castore("forget", *names, "-r", store).exit_code == 0
    assert castore("unforget", names[0], "ffffffff", "-r", store).exit_code == 1
    assert castore("cat", f"{names[0]}:a.txt", "-r", store).exit_code == 1, "still forgotten"
    done = castore("unforget", names[0], names[1], names[0][:12], "-r", store, "--json")
    assert (done.exit_code, [d["id"] for d in documents(done)]) == (0, [n[5:] for n in names])


def test_prune_says_what_goes_and_a_dry_run_says_the_same(store: str, run_folder: Path) -> None:
    committed(store, run_folder)
    castore("forget", "latest", "-r", store)
    kept = castore("prune", "-r", store, "--json")
    assert documents(kept)[-1]["objects"] == 0, "14 days of grace"
    words = ["prune", "-r", store, "--grace", "0", "--json"]
    dry, real = documents(castore(*words, "--dry-run")), documents(castore(*words))
    assert [d["object"] for d in dry if d["type"] == "deleted"] == [
        d["object"] for d in real if d["type"] == "deleted"
    ]
    assert real[-1]["objects"] > 0
    assert not [p for p in Path(store, "objects").rglob("*") if p.is_file()]


def test_ux6_a_dry_run_says_by_what_people_know_the_snapshots(store: str, run_folder: Path) -> None:
    committed(store, run_folder, "-n", "alice", "--label", "step=100", "--label", "run=b\x1b[2J")
    castore("forget", "alice@latest", "-r", store)
    words = ["prune", "-r", store, "--grace", "0", "--dry-run"]
    told = castore(*words).stdout
    assert "alice@" in told and "step=100" in told and "its grace is over" in told
    assert "no snapshot needs it" in told and "\x1b" not in told
    [expired] = [d for d in documents(castore(*words, "--json")) if d["type"] == "expired"]
    assert expired["labels"]["step"] == "100" and expired["size"] > 0 and expired["reason"]


def test_copy_sends_only_what_is_asked_for(store: str, run_folder: Path, tmp_path: Path) -> None:
    committed(store, run_folder, "-n", "a", "--label", "keep=yes")
    committed(store, run_folder, "-n", "b")
    other = str(tmp_path / "other")
    castore("init", "-r", other)
    words = ["copy", "-r", store, "--to", other]
    assert len(castore(*words, "--label", "keep=yes").stdout.split()) == 1
    assert len(castore(*words, "-n", "b", "--since", "7d").stdout.split()) == 1
    assert documents(castore(*words, "--json"))[-1]["skipped"] == 2
    assert castore("check", "-r", other, "--read-data").exit_code == 0


def test_usage_adds_up(store: str, run_folder: Path) -> None:
    committed(store, run_folder, "-n", "a")
    shown = documents(castore("usage", "-r", store, "--json"))
    total = shown[-1]
    assert [d["type"] for d in shown] == ["namespace", "snapshot", "total"]
    assert shown[1]["unique"] == shown[1]["stored"] == total["stored"]
    assert total["logical"] == 512016
    assert "ratio" in castore("usage", "-r", store).stdout


def test_drivers_and_a_driver_that_is_not_installed(store: str, run_folder: Path) -> None:
    shown = castore("drivers").stdout
    assert [line.split()[0] for line in shown.splitlines()[1:]] == [
        *("dcp", "experiments", "folder", "pools", "receipts")
    ]
    assert castore("commit", str(run_folder), "-r", store, "--driver", "folder").exit_code == 0
    missing = castore("commit", str(run_folder), "-r", store, "--driver", "nope")
    assert missing.exit_code == 1
    assert "folder" in missing.stderr


def test_commit_takes_a_base_and_ways_of_writing(store: str, run_folder: Path) -> None:
    committed(store, run_folder)
    committed(
        store, run_folder, "--base", "latest:sub", "--compression", "none", "--max-chain", "0"
    )
    committed(store, run_folder, "--verify-hits")


# -- check


def test_check_of_a_sound_repository(store: str, run_folder: Path, tmp_path: Path) -> None:
    committed(store, run_folder)
    state = str(tmp_path / "state")
    for words in ([], ["--read-data", "--state", state], ["--sample", "50%"], ["--layout"]):
        assert castore("check", "-r", store, *words).exit_code == 0
    assert documents(castore("check", "-r", store, "--since", "1d", "--json"))[-1]["snapshots"] == 1
    assert documents(castore("check", "-r", store, "--since", "0", "--json"))[-1]["snapshots"] == 0


def test_check_names_what_is_damaged_and_who_needs_it(store: str, run_folder: Path) -> None:
    name = committed(store, run_folder)
    digest = damage(store)
    result = castore("check", "-r", store, "--read-data")
    assert result.exit_code == 3
    assert f"corrupt: {digest}" in result.stdout
    assert f"needed by {name}:sub/b.bin" in result.stdout
    problem, summary = documents(castore("check", "-r", store, "--read-data", "--json"))
    assert (problem["type"], problem["kind"], problem["object"]) == ("problem", "corrupt", digest)
    assert problem["needed_by"] == [[name, "sub/b.bin"]]
    assert summary["problems"] == 1


def test_check_repairs_from_another_repository(
    store: str, run_folder: Path, tmp_path: Path
) -> None:
    committed(store, run_folder)
    good = str(tmp_path / "good")
    shutil.copytree(store, good)
    digest = damage(store)
    result = castore("check", "-r", store, "--read-data", "--repair-from", good, "--json")
    assert result.exit_code == 0, result.output
    assert documents(result)[0] == {"type": "repaired", "object": digest, "source": good}


# -- errors, each with its own exit code


def test_no_repository_is_10(tmp_path: Path) -> None:
    result = castore("snapshots", "-r", str(tmp_path / "none"))
    assert result.exit_code == 10
    assert result.stderr.count("\n") == 1
    assert "castore init" in result.stderr


def test_damage_is_11(store: str, run_folder: Path, tmp_path: Path) -> None:
    committed(store, run_folder)
    damage(store)
    result = castore("checkout", "latest", str(tmp_path / "out"), "-r", store)
    assert result.exit_code == 11
    assert not (tmp_path / "out").exists()


def test_unreachable_is_13_and_never_empty() -> None:
    env: dict[str, str | None] = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "tell-no-one",
    }
    result = castore("snapshots", "-r", "s3://bucket/store", "--json", env=env)
    assert result.exit_code == 13, result.output
    assert documents(result)[-1]["type"] == "error"
    assert "tell-no-one" not in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["commit", "-r", "x"],
        ["snapshots"],
        ["check", "-r", "x", "--sample", "200%"],
        ["check", "-r", "x", "--since", "yesterday"],
        ["check", "-r", "x", "--state", "f"],
        ["check", "-r", "x", "--read-data", "--sample", "5%"],
        ["prune", "-r", "x", "--grace", "fortnight"],
        ["commit", "x", "-r", "x", "--label", "novalue"],
        ["cat", "latest", "-r", "x"],
    ],
)
def test_a_command_line_that_is_not_understood_is_2(words: list[str]) -> None:
    assert castore(*words).exit_code == 2
    result = castore(*words, "--json")
    assert result.exit_code == 2
    said = result.stderr if words[0] == "cat" else result.stdout
    assert json.loads(said)["exit_code"] == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_result_that_nobody_can_take_is_an_error_where_it_can_be_read(
    store: str, run_folder: Path
) -> None:
    committed(store, run_folder)
    for words in (["ls", "latest", "--json"], ["ls", "latest"], ["cat", "latest:a.txt"]):
        with open("/dev/full", "w") as full:
            program = [sys.executable, "-m", "castore.cli", *words, "-r", store]
            done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 13, words
        assert done.stderr == "castore: error: [Errno 28] No space left on device\n", words


def test_an_error_is_one_message_without_a_traceback(store: str) -> None:
    result = castore("cat", "latest:a", "-r", store)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("castore: error: ")
    assert "Traceback" not in result.stderr
    shown = castore("cat", "latest:a", "-r", store, env={"CASTORE_TRACEBACK": "1"})
    assert "Traceback" in shown.stderr


def test_an_existing_repository_is_not_made_again(store: str) -> None:
    result = castore("init", "-r", store, "--json")
    assert result.exit_code == 1
    assert documents(result)[-1]["error"] == "AlreadyExistsError"


# -- documents


def test_json_everywhere(store: str, run_folder: Path, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    commands: list[tuple[list[str], set[str]]] = [
        (["init", "-r", other], {"repository"}),
        (["commit", str(run_folder), "-r", store], {"commit"}),
        (["snapshots", "-r", store], {"snapshot"}),
        (["ls", "latest", "-r", store], {"entry"}),
        (["checkout", "latest", str(tmp_path / "out"), "-r", store], {"checkout"}),
        (["check", "-r", store], {"summary"}),
        (["copy", "-r", store, "--to", other], {"copied", "summary"}),
        (["usage", "-r", store], {"namespace", "snapshot", "total"}),
        (["forget", "latest", "-r", store], {"forgotten"}),
        (["prune", "-r", store], {"summary"}),
        (["drivers"], {"driver"}),
    ]
    for words, kinds in commands:
        result = castore(*words, "--json")
        assert result.exit_code == 0, result.output
        assert {d["type"] for d in documents(result)} == kinds, words
        assert result.stderr == "", words


# -- texts


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567, "1.23 MB"), (999_600, "1 MB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_texts_of_options() -> None:
    assert parse_duration("14d") == 14 * 86_400
    assert parse_duration("1.5h") == 5_400
    assert parse_share("5%") == parse_share("0.05") == 0.05
    assert parse_since("2026-11-30").at == parse_since("2026-11-30T00:00:00+00:00").at
    assert parse_since(None).at is None


def test_nothing_stored_can_steer_a_terminal() -> None:
    assert printable("a\x1b[31m\u202e\n") == "a\\x1b[31m\\u202e\\n"
    assert list(aligned(["A"], [["\x1b"]])) == ["A", "\\x1b"]


# -- as a program


def program(*words: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "castore.cli", *words],
        capture_output=True,
        env={**os.environ, **env},
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def test_the_program_end_to_end(store: str, run_folder: Path) -> None:
    done = program("commit", str(run_folder), "-r", store)
    assert done.returncode == 0, done.stderr
    assert b"stored 3 files" in done.stderr
    data = program("cat", f"{done.stdout.decode().strip()}:sub/b.bin", "-r", store)
    assert data.stdout == (run_folder / "sub/b.bin").read_bytes()
    assert program("snapshots", "-r", f"{store}-none").returncode == 10
    damage(store)
    assert program("check", "-r", store, "--read-data").returncode == 3


def test_odd_names_are_shown_whatever_the_encoding(store: str, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "ünï 数.bin").write_bytes(b"x")
    committed(store, folder)
    shown = program("ls", "latest", "-r", store, PYTHONIOENCODING="latin-1")
    assert shown.returncode == 0, shown.stderr
    assert b"\xfcn\xef \\u6570.bin" in shown.stdout


def test_a_reader_that_goes_away_is_no_crash(store: str, run_folder: Path) -> None:
    committed(store, run_folder)
    command = f"'{sys.executable}' -m castore.cli cat latest:sub/b.bin -r '{store}' | head -c 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=120)
    assert b"Traceback" not in done.stderr


def test_an_interrupt_is_130(store: str, tmp_path: Path) -> None:
    import signal

    fifo = tmp_path / "wait"
    os.mkfifo(fifo)
    code = (
        "import castore.cli.options as o\n"
        f"o.parse_labels = lambda _: open({str(fifo)!r}).read()\n"
        "import castore.cli.write as w; w.parse_labels = o.parse_labels\n"
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from castore.cli import main; main()"
    )
    words = [sys.executable, "-c", code, "commit", str(tmp_path), "-r", store]
    process = subprocess.Popen(words, stderr=subprocess.PIPE)
    with fifo.open("w"):  # opens when the command has come to read it
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in said
