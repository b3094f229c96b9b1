"""Studies of many fedcore runs: sweep and compare. ``fedcore_study.tools`` is for packages that draw or print them.

The public functions below are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedcore.tools import lazy

if TYPE_CHECKING:
    from fedcore_study.studies import compare as compare
    from fedcore_study.studies import sweep as sweep
    from fedcore_study.sweeps.run import SweepResult as SweepResult

_attribute, __dir__, __all__ = lazy(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "report":
        hint = "it is fedcore_report.report, of the package fedcore-report"
        raise AttributeError(f"module 'fedcore_study' has no attribute 'report'; {hint}")
    return _attribute(name)
