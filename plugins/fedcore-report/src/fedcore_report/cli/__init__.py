"""The commands of this package, which ``fedcore`` finds through the entry points ``fedcore.commands``."""

from __future__ import annotations

from fedcore.cli import command
from fedcore_report.cli.plot import plot
from fedcore_report.cli.report import report

report_app, plot_app = command(report), command(plot)
