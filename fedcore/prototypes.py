"""Class prototypes of a federation: what FedProc and FedECCR compute and send alike.

First the mathematics, as pure functions; then :class:`PrototypeExchange`, a plugin's part of it, hook by hook.

A client sends ``prototypes`` (C, d) with what they weigh: ``known`` (C,) bool where every holder counts once,
``counts`` (C,) int64 where every sample does. The server sends ``prototypes`` and ``known``, the mask, down. A row
without weight says nothing: it never enters an average, whatever stands in it. The server adds clients one by one,
in float64, so that its memory does not grow with the cohort.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial, reduce
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from fedcore.contract import PluginOptions
from fedcore.errors import RoundFailedError
from fedcore.functional import ReadyPrototypes, class_means, ready_prototypes
from fedcore.tensors import check_tensors
from fedcore.types import Answer, ClientUpdate, Tensors

if TYPE_CHECKING:
    from fedcore import ClientContext, ServerContext

__all__ = [
    "PrototypeExchange",
    "PrototypeOptions",
    "add_prototypes",
    "check_prototypes",
    "class_prototypes",
    "first_prototypes",
    "mean_over_holders",
    "random_prototypes",
]

Weights: TypeAlias = Literal["clients", "samples"]


def class_prototypes(features: Tensor, labels: Tensor, num_classes: int, *, weights: Weights = "clients") -> Tensors:
    """Return one client's ``prototypes``, the mean features of the classes it holds, and what they weigh.

    ``features`` (n, d), ``labels`` (n,) integer. Means are taken in float64 and come in the features' dtype. With
    ``weights="clients"`` comes ``known`` (C,) bool, which classes it holds; with ``"samples"`` ``counts`` (C,) int64.

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
    weights: Weights = "clients",
    samples: int | None = None,
) -> None:
    """Refuse what is not one client's ``prototypes`` (C, d) and ``known`` or ``counts`` (C,), and nothing else.

    :param samples: the client's training samples, which its counts have to add up to; None where they are not known.
    :raises ValueError: which tensor, what it is and what was expected.
    """
    weight = {"known": torch.bool} if weights == "clients" else {"counts": torch.int64}
    check_tensors(
        sent,
        {"prototypes": ((num_classes, width), None)}
        | {name: ((num_classes,), dtype) for name, dtype in weight.items()},
    )
    if weights == "clients":
        return
    counts: list[int] = sent["counts"].tolist()
    if min(counts) < 0:
        raise ValueError(f"'counts' holds {min(counts)}, expected no number below 0")
    if samples is not None and sum(counts) != samples:
        raise ValueError(f"'counts' add up to {sum(counts)}, expected the client's {samples} training samples")


def add_prototypes(total: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> Tensors:
    """Return ``total`` with one client more: ``sums`` (C, d) and ``weights`` (C,), per class, both float64.

    :param total: what this function returned for the clients before; empty for the first one.
    :param sent: one client's ``prototypes`` (C, d), with ``known`` (C,), which weigh 1, or ``counts`` (C,).
    """
    weights = (sent["counts"] if "counts" in sent else sent["known"]).double()  # (C,)
    held = (weights > 0).unsqueeze(1)  # (C, 1)
    sums = torch.where(held, sent["prototypes"].double() * weights.unsqueeze(1), 0.0)  # (C, d)
    if total:
        sums, weights = total["sums"] + sums, total["weights"] + weights
    return {"sums": sums, "weights": weights}


def mean_over_holders(total: Mapping[str, Tensor], previous: Mapping[str, Tensor] | None = None) -> Tensors:
    """Return the global ``prototypes`` (C, d) float32 and ``known`` (C,): weighted means over the holders.

    A class that nobody held keeps its row of ``previous``, known or not; without ``previous`` it is not known.

    :param total: as from :func:`add_prototypes`, of at least one client.
    :param previous: global ``prototypes`` and ``known`` of the round before.
    :source: FedProc, Algorithm 1 line 9; FedECCR, first line of Eq. 2: both divide by all clients, which is the
        mean over the holders where every client holds every class. By samples: the FedProc authors' code, which divides
        summed features by summed counts.

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


class PrototypeOptions(PluginOptions):
    """Options of a method that contrasts features with global prototypes."""

    first_round: Literal["contrast", "task"] = Field(
        "task",
        description="Round 0: cross-entropy alone, and the first prototypes are those of the trained models (task), or "
        "contrast with prototypes that init says.",
    )
    init: Literal["query", "random"] = Field(
        "query",
        description="First prototypes for first_round=contrast: the cohort's means under the initial weights, or unit "
        "vectors drawn from the seed.",
    )
    prototype_weights: Weights = Field(
        "samples",
        description="A global prototype is the mean over all samples of the class, or over the clients that hold it.",
    )
    projection: bool = Field(True, description="Put the projection head (256 wide) on the encoder.")

    @model_validator(mode="after")
    def _init_is_used(self) -> PrototypeOptions:
        if self.first_round == "task" and self.init != "query":
            raise ValueError(
                f"init={self.init} says what first_round=contrast starts from; give both, or leave init out"
            )
        return self


class PrototypeExchange:
    """One plugin's exchange of global prototypes, to be called from the hooks of the same names.

    It keeps nothing: what lasts stands in ``server.state`` (``prototypes`` and ``known``), what a client needs for a
    round in ``client.scratch``. Until there are prototypes nothing is sent down, and :meth:`ready` returns None.

    :param options: which prototypes come first, and what weighs in a mean.
    """

    def __init__(self, options: PrototypeOptions) -> None:
        self._options = options

    # --- server --------------------------------------------------------------------------------------------

    def begin_round(self, server: ServerContext) -> None:
        """Initialize the prototypes for a first round with contrast, in the first round that comes to something.

        :raises RoundFailedError: nobody of the cohort answered.
        """
        if self._options.first_round == "task" or "prototypes" in server.state:
            return
        if self._options.init == "random":
            first = random_prototypes(server.num_classes, server.feature_dim, server.generator("prototypes"))
        else:
            check = partial(
                check_prototypes,
                num_classes=server.num_classes,
                width=server.feature_dim,
                weights=self._options.prototype_weights,
            )
            first = first_prototypes(server.ask("prototypes", clients="cohort", check=check))
        server.state.update(first)

    def broadcast(self, server: ServerContext) -> Tensors | None:
        """Return the global ``prototypes`` (C, d) and ``known`` (C,); None while there are none."""
        if "prototypes" not in server.state:
            return None
        return {"prototypes": server.state["prototypes"], "known": server.state["known"]}

    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add one client's prototypes to this round's sums.

        :raises ValueError: they are malformed; the client is left out.
        """
        check_prototypes(
            update.payload,
            server.num_classes,
            server.feature_dim,
            weights=self._options.prototype_weights,
            samples=update.samples,
        )
        before = server.state if "sums" in server.state else {}
        server.state.update(add_prototypes(before, update.payload))
        update.payload.clear()

    def aggregate(self, server: ServerContext) -> None:
        """Renew the global prototypes by this round's sums, if clients sent any."""
        if "sums" in server.state:
            total = {name: server.state.pop(name) for name in ("sums", "weights")}
            previous = server.state if "prototypes" in server.state else None
            server.state.update(mean_over_holders(total, previous))

    # --- client --------------------------------------------------------------------------------------------

    def own(self, client: ClientContext) -> Tensors:
        """Return the client's prototypes under its current weights, over all its training samples in eval mode."""
        features, _, labels = client.forward()
        return class_prototypes(features, labels, client.num_classes, weights=self._options.prototype_weights)

    def begin_local(self, client: ClientContext, *, temperature: float = 1.0) -> None:
        """Make the received prototypes ready for all batches of the round."""
        if client.received:
            client.scratch["prototypes"] = ready_prototypes(
                client.received["prototypes"], temperature=temperature, known=client.received["known"]
            )

    def ready(self, client: ClientContext) -> ReadyPrototypes | None:
        """Return the prototypes to contrast with; None in a round without any."""
        ready: ReadyPrototypes | None = client.scratch.get("prototypes")
        return ready
