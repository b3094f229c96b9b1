"""The commands of this package, which ``fedcore`` finds through the entry points ``fedcore.commands``."""

from __future__ import annotations

from fedcore.cli import command
from fedcore_study.cli.compare import compare
from fedcore_study.cli.sweep import sweep

sweep_app, compare_app = command(sweep), command(compare)
