"""Samples that belong together, such as the images of a patient: they stay on one side of every split."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore import ConfigError, DataError
from fedcore.data import IndexLists, first_ten
from fedcore.tools import public_share

Array: TypeAlias = npt.NDArray[Any]


def whole_groups(train: IndexLists, test: IndexLists, groups: Tensor, options: Any) -> tuple[IndexLists, IndexLists]:
    """Return the clients' training and held-out samples with each group where its first sample went.

    A feature of fedcore, for data sets with ``groups``. A partitioner draws sample by sample, so the first sample of a
    group is as likely to be held out as any other: sizes stay as they are on average.

    :param groups: the number of each training sample's group, (n,) int64.
    :param options: the run's configuration.
    :raises ConfigError: an option would split groups, a client would have no training sample, or most groups are at
        several sources, as patients are whom each hospital numbers itself.
    """
    splits = "draws single samples, which splits the groups of this data set"
    if options.validation_share:
        raise ConfigError(f"--validation-share {splits}; leave it out: the reported samples then choose the best round")
    if public_share(options.public) is not None:
        raise ConfigError(f"--public as a share {splits}; give the name of another data set")
    lists = [part for pair in zip(train, test, strict=True) for part in pair]  # client k: 2k to train on, 2k + 1 held
    place = np.full(len(groups), -1)
    for number, part in enumerate(lists):
        place[part.numpy()] = number
    used = np.flatnonzero(place >= 0)
    _, first, group = np.unique(groups.numpy()[used], return_index=True, return_inverse=True)
    side = place[used][first]
    several = len(np.unique(group[place[used] // 2 != (side // 2)[group]]))
    if options.partition == "natural" and 2 * several > len(first):
        raise ConfigError(
            f"--partition natural: {several} of {len(first)} groups have samples of several clients, which would all "
            "go to one of these. If each source numbers its own groups, name them by both: "
            "frame[SOURCE].astype(str) + '-' + frame[GROUP].astype(str)"
        )
    for client in range(len(train)):  # a client of few groups keeps one to train on
        if not (side == 2 * client).any() and (held := np.flatnonzero(side == 2 * client + 1)).size:
            side[held[0]] = 2 * client
    target = side[group]
    parts = [torch.from_numpy(used[target == number]) for number in range(len(lists))]
    if empty := [client for client, part in enumerate(parts[0::2]) if not len(part)]:
        raise ConfigError(
            f"with whole groups client {empty[0]} has no training sample: the data set has "
            f"{len(first)} groups for {len(train)} clients; take fewer clients, or --partition natural"
        )
    return IndexLists.of(parts[0::2]), IndexLists.of(parts[1::2])


def whole_rows(test: Array, groups: Array) -> Array:
    """Return which samples are test samples, (n,) bool, with each group where its first sample is."""
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    is_test: Array = test[first][group]
    return is_test


def numbered_groups(where: str, names: Array, others: Array) -> Tensor:
    """Return the groups of training samples as numbers (n,) int64 in sorted order.

    :param names: the groups of the training samples; ``others``: of the test samples.
    :raises DataError: a group has samples in both. The message names it.
    """
    if both := sorted({*map(str, names)} & {*map(str, others)}):
        raise DataError(
            f"{where}: {len(both)} groups have training and test samples: {first_ten(both)}. Figures on samples whose "
            "group was trained on are too good; move all samples of a group to one side"
        )
    return torch.from_numpy(np.unique(names, return_inverse=True)[1].astype(np.int64))
