"""The commands of this package, which ``fedcore`` finds through the entry points ``fedcore.commands``."""

from __future__ import annotations

from fedcore.cli import command
from fedcore_study.cli.bench import bench
from fedcore_study.cli.compare import compare
from fedcore_study.cli.plot import plot
from fedcore_study.cli.report import report
from fedcore_study.cli.reproduce import reproduce
from fedcore_study.cli.sweep import sweep

sweep_app, compare_app, reproduce_app = command(sweep), command(compare), command(reproduce)
report_app, bench_app, plot_app = command(report), command(bench), command(plot)
