"""Around a run: ``fedcore data``, ``init``, ``plugins list``; progress in a terminal or notebook, figures as tables.

What other packages of commands use is imported on first use: the commands answer ``--help`` without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.tools import lazy

if TYPE_CHECKING:
    from fedcore_console.data import SPLIT_FIELDS as SPLIT_FIELDS
    from fedcore_console.data import check_out as check_out
    from fedcore_console.notebook import notebook_output as notebook_output
    from fedcore_console.partition_table import grouped as grouped
    from fedcore_console.partition_table import span as span

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
