"""Write the generated pages: docs/cli.md from the commands, docs/errors.md from the errors.

python scripts/make_docs.py            write them
python scripts/make_docs.py --check    exit 1 if they are not current
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from castore import errors
from castore.cli import app

DOCS = Path(__file__).resolve().parent.parent / "docs"
GENERATED = "<!-- Written by scripts/make_docs.py: change the code, not this page. -->\n"

CLI_HEAD = """
# The command line

Every command takes the repository with `-r` / `--repository`, or from `CASTORE_REPOSITORY`.
Results go to stdout, words for people and progress bars (on a terminal only) to stderr. No
command ever asks a question.

`SNAPSHOT` is `latest`, `NAMESPACE@latest`, or the first characters (4 or more) of an id, alone or
as `NAMESPACE@...`. Times are UTC. Ages are a number and `s`, `m`, `h`, `d` or `w`.

With `--json` each command writes one JSON document a line to stdout; each has a `"type"`:

| command | documents |
| --- | --- |
| `init` | `repository` |
| `commit`, `unforget` | `commit`, one a snapshot |
| `snapshots` | `snapshot`; `problem` for a damaged document |
| `ls` | `entry` |
| `cat` | none: stdout is the file; an error document goes to stderr |
| `checkout` | `checkout` |
| `check` | `repaired`, `problem`, then one `summary` |
| `forget` | `forgotten` |
| `prune` | `expired`, `deleted`, `problem`, then one `summary` |
| `copy` | `copied`, then one `summary` |
| `usage` | `namespace`, `snapshot`, then one `total` |
| `drivers` | `driver` |
| any | `error` as the last one where the command fails, with `error`, `message`, `exit_code` |

Exit codes: 0 fine, 1 failed, 2 usage, 3 finished and problems found, 130 interrupted; those of
single errors are in [errors.md](errors.md). `CASTORE_TRACEBACK=1` shows where an error came from.
Shell completion: `castore --install-completion`.
"""

ERRORS_HEAD = """
# Errors and exit codes

All errors are subclasses of `castore.CastoreError`. A message says what happened, where, what was
expected and found, and what to do next. The exit code is that of the command line.
"""

EXITS = """
| exit code | meaning |
| --- | --- |
| 0 | fine |
| 1 | failed: any error without a code of its own |
| 2 | usage: the command line was not understood |
| 3 | finished, and problems were found |
| 130 | interrupted |
"""


def cli_page() -> str:
    """docs/cli.md."""
    runner = CliRunner()
    parts = [GENERATED, CLI_HEAD]
    shown = runner.invoke(app, ["--help"], prog_name="castore")
    commands = re.findall(r"^  (\w+) ", shown.stdout.partition("Commands:")[2], re.MULTILINE)
    for command in ([], *([c] for c in commands)):
        shown = runner.invoke(app, [*command, "--help"], prog_name="castore", env={"COLUMNS": "80"})
        parts.append(f"\n## castore {' '.join(command)}".rstrip() + "\n")
        parts.append(f"\n```text\n{shown.stdout.strip()}\n```\n")
    return "".join(parts)


def errors_page() -> str:
    """docs/errors.md."""
    rows = ["| error | also a | exit code | meaning |\n", "| --- | --- | --- | --- |\n"]
    for cls, depth in _tree(errors.CastoreError, 0):
        doc = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
        others = [b.__name__ for b in cls.__bases__ if b.__module__ == "builtins"]
        name = "&nbsp;&nbsp;" * 2 * depth + f"`{cls.__name__}`"
        also = ", ".join(f"`{o}`" for o in others if o != "Exception")
        rows.append(f"| {name} | {also} | {cls.exit_code} | {doc} |\n")
    return "".join([GENERATED, ERRORS_HEAD, "\n", *rows, EXITS])


def _tree(cls: type[errors.CastoreError], depth: int) -> Iterator[tuple[type, int]]:
    yield cls, depth
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _tree(child, depth + 1)


def pages() -> dict[Path, str]:
    """Every generated page by its path."""
    return {DOCS / "cli.md": cli_page(), DOCS / "errors.md": errors_page()}


def main() -> int:
    """Write or check the pages."""
    stale = [p for p, text in pages().items() if not p.exists() or p.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is not current: run python scripts/make_docs.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages()[path])
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
