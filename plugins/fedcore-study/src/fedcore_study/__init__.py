"""Studies of many fedcore runs: sweep and compare. ``fedcore_study.tools`` is for packages that draw or print them.

The public functions below are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcore_study.studies import compare as compare
    from fedcore_study.studies import sweep as sweep
    from fedcore_study.sweeps.run import SweepResult as SweepResult

_HOMES = {"SweepResult": "sweeps.run", "compare": "studies", "sweep": "studies"}

__all__ = ["SweepResult", "compare", "sweep"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fedcore_study.{_HOMES[name]}"), name)
    hint = "; it is fedcore_report.report, of the package fedcore-report" if name == "report" else ""
    raise AttributeError(f"module 'fedcore_study' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__
