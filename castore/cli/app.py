"""The application: how its commands are grouped, and how every error leaves it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from os import environ
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import castore
from castore.cli.output import error_document
from castore.errors import BackendError, CastoreError, lacks

PROBLEMS = 3
"""Exit code: the command finished and found problems."""

COMMANDS = "castore.commands"
"""The entry-point group through which drivers add their commands."""

_ORDER = (
    *("init", "commit", "snapshots", "ls", "cat", "checkout", "check"),
    *("forget", "unforget", "prune", "copy", "usage", "drivers"),
)


class Application(TyperGroup):
    """Turns every error into one clear message and the exit code of its class."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """In the order in which one meets them, those of drivers last."""
        return [*sorted(self.commands, key=_ORDER.index), *sorted(e.name for e in _of_drivers())]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """A command of the store, or the commands of an installed driver."""
        for entry in _of_drivers():
            if entry.name == cmd_name and cmd_name not in self.commands:
                return typer.main.get_command(entry.load())
        return super().get_command(ctx, cmd_name)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        as_json = _wants_json(words)
        _tolerate_odd_names()
        try:
            result = super().main(words, prog_name, complete_var, not as_json, **extra)
        except Exception as e:
            result = _tell(e, as_json, to_stderr=words[:1] == ["cat"])
        sys.exit(result if isinstance(result, int) else 0)


def _of_drivers() -> list[EntryPoint]:
    """What the entry-point group ``castore.commands`` names: a driver's `typer.Typer` each."""
    return list(entry_points(group=COMMANDS))


def _wants_json(words: Sequence[str]) -> bool:
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


def _tolerate_odd_names() -> None:
    """A name that the terminal's encoding lacks is shown escaped, never a crash."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _tell(error: Exception, as_json: bool, to_stderr: bool) -> int:
    """Say what went wrong, once; gives the exit code."""
    if environ.get("CASTORE_TRACEBACK") == "1":
        traceback.print_exception(error)
    message, code = _describe(error)
    if as_json:
        document = error_document(type(error).__name__, message, code)
        try:
            typer.echo(document, err=to_stderr)
            return code
        except OSError:  # stdout is full or closed: said once more where it can be read
            pass
    typer.echo(f"castore: error: {message}", err=True)
    return code


def _describe(error: Exception) -> tuple[str, int]:
    if isinstance(error, CastoreError):
        return str(error), error.exit_code
    if isinstance(error, typer.Abort):
        return "aborted", 130
    if isinstance(error, typer.TyperException):
        # Only usage errors get here: everything else of typer's carries its own exit code.
        format_message = getattr(error, "format_message", error.__str__)
        return str(format_message()), int(getattr(error, "exit_code", 2))
    if isinstance(error, ModuleNotFoundError):
        return lacks(error), 1
    if isinstance(error, OSError):
        return str(error), BackendError.exit_code
    kind = type(error).__name__
    return f"internal error: {kind}: {error} (CASTORE_TRACEBACK=1 shows where)", 1


app = typer.Typer(
    name="castore",
    cls=Application,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"castore {castore.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Store, share and audit checkpoints: every byte once, on a local disk or on S3.

    A repository is a path or a URL, given with -r or in CASTORE_REPOSITORY. Each commit makes a
    snapshot; SNAPSHOT is 'latest', 'NAMESPACE@latest', or the first characters of an id.

    \b
    Example:
      castore init -r store
      castore commit -r store runs/today
      castore checkout -r store latest copy
    """
