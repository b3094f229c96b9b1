"""Around a run: ``fedcore data``, ``init``, ``plugins list``; progress in a terminal or notebook, figures as tables.

What other packages of commands use is imported on first use: the commands answer ``--help`` without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcore_console.data import SPLIT_FIELDS as SPLIT_FIELDS
    from fedcore_console.data import check_out as check_out
    from fedcore_console.notebook import notebook_output as notebook_output
    from fedcore_console.partition_table import grouped as grouped
    from fedcore_console.partition_table import span as span

_HOMES = {
    "SPLIT_FIELDS": "data",
    "check_out": "data",
    "grouped": "partition_table",
    "notebook_output": "notebook",
    "span": "partition_table",
}

__all__ = ["SPLIT_FIELDS", "check_out", "grouped", "notebook_output", "span"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fedcore_console.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedcore_console' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
