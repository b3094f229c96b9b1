"""``python -m fedcore.cli``."""

from fedcore.cli import main

main()
