"""Pictures of fedcore runs: ``fedcore report``, ``fedcore data plot``, and learning curves in a notebook.

The public names below are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcore_report.api import report as report
    from fedcore_report.charts import Curves as Curves
    from fedcore_report.charts import Line as Line
    from fedcore_report.lines import mean_line as mean_line
    from fedcore_report.svg import standalone as standalone

_HOMES = {
    "Curves": "charts",
    "Line": "charts",
    "mean_line": "lines",
    "report": "api",
    "standalone": "svg",
}

__all__ = ["Curves", "Line", "mean_line", "report", "standalone"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fedcore_report.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedcore_report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
