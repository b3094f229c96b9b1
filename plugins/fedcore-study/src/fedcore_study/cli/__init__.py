"""The commands of this package, which ``fedcore`` finds through the entry points ``fedcore.commands``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from fedcore_study.cli.bench import bench
from fedcore_study.cli.compare import compare
from fedcore_study.cli.report import report
from fedcore_study.cli.reproduce import reproduce
from fedcore_study.cli.sweep import sweep


def _command(function: Callable[..., Any]) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command()(function)
    return app


sweep_app, compare_app, reproduce_app = _command(sweep), _command(compare), _command(reproduce)
report_app, bench_app = _command(report), _command(bench)
