"""``python -m castore.cli``: the command line where no script is installed."""

from castore.cli import main

main()
