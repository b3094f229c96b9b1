"""Pictures of fedcore runs: ``fedcore report``, ``fedcore data plot``, and learning curves in a notebook.

The public names below are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.tools import lazy

if TYPE_CHECKING:
    from fedcore_report.api import report as report
    from fedcore_report.charts import Curves as Curves
    from fedcore_report.charts import Line as Line
    from fedcore_report.lines import mean_line as mean_line
    from fedcore_report.svg import standalone as standalone

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
