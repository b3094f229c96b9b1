"""Runners: faster ways to take the steps of clients' trainings, with the same results.

``graphs`` records training steps as CUDA graphs and replays them. ``lanes`` trains several clients side by side on one
GPU. ``stack`` trains many small clients as one computation. fedcore finds them through the entry-point group
``fedcore.runners``: each is a function of a run's configuration and data set, and returns None where it does not apply.
"""

from __future__ import annotations

from fedcore.base.config import RunConfig
from fedcore.data import Dataset
from fedcore.models import resolve_device
from fedcore_accelerate.captured_steps import CaptureWarning, take_watched_step
from fedcore_accelerate.graphs import Graphs, captures
from fedcore_accelerate.lanes import Lanes
from fedcore_accelerate.stack import Stacks, StackWarning

__all__ = [
    "CaptureWarning",
    "Graphs",
    "Lanes",
    "StackWarning",
    "Stacks",
    "offer_graphs",
    "offer_lanes",
    "offer_stack",
    "take_watched_step",
]


def offer_graphs(config: RunConfig, dataset: Dataset) -> Graphs | None:
    """Return the runner of CUDA graphs: on CUDA, unless the run has ``--no-capture``."""
    device = resolve_device(config.device)
    return Graphs(device) if captures(config, device, dataset) and not lanes_of(config) else None


def offer_lanes(config: RunConfig, dataset: Dataset) -> Lanes | None:
    """Return the runner of ``--lanes``: on CUDA, in the run's own process."""
    device = resolve_device(config.device)
    count = lanes_of(config)
    return Lanes(device, count) if count and captures(config, device, dataset) else None


def lanes_of(config: RunConfig) -> int:
    """Return the number of lanes of a run; 0 if clients do not train side by side."""
    count = min(config.lanes, config.clients)
    return count if count > 1 and not config.workers else 0


def offer_stack(config: RunConfig, dataset: Dataset) -> Stacks | None:
    """Return the runner of ``--stack``."""
    return Stacks(config.stack_size) if config.stack_size > 1 and not config.client_models else None
