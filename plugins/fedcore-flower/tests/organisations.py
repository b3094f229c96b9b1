"""Organisations for tests: digits divided among three, and a link without Flower."""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import replace
from pathlib import Path

import torch

from fedcore import RunConfig, run
from fedcore.data import Partition, TensorSamples, load_dataset, make_partition
from fedcore.tools import resolve_config
from fedcore_flower import wire
from fedcore_flower.agreement import describe_run, versions_of
from fedcore_flower.conditions import TrainerOptions
from fedcore_flower.courier import Courier
from fedcore_flower.engine import FederationEngine
from fedcore_flower.handler import RequestHandler
from fedcore_flower.own_data import OwnData
from fedcore_testing import small_config

CLIENTS = 3
NAMES = ["alder", "birch", "cedar"]
FRACTION = 0.25
RUN = "0123456789abcdef" * 2
SETTINGS = {"client_test_fraction": FRACTION, "rounds": 3, "local_epochs": 2}


@functools.cache
def dealt() -> Partition:
    return make_partition(load_dataset("digits", None), RunConfig(clients=CLIENTS, client_test_fraction=FRACTION))


def declared() -> Partition:
    parts = dealt()
    return Partition.declared(parts.train.sizes.tolist(), parts.test.sizes.tolist(), "digits")


def part(data_dir: Path | None = None):
    """The data of ``--data module:organisations.part``: the part of the client in ``FEDCORE_TEST_CLIENT``."""
    return own_part(int(os.environ["FEDCORE_TEST_CLIENT"]))


def own_part(client: int):
    whole, parts = load_dataset("digits", None), dealt()
    train, test = parts.train[client], parts.test[client]
    return replace(
        whole,
        name="own",
        train=TensorSamples(whole.train.gather(train), whole.train.labels[train]),
        test=TensorSamples(whole.train.gather(test), whole.train.labels[test]),
    )


def own_data(client: int) -> OwnData:
    data = own_part(client)
    held = [len(data.train), len(data.test)]
    joined = TensorSamples(
        torch.cat([data.train.inputs, data.test.inputs]), torch.cat([data.train.labels, data.test.labels])
    )
    return OwnData(replace(data, train=joined), torch.arange(held[0]), torch.arange(sum(held))[held[0] :])


class Here:
    """A link to request handlers in this process. Tests override ``deliver`` to lose and delay messages."""

    def __init__(self, handlers) -> None:
        self.handlers = dict(enumerate(handlers))
        self.away: set[int] = set()
        self.replies: dict[str, tuple[int, object]] = {}
        self.numbers = itertools.count()
        self.log: list[tuple[int, str, tuple[str, ...]]] = []
        """The messages that were sent: the client, the operation, the names of the blobs."""

    def online(self):
        return set(self.handlers) - self.away

    def send(self, client, kind, blobs, ttl):
        if client in self.away:
            return None
        ticket = str(next(self.numbers))
        self.log.append((client, wire.unpack(blobs)[0], tuple(blobs)))
        reply = self.deliver(client, blobs)
        if reply is not None:
            self.replies[ticket] = reply
        return ticket

    def deliver(self, client, blobs):
        return self.handlers[client].answer(blobs)

    def collect(self, tickets):
        return [(ticket, self.replies.pop(ticket)) for ticket in tickets if ticket in self.replies]


def make_handler(own: OwnData, state: Path) -> RequestHandler:
    return RequestHandler(own, TrainerOptions("own", str(state), device="cpu"))


def make_handlers(folder: Path):
    return [make_handler(own_data(k), folder / NAMES[k]) for k in range(CLIENTS)]


def courier(link, **options) -> Courier:
    return Courier(link, **{"timeout": 60, "probe_every": 0.0, "sleep": lambda seconds: None, **options})


def setups_for(config, dataset, **changes):
    versions = versions_of(config)
    return {
        client: describe_run(config, dataset, run=RUN, client=client, name=name, versions={**versions, **changes})
        for client, name in enumerate(NAMES)
    }


def make_engine(link, **options):
    def make(spec):
        setups = setups_for(spec.config, spec.dataset)
        return FederationEngine(courier(link, **options), NAMES, setups, run=RUN)

    return make


def run_over(link, folder: Path, *plugins, make=None, **options):
    folder.mkdir(parents=True, exist_ok=True)
    config = small_config(folder, *plugins, **{**SETTINGS, **options})
    return run(config, engine=make or make_engine(link), partition=declared())


def resolved(folder: Path, *plugins, **options):
    folder.mkdir(parents=True, exist_ok=True)
    config, dataset = resolve_config(small_config(folder, *plugins, **{**SETTINGS, **options}))
    return config, dataset
