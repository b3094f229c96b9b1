"""Class prototypes of a federation: what FedProc and FedECCR compute and send alike, as pure functions.

Prototypes travel as two tensors: ``prototypes`` (C, d) and ``known`` (C,) bool. A row that is not known says
nothing: it never enters an average, whatever stands in it. The server adds clients one by one, in float64, so
that its memory does not grow with the cohort.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore.errors import RoundFailedError
from fedcore.functional import class_means
from fedcore.tensors import check_tensors
from fedcore.types import Answer, Tensors

__all__ = [
    "add_prototypes",
    "check_prototypes",
    "class_prototypes",
    "first_prototypes",
    "mean_over_holders",
    "random_prototypes",
]


def class_prototypes(features: Tensor, labels: Tensor, num_classes: int) -> Tensors:
    """Return one client's ``prototypes``, the mean features of the classes it holds, and ``known``, which these are.

    ``features`` (n, d), ``labels`` (n,) integer. Means are taken in float64 and come in the features' dtype.

    :source: FedProc (Mu et al., FGCS 2023, arXiv 2109.12273), Eq. 5; FedECCR (Zeng et al., CollaborateCom 2023),
        second line of Eq. 2.

    >>> sent = class_prototypes(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1]), 2)
    >>> sent["prototypes"], sent["known"]
    (tensor([[0., 0.],
            [2., 3.]]), tensor([False,  True]))
    """
    means, counts = class_means(features.double(), labels, num_classes)
    return {"prototypes": means.to(features.dtype), "known": counts > 0}


def check_prototypes(sent: Mapping[str, Tensor], num_classes: int, width: int) -> None:
    """Refuse what is not one client's ``prototypes`` (C, d) and ``known`` (C,), and nothing else.

    :raises ValueError: which tensor, what it is and what was expected.
    """
    check_tensors(sent, {"prototypes": ((num_classes, width), None), "known": ((num_classes,), torch.bool)})


def add_prototypes(total: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> Tensors:
    """Return ``total`` with one client more: ``sums`` (C, d) float64 and ``holders`` (C,) int64, per class.

    :param total: what this function returned for the clients before; empty for the first one.
    :param sent: one client's ``prototypes`` (C, d) and ``known`` (C,).
    """
    known = sent["known"]
    sums = torch.where(known.unsqueeze(1), sent["prototypes"].double(), 0.0)  # (C, d)
    holders = known.long()  # (C,)
    if total:
        sums, holders = total["sums"] + sums, total["holders"] + holders
    return {"sums": sums, "holders": holders}


def mean_over_holders(total: Mapping[str, Tensor], previous: Mapping[str, Tensor] | None = None) -> Tensors:
    """Return the global ``prototypes`` (C, d) float32 and ``known`` (C,): unweighted means over the holders.

    A class that nobody held keeps its row of ``previous``, known or not; without ``previous`` it is not known.

    :param total: as from :func:`add_prototypes`, of at least one client.
    :param previous: global ``prototypes`` and ``known`` of the round before.
    :source: FedProc, Algorithm 1 line 9; FedECCR, first line of Eq. 2: both divide by all clients, which is the
        mean over the holders where every client holds every class.

    >>> first = {"prototypes": torch.tensor([[2.0], [9.0]]), "known": torch.tensor([True, False])}
    >>> other = {"prototypes": torch.tensor([[4.0], [9.0]]), "known": torch.tensor([True, False])}
    >>> mean_over_holders(add_prototypes(add_prototypes({}, first), other))
    {'prototypes': tensor([[3.],
            [0.]]), 'known': tensor([ True, False])}
    """
    holders = total["holders"]
    held = holders > 0  # (C,)
    means = (total["sums"] / holders.clamp(min=1).unsqueeze(1)).float()  # (C, d)
    if not previous:
        return {"prototypes": means, "known": held}
    prototypes = torch.where(held.unsqueeze(1), means, previous["prototypes"])
    return {"prototypes": prototypes, "known": held | previous["known"]}


def first_prototypes(answers: Iterable[Answer]) -> Tensors:
    """Return ``prototypes`` and ``known`` of a federation that had none: the mean over the holders who answered.

    :param answers: clients' :func:`class_prototypes`, as from ``server.ask``; read one by one.
    :raises RoundFailedError: nobody answered.
    """
    total = reduce(add_prototypes, (answer.tensors for answer in answers), Tensors())
    if not total:
        raise RoundFailedError("no client answered with its prototypes, so there are none to contrast with")
    return mean_over_holders(total)


def random_prototypes(num_classes: int, width: int, generator: torch.Generator) -> Tensors:
    """Return ``prototypes`` (C, d) of length 1 in directions drawn uniformly, all ``known``."""
    directions = torch.randn(num_classes, width, generator=generator)
    return {"prototypes": F.normalize(directions, dim=1), "known": torch.ones(num_classes, dtype=torch.bool)}
