"""The partition that data bring along: each client holds the samples of a source, such as a writer or a hospital."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedcore.base.errors import ConfigError
from fedcore.base.seeding import numpy_generator
from fedcore.data.owners import IntArray
from fedcore.data.samples import Dataset


def natural(
    labels: IntArray, num_clients: int, *, seed: int, dataset: Dataset, rows: IntArray, **_: Any
) -> list[IntArray]:
    """Give each source's samples (``Dataset.sources``) to one client; fewer clients hold several whole sources.

    With as many clients as sources, client k is source k. Else the sources are assigned in random order, one to each
    client in turn, so that clients hold as many sources to within one.

    :raises ConfigError: the data set has no sources, or fewer than clients.
    """
    if dataset.sources is None:
        raise ConfigError(
            "--partition natural: this data set does not say where its samples come from (Dataset.sources); name "
            "another partition"
        )
    found, source = np.unique(dataset.sources.cpu().numpy()[rows], return_inverse=True)
    if num_clients > len(found):
        raise ConfigError(
            f"--clients is {num_clients}, but the samples come from {len(found)} sources; write --clients "
            f"{len(found)}, or fewer"
        )
    owner = np.arange(len(found))
    if num_clients < len(found):
        owner[numpy_generator(seed, "partition").permutation(len(found))] = np.arange(len(found)) % num_clients
    client = owner[source]
    order = np.argsort(client, kind="stable")
    return np.split(order, np.searchsorted(client[order], np.arange(1, num_clients)))
