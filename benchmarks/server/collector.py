"""What the server's Collector copies while a round's updates arrive: bytes by kind, and processor time.

    python benchmarks/server/collector.py --clients 50 --millions 25

Each update is taken as in a round; a plugin writes about it into ``server.state`` in ``accumulate``. Every copy that
torch makes for it is counted: ``Tensor.clone``, ``.to(copy=True)`` and ``copy.deepcopy``, the means by which a state
protects what it holds. Numbers of copies do not depend on the machine or on its load.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedcore import ClientUpdate, Plugin, ServerContext, SplitModel, hookimpl
from fedcore.client.messages import ClientTask
from fedcore.client.setup import Setup
from fedcore.client.store import RemoteClientStore
from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore.server.collection import Collector
from fedcore.server.scope import Federation, Round
from fedcore.server.state import ServerState
from fedcore_testing.federation import small_config

MILLIONS = [25.0]


def wide(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return a network of about MILLIONS[0] million parameters, nearly all in one square layer."""
    width = round((MILLIONS[0] * 1e6) ** 0.5)
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return SplitModel(base, width, num_classes)


class Keeps(Plugin):
    """Keeps every client's model, as a method that mixes models on the server does."""

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Write the model into the state."""
        for name, tensor in update.model.items():
            server.state[f"{update.client}.{name}"] = tensor


class Reads(Plugin):
    """Reads a sum from the state and adds to it in place."""

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add the model to a sum in float64."""
        for name, tensor in update.model.items():
            if name not in server.state:
                server.state[name] = torch.zeros(tensor.shape, dtype=torch.float64)
            server.state[name].add_(tensor)


class Adds(Plugin):
    """Adds with ``state.add``."""

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add the model to a sum in float64."""
        for name, tensor in update.model.items():
            server.state.add(name, tensor)


@contextmanager
def counted(copied: dict[str, int]) -> Iterator[None]:
    """Count the bytes that are copied inside the block, by the method that copies."""
    methods = {"clone": Tensor.clone, "to": Tensor.to, "__deepcopy__": Tensor.__deepcopy__}

    def counting(name: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(self: Tensor, *given: Any, **named: Any) -> Tensor:
            if name != "to" or named.get("copy"):
                copied[name] = copied.get(name, 0) + self.numel() * self.element_size()
            return method(self, *given, **named)

        return call

    for name, method in methods.items():
        setattr(Tensor, name, counting(name, method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(Tensor, name, method)


def measured(plugin: type[Plugin], clients: int, folder: Path) -> dict[str, Any]:
    """Take one update of every client; returns what it cost."""
    config, dataset = resolve_config(small_config(folder, plugin, clients=clients, model=wide, partition="iid"))
    setup, partition = Setup.build(config, dataset), resolve_partition(config, dataset)
    federation = Federation(setup, dataset, partition, None, RemoteClientStore(folder))  # type: ignore[arg-type]
    model = dict(setup.model.state_dict())
    current = Round(federation, ServerState(model=model), 0)
    current.cohort = list(range(clients))
    collector = Collector(current)
    copied: dict[str, int] = {}
    spent = []
    for client in range(clients):
        update = ClientUpdate(client, model, len(partition.train[client]), 1, current.lr, setup.config.momentum)
        began = time.process_time()
        with counted(copied):
            collector.take([(ClientTask("x", "fit_begin", client, 0), update)])
        spent.append(time.process_time() - began)
    assert not current.failures, current.failures
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.values())
    tenth = max(1, clients // 10)
    return {
        "plugin": plugin.__name__,
        "models copied": {name: round(count / size, 2) for name, count in sorted(copied.items())},
        "processor seconds": round(sum(spent), 2),
        "per update, first and last tenth": [round(sum(part) / tenth, 3) for part in (spent[:tenth], spent[-tenth:])],
        "peak GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 1),
    }


def main() -> None:
    """Print one line of JSON for each plugin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--millions", type=float, default=25.0, help="parameters, in millions")
    given = parser.parse_args()
    MILLIONS[0] = given.millions
    torch.set_num_threads(1)
    for plugin in (Adds, Reads, Keeps):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(plugin, given.clients, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
