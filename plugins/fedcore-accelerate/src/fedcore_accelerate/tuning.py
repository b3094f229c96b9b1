"""What is faster for a run: ``--stack auto`` is a rule, ``--autotune`` measures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from fedcore import RunConfig, SplitModel
from fedcore.client import Setup
from fedcore.data import Dataset, ResidentSamples
from fedcore.engines import cores
from fedcore.models import Placement, convolves, copied, problem_in_channels_last
from fedcore_accelerate.places import hooked_parameter

FORMATS: tuple[str, ...] = ("contiguous", "channels_last")
SMALLEST_STACK, LARGEST_STACK = 12, 50
"""The equal stacks that ``--stack auto`` chooses. On digits 8 in a stack were slower, and 50 took 0.6 of the time."""
TURNS = 15
"""The steps that ``--autotune`` takes in each memory format. The first ones are slow, so the fastest one counts."""


def fastest_format(setup: Setup, dataset: Dataset) -> str:
    """Return the memory format in which training steps are faster on this machine.

    A format that the user chose stays. ``auto`` stays, too, if the model or the data set leaves no choice, and under
    anomaly detection of autograd, which slows every step down.
    """
    config, model = setup.config, setup.model
    if config.memory_format != "auto" or not convolves(model) or not isinstance(dataset.train, ResidentSamples):
        return config.memory_format
    sample = dataset.train.gather(torch.zeros(1, dtype=torch.int64))
    if torch.is_anomaly_enabled() or problem_in_channels_last(model, sample):
        return config.memory_format
    seconds = measure(config, model, dataset)
    return min(seconds, key=lambda name: seconds[name])


def lacks_lanes(setup: Setup, *, capture: bool) -> bool:
    """Return whether ``--lanes`` has no effect on a run."""
    captured = setup.placement.device.type == "cuda" and capture
    alone = bool(setup.config.workers) or not captured or bool(hooked_parameter(setup.model))
    return setup.config.engine == "local" and alone


def usual_stack(setup: Setup) -> int:
    """Return the stack that ``--stack auto`` stands for; 1 where clients that train as one are not faster.

    Every worker trains equally many stacks in a round. A convolution is slower in a stack on a CPU, and so is a small
    stack.
    """
    config = setup.config
    workers = cores() if config.workers is None else max(1, config.workers)
    share = config.cohort_size / workers
    turns = math.ceil(share / LARGEST_STACK)
    alone = why_unstacked(setup) or config.device != "cpu" or convolves(setup.model) or config.client_timeout
    if alone or config.max_waiting or math.ceil(share) < SMALLEST_STACK:
        return 1
    return math.ceil(share / turns)


def why_unstacked(setup: Setup) -> str:
    """Return the reason for which no clients train as one; empty if there is none before they train."""
    if setup.config.engine != "local":
        return f"--engine {setup.config.engine} trains clients one by one"
    if setup.config.client_models:
        return "clients have models of their own (--client-models)"
    for name in [name for names in setup.breaks.values() for name in names]:
        return f"plugin {name!r} pauses clients in the middle of their training"
    for plugin in setup.plugins.implementers("broadcast_to"):
        return f"plugin {plugin.name!r} sends each client tensors of its own"
    return why_alone(setup)


def why_alone(setup: Setup) -> str:
    """Return the reason for which no step of several clients can be taken as one; empty if steps show it, if at all."""
    for plugin in setup.plugins.implementers("gradients"):
        return f"plugin {plugin.name!r} changes gradients"
    if setup.config.precision == "bf16":  # a bias is added in float32, and cross_entropy computed in bfloat16
        return "under torch.func.vmap --precision bf16 computes other operations in bfloat16"
    if name := hooked_parameter(setup.model):
        return f"the model has a hook on the gradient of {name!r}"
    return "the model has buffers, such as BatchNorm's statistics" if setup.layout.buffers - setup.layout.fixed else ""


def measure(config: RunConfig, model: SplitModel, dataset: Dataset) -> dict[str, float]:
    """Return the minimum seconds of a training step in each memory format, measured in turns."""
    steps = {name: _step(config.model_copy(update={"memory_format": name}), model, dataset) for name in FORMATS}
    seconds = dict.fromkeys(FORMATS, float("inf"))
    for _ in range(TURNS):
        for name, step in steps.items():
            seconds[name] = min(seconds[name], step())
    return seconds


def _step(config: RunConfig, model: SplitModel, dataset: Dataset) -> Callable[[], float]:
    """Return a function that trains a copy of the model on one batch, and returns the seconds that it took."""
    placement = Placement.of(config, model, None)
    model = placement.model(copied(model)).train()
    rows = torch.arange(min(config.batch_size, len(dataset.train)))
    x = dataset.train.gather(rows).to(placement.device).contiguous(memory_format=placement.memory_format)
    y = dataset.train.labels[rows].to(placement.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=config.momentum)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        dataset.task.loss(model(x)[1], y).backward()
        optimizer.step()
        if placement.device.type == "cuda":
            torch.cuda.synchronize(placement.device)
        return time.perf_counter() - began

    return step
