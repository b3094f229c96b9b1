"""How long one client trains in a round, in epochs and optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcore.base.config import RunConfig


@dataclass(frozen=True)
class LocalWork:
    """The length of one client's training.

    :param epochs: passes over the client's samples; the last is cut short after ``most_steps``.
    :param most_steps: limit on optimizer steps; None where the work is given in epochs.
    :param smallest_batch: smaller batches are skipped.
    :param sees_all_samples: whether every sample is in some batch.
    """

    epochs: int
    most_steps: int | None
    smallest_batch: int
    sees_all_samples: bool

    @classmethod
    def of(cls, config: RunConfig, samples: int, needed: int, asked: Mapping[str, Any]) -> LocalWork:
        """Return the work of a client that holds so many samples.

        :param needed: samples that the model needs in a batch.
        :param asked: a task's ``epochs`` or ``steps``, where it deviates from the configuration.
        """
        smallest_batch = config.smallest_batch(samples, needed)
        unit, configured = config.local_work
        work = int(asked.get(unit, configured))
        if unit == "epochs":
            return cls(work, None, smallest_batch, True)
        per_epoch = config.batches(samples, needed)
        epochs = math.ceil(work / per_epoch) if per_epoch else 0
        return cls(epochs, work, smallest_batch, work * config.batch_size >= samples)
