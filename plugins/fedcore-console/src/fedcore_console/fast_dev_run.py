"""A small trial of a run, which tells whether everything works: ``train --fast-dev-run``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcore import ConfigError, RunConfig, RunResult
from fedcore.client import Setup
from fedcore.data import Dataset, Partition, PublicSamples
from fedcore.server import Notify
from fedcore.tools import Run, resolve_config, resolve_partition, resolve_trackers

BATCHES = 2
"""How many batches the client trains on."""

_SMALL: dict[str, Any] = {
    "rounds": 2,  # the second has states, payloads and previous models
    "warmup_rounds": 0,
    "participation": 1.0,
    "min_clients": 1,
    "engine": "local",
    "engine_options": {},
    "workers": 0,
    "client_timeout": None,
    "trackers": {},
}


def fast_dev_run(
    config: RunConfig,
    *,
    partition: Partition | None = None,
    engine: object = None,
    notify: Notify | None = None,
    on_round: Callable[[dict[str, Any]], object] | None = None,
) -> RunResult:
    """Train two rounds of one client on two batches, in this process, and evaluate them. Nothing stays on the disk.

    The whole configuration is checked, loaded and partitioned first. Anomaly detection of autograd is on: an operation
    whose gradient is NaN raises. Trackers are checked, but not started. The two batches are of two local epochs if the
    run has as many, since methods treat them differently.

    A method that needs more gets the least that works: two clients and enough epochs if clients exchange parameters in
    the middle of their training, and more clients if it refuses fewer. With unseen clients one more client is unseen.
    Each of ``client_models`` has a client.

    The arguments are as for :func:`fedcore.run`. The result's directory does not exist any more. A note says that an
    engine of the user's is not tried.
    """
    if notify is not None and (engine is not None or config.engine != _SMALL["engine"]):
        notify("note", {"message": "a fast dev run trains in this process: the engine is not tried"})
    resolve_trackers(config.trackers)
    config, dataset = resolve_config(config)
    partition = resolve_partition(config, dataset, partition)
    if partition.is_declared:
        raise ConfigError("a fast dev run trains in this process, but these clients hold their own data")
    dataset = _few_samples(dataset, BATCHES * config.batch_size)
    config = _small(config, dataset)
    per_epoch = config.batch_size if config.local_work == ("epochs", BATCHES) else BATCHES * config.batch_size
    partition = _of_largest(partition, config, per_epoch, BATCHES * config.batch_size)
    with tempfile.TemporaryDirectory(prefix="fedcore-") as folder, torch.autograd.set_detect_anomaly(True):
        config = config.model_copy(update={"out": Path(folder) / "run"})
        with Run.new(config, dataset=dataset, partition=partition) as run:
            return run.train(notify=notify, on_round=on_round)


def _small(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Return the smallest configuration that the run's methods accept."""
    whole = Setup.build(config, dataset)
    unit, work = config.local_work
    small: dict[str, Any] = {**_SMALL, f"local_{unit}": min(work, BATCHES)}
    small["clients"] = min(len(config.client_models) or 1, config.clients)
    if config.validation_share:  # of a few samples a smaller share can be none
        small["validation_share"] = 0.5
    if (system := getattr(config, "system", None)) is not None:  # of fedcore-simulation
        small["system"] = system.trial()
    if whole.breaks:
        small["clients"] = min(max(2, small["clients"]), config.clients)
        pauses = [plugin.exchanges.epochs for plugin in whole.plugins if plugin.exchanges is not None]
        enough = (n for n in range(BATCHES, config.local_epochs) if all(list(at(n)) for at in pauses))
        small["local_epochs"] = next(enough, config.local_epochs)
    unseen = int(config.training_clients < config.clients)
    small["adapt_epochs"] = min(config.adapt_epochs, 1)
    for clients in range(small["clients"] + unseen, config.clients):
        tried = config.model_copy(update={**small, "clients": clients, "unseen_clients": unseen / clients})
        try:
            Setup.build(tried, dataset)
        except ConfigError:  # the whole configuration is accepted, so the reason is the number of clients
            continue
        return tried
    return config.model_copy(update={**small, "clients": config.clients})


def _of_largest(partition: Partition, options: RunConfig, train: int, test: int) -> Partition:
    """Return the partition of the largest clients, those with held-out parts first, with some samples of each part.

    :param train: the number of a client's training samples.
    :param test: the number of its held-out samples.
    """
    sizes = partition.train.sizes
    ranks = sizes + (partition.test.sizes > 0) * int(sizes.max())
    largest = ranks.argsort(descending=True, stable=True)[: options.clients].tolist()
    parts = ((partition.train, train), (partition.test, test))
    kept, held_out = ([_spread(part[k], most) for k in largest] for part, most in parts)
    names = {"names": [partition.names[k] for k in largest]} if "names" in partition.info else {}
    return Partition(kept, held_out, {**partition.info, **names, "unseen_clients": options.unseen_clients})


def _few_samples(dataset: Dataset, samples: int) -> Dataset:
    """Return the data set with some of its test samples, from each domain, and of its public samples."""
    public = dataset.public and replace(dataset.public, rows=_spread(dataset.public.rows, samples))
    domain = dataset.domains.test if dataset.domains else torch.zeros(len(dataset.test))
    rows = torch.cat([_spread((domain == each).nonzero().flatten(), samples) for each in domain.unique()])
    test: Any = _Some(dataset.test, rows)
    domains = dataset.domains and replace(dataset.domains, test=dataset.domains.test[rows])
    return replace(dataset, test=test, public=public, domains=domains)


def _spread(positions: Tensor, most: int) -> Tensor:
    """Return at most so many positions from all over, since neighbours can be of one class."""
    return positions[:: max(1, len(positions) // most)][:most]


class _Some(PublicSamples):
    """Some of the samples of a data set, for evaluation in this process."""

    gather = PublicSamples.inputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.samples, name)

    def to(self, device: torch.device, memory_format: torch.memory_format) -> _Some:
        return _Some(self.samples.to(device, memory_format), self.rows)
