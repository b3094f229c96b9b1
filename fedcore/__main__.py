"""``python -m fedcore``: the command line."""

from fedcore.cli import main

main()
