"""Class prototypes of a federation: the mathematics of FedProc and FedECCR, as pure functions.

:class:`fedcore_functional.PrototypeExchange` calls them, hook by hook.

A client sends ``prototypes`` (C, d) with their weights: ``known`` (C,) bool if every holder counts once, ``counts``
(C,) int64 if every sample counts. The server sends ``prototypes`` and the mask ``known`` down. A row of weight 0 never
enters an average, whatever its values. The server adds clients one by one in float64, so its memory does not grow with
the cohort.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore import Answer, RoundFailedError, Tensors, check_tensors
from fedcore_functional.bounds import UNKNOWN, FeatureRange, check_means
from fedcore_functional.classes import check_counts, class_means

Weights: TypeAlias = Literal["clients", "samples"]


def class_prototypes(features: Tensor, labels: Tensor, num_classes: int, *, weights: Weights = "clients") -> Tensors:
    """Return one client's ``prototypes``, the mean features of its classes, and their weights.

    ``features`` (n, d), ``labels`` (n,) integer. Means are computed in float64 and have the features' dtype. The
    weights are ``known`` (C,) bool, the classes that it holds, or with ``weights="samples"`` ``counts`` (C,) int64.

    :source: FedProc (Mu et al., FGCS 2023, arXiv 2109.12273), Eq. 5; FedECCR (Zeng et al., CollaborateCom 2023),
        second line of Eq. 2.

    >>> features, labels = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1])
    >>> sent = class_prototypes(features, labels, 2)
    >>> sent["prototypes"], sent["known"]
    (tensor([[0., 0.],
            [2., 3.]]), tensor([False,  True]))
    >>> class_prototypes(features, labels, 2, weights="samples")["counts"]
    tensor([0, 2])
    """
    means, counts = class_means(features.double(), labels, num_classes)
    weight = {"known": counts > 0} if weights == "clients" else {"counts": counts}
    return {"prototypes": means.to(features.dtype), **weight}


def check_prototypes(
    sent: Mapping[str, Tensor],
    num_classes: int,
    width: int,
    *,
    weights: Weights,
    samples: int,
    within: FeatureRange = UNKNOWN,
) -> None:
    """Refuse anything but one client's ``prototypes`` (C, d) with ``known`` or ``counts`` (C,), and nothing else.

    :param samples: the client's training samples, the required sum of its counts.
    :param within: the range of the features.
    :raises ValueError: names the tensor, the finding and the expectation.
    """
    name, dtype = ("known", torch.bool) if weights == "clients" else ("counts", torch.int64)
    check_tensors(sent, {"prototypes": ((num_classes, width), None), name: ((num_classes,), dtype)})
    if name == "counts":
        check_counts(sent["counts"], samples, complete=True)
    if within != UNKNOWN:  # takes as long as all else
        check_means("prototypes", sent["prototypes"][sent[name] > 0], within)


def add_prototypes(total: Mapping[str, Tensor], *sent: Mapping[str, Tensor]) -> Tensors:
    """Return ``total`` with more clients: ``sums`` (C, d) and ``weights`` (C,), per class, both float64.

    The clients are added in order: one call for several gives the same bits as one call for each.

    :param total: the result for the clients before, among other values or not; without ``sums`` for the first one.
    :param sent: each client's ``prototypes`` (C, d), with ``known`` (C,) of weight 1, or ``counts`` (C,).
    """
    kind = "counts" if "counts" in sent[0] else "known"
    weights = torch.stack([own[kind] for own in sent]).double()  # (K, C)
    prototypes = torch.stack([own["prototypes"] for own in sent]).double()  # (K, C, d)
    sums = torch.where((weights > 0).unsqueeze(2), prototypes * weights.unsqueeze(2), 0.0)  # (K, C, d)
    return {"sums": _in_order(total.get("sums"), sums), "weights": _in_order(total.get("weights"), weights)}


def _in_order(total: Tensor | None, parts: Tensor) -> Tensor:
    """Return the sum of a total and of parts (K, ...), which are added one after the other."""
    summed: Tensor = reduce(torch.add, parts if total is None else [total, *parts])
    return summed


def mean_over_holders(total: Mapping[str, Tensor], previous: Mapping[str, Tensor] | None = None) -> Tensors:
    """Return the global ``prototypes`` (C, d) float32 and ``known`` (C,): weighted means over the holders.

    A class without holders keeps its row of ``previous``. Without ``previous`` it is not known.

    :param total: from :func:`add_prototypes`, of at least one client.
    :param previous: the global ``prototypes`` and ``known`` of the round before.
    :source: FedProc, Algorithm 1 line 9; FedECCR, first line of Eq. 2. Both divide by the number of all clients; this
        is the mean over the holders if every client holds every class. By samples: the FedProc authors' code, which
        divides summed features by summed counts.

    >>> first = {"prototypes": torch.tensor([[2.0], [9.0]]), "known": torch.tensor([True, False])}
    >>> other = {"prototypes": torch.tensor([[4.0], [9.0]]), "known": torch.tensor([True, False])}
    >>> mean_over_holders(add_prototypes(add_prototypes({}, first), other))
    {'prototypes': tensor([[3.],
            [0.]]), 'known': tensor([ True, False])}
    """
    weights = total["weights"]
    held = weights > 0  # (C,)
    means = (total["sums"] / weights.clamp(min=1).unsqueeze(1)).float()  # (C, d)
    if not previous:
        return {"prototypes": means, "known": held}
    prototypes = torch.where(held.unsqueeze(1), means, previous["prototypes"])
    return {"prototypes": prototypes, "known": held | previous["known"]}


def first_prototypes(answers: Iterable[Answer]) -> Tensors:
    """Return the first ``prototypes`` and ``known`` of a federation: the mean over the holders that answered.

    :param answers: clients' :func:`class_prototypes`, from ``server.ask``; they are read one by one.
    :raises RoundFailedError: no client answered.
    """
    total = reduce(add_prototypes, (answer.tensors for answer in answers), Tensors())
    if not total:
        raise RoundFailedError("no client answered with its prototypes, so there are none to contrast with")
    return mean_over_holders(total)


def random_prototypes(num_classes: int, width: int, generator: torch.Generator) -> Tensors:
    """Return ``prototypes`` (C, d) of length 1 in uniformly drawn directions, all ``known``."""
    directions = torch.randn(num_classes, width, generator=generator)
    return {"prototypes": F.normalize(directions, dim=1), "known": torch.ones(num_classes, dtype=torch.bool)}


def prototype_distance(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor | None = None) -> Tensor:
    """Return the mean of (z - c_y)^2 over the samples and the d coordinates, shape ().

    ``features`` z (B, d), ``labels`` y (B,), ``prototypes`` c (C, d). A sample of an unknown class contributes 0, but
    counts in the mean. It is capture-safe.

    :param known: (C,) bool. None: all are known.
    :source: FedProto (Tan et al., AAAI 2022, arXiv 2105.00243), in the form of its authors' code; FPL, FedTGP and
        FedPAC have the same term.

    >>> z, c = torch.tensor([[1.0, 4.0], [9.0, 9.0]]), torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    >>> prototype_distance(z, torch.tensor([0, 1]), c, torch.tensor([True, False]))  # (0 + 4 + 0 + 0) / 4
    tensor(1.)
    """
    apart = features - prototypes[labels]  # (B, d)
    if known is not None:
        apart = torch.where(known[labels].unsqueeze(1), apart, 0.0)
    return apart.square().mean()
