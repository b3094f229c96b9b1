"""FedCD's ablations (Table 4) and other readings of its paper, one option each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedcore import ClientContext, ClientUpdate, ModelTask, ServerContext, SplitModel, Step, hookimpl
from fedcore_fedcd import equations as eq
from fedcore_fedcd.plugin import FedCD, FedCDOptions, dtype_of
from fedcore_functional import FeatureRange, UnitLength, check_means, class_means


class FedCDVariantsOptions(FedCDOptions):
    """Options of FedCD's variants. With the defaults they are FedCD."""

    rebalance: Literal["appended", "averaged", "mixed", "none"] = Field(
        default="appended",
        description="How the global prototypes enter D^k+. appended: a batch's loss is the samples' mean plus the "
        "prototypes' mean. averaged: it is their weighted mean. mixed: the prototypes are shuffled among the samples "
        "(Algorithm 1 to the letter). none: samples alone.",
    )
    prototype_weight: float = Field(
        default=1.0, ge=0, description="Weight of the prototypes' mean; the samples' has 1 (appended, averaged)."
    )
    kmeans: Literal["before", "after"] = Field(
        default="after",
        description="K-means starts the prototypes of a class that has none: on the client's features before or after "
        "its local training. After it, they take no part in that round's losses.",
    )
    match: Literal["none", "hungarian"] = Field(
        default="none",
        description="hungarian: each client's k-means centres are matched to the mean of those of the clients before, "
        "and then averaged by Eq. 1. This is ours, not the paper's.",
    )
    first_t: Literal[0, 1] = Field(
        default=0,
        description="t of the first round in mu = 1 - t/T. 1 is Algorithm 2's, whose last round has no L_dcl.",
    )
    W: Literal["sum", "mean", "probabilities"] = Field(
        default="sum",
        description="How W of Eq. 6 reduces fine logits to a class logit: sum or mean; probabilities: W adds up "
        "probabilities, and the class logit is the logsumexp.",
    )
    normalize: bool = Field(
        default=False,
        description="Scale z to unit length after the projection head, as FedProc's authors' code does. The paper "
        "does not.",
    )
    hpc: bool = Field(default=True, description="L_hpc; false: prototypes are feature means (FedCD-hpc of Table 4).")
    distillation: Literal["dkd", "kl"] = Field(
        default="dkd", description="L_gid decoupled (Eq. 8), or plain KL (FedCD/kd of Table 4)."
    )
    aggregation: Literal["adaptive", "count", "fedavg"] = Field(
        default="adaptive",
        description="Weights of class vectors. adaptive: Eqs. 13 and 14. count: fine sample counts (FedCD/cla of "
        "Table 4). fedavg: the clients' sample counts (FedCD-acla).",
    )

    @model_validator(mode="after")
    def _a_loss_in_the_last_round(self) -> FedCDVariantsOptions:
        if self.first_t == 1 and not (self.hpc or self.gamma or self.lambda_):
            raise ValueError(
                "first_t: 1 leaves the last round no loss without hpc, gamma and lambda; use 0, or keep one of them"
            )
        return self


FedCDOptions.elsewhere = {
    **dict.fromkeys(
        FedCDVariantsOptions.model_fields.keys() - FedCDOptions.model_fields, "The plugin fedcd-variants has it."
    ),
    "bpr": "gamma=0 is without L_bpr.",
    "gid": "lambda=0 is without L_gid.",
}


class FedCDVariants(FedCD):
    """FedCD with parts that are left out (Table 4) or read otherwise. With the defaults it is FedCD, bit by bit."""

    Options = FedCDVariantsOptions
    options: FedCDVariantsOptions

    def __init__(self, options: FedCDVariantsOptions) -> None:
        super().__init__(options)
        self.means_of_hpc = 1 + options.prototype_weight * (options.rebalance == "appended")
        if options.aggregation == "fedavg":
            self.owns = ()

    # --- both sides ----------------------------------------------------------------------------------------

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Make FedCD's model, and scale z to unit length with ``normalize``."""
        super().configure_model(model, task)
        if self.options.normalize:
            model.encoder.add_module("unit", UnitLength())

    def _classifier(self, width: int, num_classes: int) -> eq.FineClassifier:
        kinds = {"sum": eq.FineClassifier, "mean": MeanClassifier, "probabilities": ProbabilityClassifier}
        return kinds[self.options.W](width, num_classes, self.options.fine_classes)

    def _t(self, round: int) -> int:
        return round + self.options.first_t

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Start P^k, and draw a partner for each prototype with ``rebalance=mixed``."""
        super().begin_local(client)
        if self.options.rebalance == "mixed":
            number = len(client.scratch["points"].labels)
            partners = torch.randint(client.n, (number,), generator=client.generator("mixed"))
            client.scratch["partners"] = partners.to(client.device)

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send P^k, without ``hpc`` the mean features of the fine classes, and the counts."""
        sent = super().end_local(client)
        if not self.options.hpc:
            start, known = client.scratch["start"], client.scratch["known"]
            features, _, labels = client.forward()
            fine = eq.assign_fine_classes(features, labels, start, known)
            sent["prototypes"] = fine_means(features, labels, fine, start)
        return sent

    def _start(self, client: ClientContext) -> tuple[Tensor, Tensor]:
        start, known = super()._start(client)
        if self.options.kmeans == "before" and ((client.class_counts > 0) & ~known.any(dim=1)).any():
            self._start_from_centres(client, start, known)
        return start, known

    def _points(self, client: ClientContext) -> eq.Points:
        reading, weight = self.options.rebalance, self.options.prototype_weight
        if not client.received or reading == "none" or (weight == 0 and reading != "mixed"):
            return eq.no_points(client.model.feature_dim, client.device)
        prototypes, counts = client.received["prototypes"].to(dtype_of(client)), client.received["counts"]
        # Prototypes that are not mixed have a mean of their own: their importances add up to its weight.
        importance = counts if reading == "mixed" else weight * counts / counts.sum().clamp(min=1)
        return eq.points_of(prototypes, importance.float())

    def _rebalanced(self, step: Step) -> eq.Rebalanced:
        points = step.client.scratch["points"]
        if self.options.rebalance == "mixed":
            return mixed(step.y, points, step.indices, step.client.scratch["partners"])
        return averaged(step.y, points) if self.options.rebalance == "averaged" else eq.appended(step.y, points)

    def _weight_of_hpc(self, mu: float) -> float:
        # Without L_hpc nothing trains P^k: end_local sends feature means in its place.
        return super()._weight_of_hpc(mu) if self.options.hpc else 0.0

    def _distillation(self, teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        if self.options.distillation == "kl":
            return distillation(teacher, student)
        return super()._distillation(teacher, student, labels)

    # --- server --------------------------------------------------------------------------------------------

    def _check_first(self, prototypes: Tensor) -> None:
        options = self.options
        # With kmeans=before new prototypes are trained, too, and may be longer than any feature.
        if options.kmeans == "after" or not options.hpc:
            within = options.narrowed(FeatureRange(1.0) if options.normalize else FeatureRange())
            check_means("prototypes", prototypes, within)

    def _check_trained(self, server: ServerContext, sent: Tensor, trained: Tensor, steps: Tensor) -> None:
        if self.options.hpc:
            super()._check_trained(server, sent, trained, steps)
        else:  # every prototype is a mean
            self._check_first(sent[trained])

    def _add(self, server: ServerContext, updates: Sequence[ClientUpdate], prototypes: Tensor, counts: Tensor) -> None:
        if self.options.match == "none":
            super()._add(server, updates, prototypes, counts)
            return
        for update, own, number in zip(updates, prototypes, counts, strict=True):
            if "total" in server.state:
                own, number = self._matched(server, own, number)
                update.payload["counts"] = number
            super()._add(server, [update], own.unsqueeze(0), number.unsqueeze(0))

    def _matched(self, server: ServerContext, prototypes: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return a client's first centres and their counts in the order of the mean of the clients before."""
        total = server.state["total"]  # (C, M)
        means = server.state["sum"] / total.clamp(min=1).unsqueeze(2)
        without = ~server.state.get("counts", torch.zeros_like(total)).any(dim=1)  # classes that have no P^g
        prototypes, counts = prototypes.clone(), counts.clone()
        for c in torch.nonzero(without & total.any(dim=1) & counts.any(dim=1)).flatten().tolist():
            order = matched_order(prototypes[c], counts[c] > 0, means[c], total[c] > 0)
            prototypes[c], counts[c] = prototypes[c, order], counts[c, order]
        return prototypes, counts

    def _shares(
        self, server: ServerContext, updates: Sequence[ClientUpdate], vectors: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        if self.options.aggregation == "adaptive":
            return super()._shares(server, updates, vectors)
        fine = torch.stack([update.payload["counts"].flatten().double() for update in updates], dim=1)  # (CM, K)
        total = fine.sum(dim=1)  # (CM,)
        return fine / total.clamp(min=1).unsqueeze(1), total > 0


# --- readings of the rebalanced batch ------------------------------------------------------------------------------


def averaged(labels: Tensor, points: eq.Points) -> eq.Rebalanced:
    """Return D^k+ with one mean over samples and prototypes.

    :param labels: of the samples, (B,); each has the importance 1 / B.
    """
    return eq.appended(labels, points)._replace(summed=False)


def mixed(labels: Tensor, points: eq.Points, indices: Tensor, partners: Tensor) -> eq.Rebalanced:
    """Return D^k+ with the prototypes whose partner is in the batch. Samples have the importance 1.

    :param labels: of the samples, (B,), with their ``indices`` among the client's samples.
    :param points: their importances are the counts n_{c,m}.
    :param partners: the index of the sample whose batch a prototype joins, (P,).
    """
    in_batch = (partners.unsqueeze(1) == indices.to(partners.device)).any(dim=1)  # (P,)
    importance = torch.cat([points.importance.new_ones(labels.shape), points.importance * in_batch])
    return eq.Rebalanced(points, torch.cat([labels, points.labels]), importance)


# --- readings of W ---------------------------------------------------------------------------------------------------


class MeanClassifier(eq.FineClassifier):
    """W takes the mean of a class's fine logits."""

    def reduce(self, fine: Tensor) -> Tensor:
        """Return the class logits (B, C) of fine logits (B, C, M)."""
        return fine.mean(dim=2)


class ProbabilityClassifier(eq.FineClassifier):
    """W adds up probabilities: softmax(class logits) = softmax(fine logits) W."""

    def reduce(self, fine: Tensor) -> Tensor:
        """Return the class logits (B, C) of fine logits (B, C, M)."""
        return fine.logsumexp(dim=2)


# --- other equations -------------------------------------------------------------------------------------------------


def fine_means(features: Tensor, labels: Tensor, fine: Tensor, prototypes: Tensor) -> Tensor:
    """Return each fine class's mean feature, or its given prototype if it has no sample: (C, M, d)."""
    classes, per_class, width = prototypes.shape
    means, counts = class_means(features.double(), labels * per_class + fine, classes * per_class)
    held = (counts > 0).view(classes, per_class, 1)  # (C, M, 1)
    return torch.where(held, means.view(classes, per_class, width).to(prototypes.dtype), prototypes)


def distillation(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Return plain KL(teacher || student) of each sample, (N,): FedCD/kd of Table 4."""
    teacher, student = teacher_logits.detach().log_softmax(dim=1), student_logits.log_softmax(dim=1)
    return (teacher.exp() * (teacher - student)).sum(dim=1)


def matched_order(centres: Tensor, known: Tensor, others: Tensor, others_known: Tensor) -> Tensor:
    """Return the order of centres that brings each nearest to its counterpart: ours, not the paper's.

    As many known centres as possible get a known counterpart, with the least sum of squared distances.

    :param centres: (M, d), ``known`` (M,) bool; ``others`` and ``others_known`` the same of the counterparts.
    :returns: (M,) int64: ``centres[order][m]`` belongs to ``others[m]``.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, as above

    distances = (others.double().unsqueeze(1) - centres.double()).square().sum(dim=2)  # (M others, M centres)
    apart = 1 + distances.sum()  # dearer than any pairs of known ones
    cost = torch.where(others_known.unsqueeze(1) & known, distances, apart)
    return torch.as_tensor(linear_sum_assignment(cost.numpy())[1])
