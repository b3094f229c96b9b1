"""Runners: faster ways to take the steps of clients' trainings, with the same results.

``graphs`` records training steps as CUDA graphs and replays them. ``lanes`` trains several clients side by side on one
GPU. ``series`` trains clients that no hook sees one after the other in one session. ``stack`` trains many small clients
as one computation. fedcore finds them through the entry-point group ``fedcore.runners``, and their options through
``fedcore.options``. All names are imported on first use: the options are read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.tools import lazy

if TYPE_CHECKING:
    from fedcore_accelerate.captured_steps import CaptureWarning as CaptureWarning
    from fedcore_accelerate.captured_steps import take_watched_step as take_watched_step
    from fedcore_accelerate.graphs import Graphs as Graphs
    from fedcore_accelerate.lanes import Lanes as Lanes
    from fedcore_accelerate.offers import offer_graphs as offer_graphs
    from fedcore_accelerate.offers import offer_lanes as offer_lanes
    from fedcore_accelerate.offers import offer_series as offer_series
    from fedcore_accelerate.offers import offer_stack as offer_stack
    from fedcore_accelerate.options import Acceleration as Acceleration
    from fedcore_accelerate.series import Series as Series
    from fedcore_accelerate.stack import Stacks as Stacks
    from fedcore_accelerate.stack import StackWarning as StackWarning

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
