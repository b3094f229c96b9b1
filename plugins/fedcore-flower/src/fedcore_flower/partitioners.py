"""Partitioners of flwr-datasets: ``--partition flwr:pathological?num_classes_per_partition=2``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
import yaml

from fedcore import ConfigError, UnknownNameError, generator
from fedcore.data import Dataset, IntArray

NOT_OFFERED = ("id-to-size-fnc", "distribution", "vertical-even", "vertical-size")
"""The partitioners that are not offered: they need a function or an array, or divide columns instead of samples."""


def partitioner(rest: str) -> Callable[..., list[IntArray]]:
    """A partitioner of flwr-datasets, with its arguments: flwr:pathological?num_classes_per_partition=2.

    ``num_partitions``, ``partition_by``, ``alpha`` and ``seed`` come from the run, unless the name contains them.

    :raises ConfigError: or a subclass. flwr-datasets is not installed, or has no such partitioner or argument.
    """
    name, _, query = rest.partition("?")
    try:
        from flwr_datasets import partitioner as library
    except ImportError as error:
        raise ConfigError(
            f"--partition flwr:{rest} needs flwr-datasets ({error}): pip install 'fedcore-flower[partitioners]' in a "
            "separate environment, because flwr-datasets needs datasets below 5"
        ) from error
    classes = {_kebab(cls): getattr(library, cls) for cls in library.__all__ if cls != "Partitioner"}
    known = [kind for kind in classes if kind not in NOT_OFFERED]
    if name not in known:
        raise UnknownNameError("partitioner", f"flwr:{name}", [f"flwr:{kind}" for kind in known])
    takes = inspect.signature(classes[name]).parameters
    pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)  # a plus is no blank: 1e+2
    settings = {key: yaml.safe_load(value) for key, value in pairs}
    if len(settings) < len(pairs):
        raise ConfigError(f"--partition flwr:{rest}: an argument stands twice; write it once")
    if unknown := [key for key in settings if key not in takes]:
        raise UnknownNameError("argument", unknown[0], takes, f"(of flwr:{name})")

    def scheme(
        labels: IntArray, num_clients: int, *, alpha: float, seed: int, dataset: Dataset, rows: IntArray, **_: Any
    ) -> list[IntArray]:
        by = "source" if "natural-id" in name else "label"
        run = {"num_partitions": num_clients, "partition_by": by, "alpha": alpha, "seed": seed}
        options = {key: value for key, value in run.items() if key in takes} | settings
        return _divided(f"flwr:{name}", classes[name], options, _columns(labels, dataset, rows), num_clients, seed)

    if "alpha" not in takes or "alpha" in settings:  # a run's --alpha has no effect, and the run says so
        own = inspect.signature(scheme)
        read = [parameter for option, parameter in own.parameters.items() if option != "alpha"]
        scheme.__signature__ = own.replace(parameters=read)  # type: ignore[attr-defined]
    return scheme


def _kebab(cls: str) -> str:
    """Return the name of a partitioner's class, such as ``inner-dirichlet`` for ``InnerDirichletPartitioner``."""
    return re.sub(r"(?<=.)(?=[A-Z])", "-", cls.removesuffix("Partitioner")).lower()


def _columns(labels: IntArray, dataset: Dataset, rows: IntArray) -> dict[str, IntArray]:
    columns = {"label": labels}
    if dataset.sources is not None:
        columns["source"] = np.asarray(dataset.sources)[rows]
    return columns


def _divided(
    name: str, cls: Any, options: dict[str, Any], columns: dict[str, IntArray], clients: int, seed: int
) -> list[IntArray]:
    """Return the positions of each client's samples. The samples are shuffled first, as ``FederatedDataset`` does.

    :raises ConfigError: the library refuses the arguments, or makes another number of parts than clients.
    """
    from datasets import Dataset as Table

    if options.get("partition_by", "label") not in columns:
        raise ConfigError(f"{name}: the data set has no column {options['partition_by']!r}")
    order = torch.randperm(len(columns["label"]), generator=generator(seed, "partition")).numpy()
    shuffled = {"position": order} | {key: column[order] for key, column in columns.items()}
    try:
        partitioner = cls(**options)
        partitioner.dataset = Table.from_dict(shuffled)
        count = partitioner.num_partitions
        parts = (
            [np.array(partitioner.load_partition(k)["position"]) for k in range(clients)] if count == clients else []
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error
    if count != clients:
        raise ConfigError(f"--clients is {clients}, but {name} makes {count} parts; write --clients {count}")
    return parts
