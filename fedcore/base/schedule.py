"""The local learning rate of a round. Imports no torch."""

from __future__ import annotations

import math

from fedcore.base.config import RunConfig


def learning_rate(config: RunConfig, number: int) -> float:
    """Return the local learning rate of round ``number``, from 0.

    lr * lr_decay^t, times the schedule, times the warm-up; t is the round, T the number of rounds, W that of the
    warm-up:

    - ``cosine``: (1 + cos(pi * s / S)) / 2 with s = max(0, t - W) and S = T - W;
    - ``step``: lr_step_factor^floor(t / lr_step_rounds);
    - in the warm-up, t < W: (t + 1) / (W + 1).
    """
    rate = config.lr * config.lr_decay**number
    warmup = config.warmup_rounds
    if config.lr_schedule == "cosine":
        rate *= (1 + math.cos(math.pi * max(0, number - warmup) / (config.rounds - warmup))) / 2
    elif config.lr_schedule == "step":
        rate *= config.lr_step_factor ** (number // config.lr_step_rounds)
    return rate * (number + 1) / (warmup + 1) if number < warmup else rate
