"""Which runner applies to a run: functions of its configuration and data set, which return None where theirs does not.

Under anomaly detection of autograd, as in a fast dev run, none applies: it names operations of a step taken by itself.
"""

from __future__ import annotations

import torch

from fedcore import RunConfig
from fedcore.data import Dataset
from fedcore.models import resolve_device
from fedcore_accelerate.graphs import Graphs, captures
from fedcore_accelerate.lanes import Lanes
from fedcore_accelerate.options import options_of
from fedcore_accelerate.series import Series
from fedcore_accelerate.stack import Stacks


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
    count = min(options_of(config).lanes, config.clients)
    return count if count > 1 and not config.workers else 0


def offer_stack(config: RunConfig, dataset: Dataset) -> Stacks | None:
    """Return the runner of ``--stack``."""
    size = options_of(config).stack_size
    return Stacks(size) if size > 1 and not config.client_models and not torch.is_anomaly_enabled() else None


def offer_series(config: RunConfig, dataset: Dataset) -> Series | None:
    """Return the runner of clients that no hook sees: on the CPU, unless they train in stacks."""
    on_cpu = resolve_device(config.device).type == "cpu" and not torch.is_anomaly_enabled()
    return Series() if on_cpu and offer_stack(config, dataset) is None else None
