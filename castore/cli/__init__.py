"""The command line: ``castore``. One function a command; nothing heavy is imported to show help.

Exit codes: 0 fine, 1 failed, 2 usage, 3 finished and problems found, 130 interrupted, and those
of the error classes (docs/errors.md).
"""

from castore.cli import care, read, write
from castore.cli.app import app

__all__ = ["app", "care", "main", "read", "write"]


def main() -> None:
    """Run the command line and exit."""
    app()
