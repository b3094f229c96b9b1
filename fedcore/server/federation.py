"""What the server works with during a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fedcore.base.config import RunConfig
from fedcore.data import Dataset, Partition
from fedcore.engines.protocol import Engine
from fedcore.hooks.setup import Setup
from fedcore.server.system import Simulator
from fedcore.server.validation import UpdateValidator
from fedcore.storage.client_store import ClientStore


@dataclass(frozen=True)
class Federation:
    """What the server works with, all run long.

    :param store: where the clients keep their state.
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
        """Checks what clients send."""
        return UpdateValidator(self.setup, self.partition, self.store)

    @cached_property
    def simulator(self) -> Simulator:
        """Draws who is available, lost, late and slow; without ``--system`` nobody is."""
        return Simulator(self.config, self.partition.train.sizes.numpy(), self.setup.breaks)
