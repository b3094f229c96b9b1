"""A partition that a program gives as lists, or by the clients' names: positions in the training set of each one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcore import ConfigError
from fedcore.data import Dataset, IndexLists, IntArray, problem_with_lists


def listed_parts(
    lists: Sequence[Any] | Mapping[str, Any],
    labels: IntArray,
    num_clients: int,
    *,
    dataset: Dataset,
    rows: IntArray,
    **_: Any,
) -> Sequence[Any] | Mapping[str, Any]:
    """Return lists of positions in the training set as positions in ``rows``: the partitioner of a program's lists.

    :param lists: one for each client; a mapping if the clients have names.
    :raises ConfigError: the lists are no partition of the run's samples among its clients.
    """
    if isinstance(lists, Mapping):
        how: dict[str, Any] = {"dataset": dataset, "rows": rows}
        return dict(zip(lists, listed_parts([*lists.values()], labels, num_clients, **how), strict=True))
    count = len(lists)
    if count != num_clients:
        raise ConfigError(f"the partition has {count} lists, but clients is {num_clients}; write clients={count}")
    problem = problem_with_lists(IndexLists.of(lists), IndexLists.empty(count), len(dataset.train))
    if problem:
        raise ConfigError(f"the partition has a list per client, but {problem}")
    if len(rows) == len(dataset.train):
        return lists
    renumbered = []
    for client, positions in enumerate(map(np.asarray, lists)):
        if not (used := np.isin(positions, rows)).all():
            raise ConfigError(
                f"the partition gives client {client} the sample {positions[~used][0]}, which no client gets: it is "
                "public, of the unseen domain, or left out by --samples or --imbalance; leave out the sample or the "
                "option"
            )
        renumbered.append(np.searchsorted(rows, positions))
    return renumbered
