"""What the server uses during a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fedcore.base.config import RunConfig
from fedcore.data import Dataset, Partition
from fedcore.engines.protocol import Engine
from fedcore.hooks.setup import Setup
from fedcore.server.system import Simulator
from fedcore.server.validation import UpdateValidator
from fedcore.storage.client_store import ClientStore


@dataclass(frozen=True)
class Federation:
    """Set-up, data and engine of a run, with the validator and the simulator made from them.

    :param store: the clients' states.
    """

    setup: Setup
    dataset: Dataset
    partition: Partition
    engine: Engine
    store: ClientStore

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.setup.config

    @cached_property
    def validator(self) -> UpdateValidator:
        """Validates what clients send."""
        device: torch.device = getattr(self.engine, "updates_on", torch.device("cpu"))
        return UpdateValidator(self.setup, self.partition, self.store, device)

    @cached_property
    def simulator(self) -> Simulator:
        """Draws which clients are available, lost, late and slow; without ``--system`` all take part."""
        return Simulator(self.config, self.partition.train.sizes.numpy(), self.setup.breaks)
