"""The commands of this package, which ``fedcore`` finds through the entry points ``fedcore.commands``."""

from __future__ import annotations

from fedcore.cli import command
from fedcore_reproduce.cli.reproduce import reproduce

reproduce_app = command(reproduce)
