"""The FedCD plugin: which equation is computed where, and what travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedcore import (
    ClientContext,
    ClientUpdate,
    Loss,
    ModelTask,
    Plugin,
    PluginOptions,
    ServerContext,
    SplitModel,
    Step,
    check_tensors,
    hookimpl,
)
from fedcore_fedcd import equations as eq
from fedcore_functional import UnitLength

MOST_MATCHED = 8
"""Fine classes up to which centres are matched: 8! = 40,320 orders."""

WEIGHT, BIAS = "classifier.fine.weight", "classifier.fine.bias"


class FedCDOptions(PluginOptions):
    """Options of FedCD; the defaults are the paper's for CIFAR-10."""

    fine_classes: int = Field(default=3, ge=1, description="M, fine-grained prototypes per class (section 3.2).")
    alpha: float = Field(
        default=0.1, ge=0, le=1, description="alpha of Eq. 4: weight of the same class's other prototypes."
    )
    temperature: float = Field(default=1.0, gt=0, description="tau of psi = exp(cos / tau) (Eq. 3).")
    gamma: float = Field(default=0.1, ge=0, description="gamma of Eq. 11: weight of L_bpr.")
    lambda_: float = Field(default=0.1, ge=0, alias="lambda", description="lambda of Eq. 11: weight of L_gid.")
    xi: float = Field(default=0.5, ge=0, description="xi of Eq. 8: weight of NCKD; 0.5 for 10 classes, 8 for many.")
    rebalance: Literal["appended", "averaged", "mixed", "none"] = Field(
        default="appended",
        description="How the global prototypes enter D^k+: a batch's loss is the sum of the samples' mean and the "
        "prototypes' mean, or their weighted mean; or they are shuffled among the samples (Algorithm 1 to the letter); "
        "or not.",
    )
    prototype_weight: float = Field(
        default=1.0, ge=0, description="Weight of the prototypes' mean beside the samples' (appended, averaged)."
    )
    kmeans: Literal["before", "after"] = Field(
        default="after",
        description="When k-means starts the prototypes of a class that has none: on the features before or after the "
        "client's local training. After it, they take no part in that round's losses.",
    )
    match: Literal["none", "hungarian"] = Field(
        default="none",
        description="Whether k-means centres of different clients are matched, each client's to the mean of those "
        "before it, before Eq. 1 averages them; ours, not the paper's. For at most 8 fine_classes.",
    )
    first_t: Literal[0, 1] = Field(
        default=0,
        description="t of the first round in mu = 1 - t/T; 1 is Algorithm 2's, whose last round has no L_dcl.",
    )
    W: Literal["sum", "mean", "probabilities"] = Field(
        default="sum",
        description="What W of Eq. 6 adds up: a class logit is the sum or the mean of its fine logits, or "
        "W adds up probabilities: it is their logsumexp.",
    )
    normalize: bool = Field(
        default=False,
        description="Scale z to unit length where the projection head ends, as FedProc's authors' code does; the "
        "paper does not.",
    )
    hpc: bool = Field(
        default=True, description="L_hpc; without it prototypes are feature means (FedCD-hpc of Table 4)."
    )
    bpr: bool = Field(default=True, description="L_bpr (FedCD-bpr of Table 4 without it).")
    gid: bool = Field(default=True, description="L_gid (FedCD-dkd of Table 4 without it).")
    acla: bool = Field(
        default=True, description="Adaptive class-level aggregation; without it the classifier is averaged."
    )
    distillation: Literal["dkd", "kl"] = Field(
        default="dkd", description="L_gid decoupled (Eq. 8), or plain KL (FedCD/kd)."
    )
    aggregation: Literal["adaptive", "count", "fedavg"] = Field(
        default="adaptive",
        description="Weights of class vectors: Eqs. 13 and 14, fine sample counts (FedCD/cla), or FedAvg's.",
    )

    @model_validator(mode="after")
    def _few_orders(self) -> FedCDOptions:
        if self.match == "hungarian" and self.fine_classes > MOST_MATCHED:
            raise ValueError(
                f"fine_classes: {self.fine_classes} is too many for match: hungarian, which tries all orders of a "
                f"class's prototypes; use at most {MOST_MATCHED}"
            )
        return self

    @model_validator(mode="after")
    def _a_loss_in_the_last_round(self) -> FedCDOptions:
        if self.first_t == 1 and not (self.hpc or (self.bpr and self.gamma) or (self.gid and self.lambda_)):
            raise ValueError(
                "first_t: 1 leaves the last round no loss without hpc, bpr and gid; use 0, or keep one of them"
            )
        return self


class FineClassifier(nn.Module):
    """phi and W of Eq. 6: C * M fine logits (index j = c * M + m), made C class logits.

    With W on probabilities softmax(class logits) = softmax(fine logits) W.
    """

    def __init__(self, width: int, num_classes: int, per_class: int, reduction: str) -> None:
        super().__init__()
        self.fine = nn.Linear(width, num_classes * per_class)
        self.shape, self.reduction = (num_classes, per_class), reduction

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, d) to class logits (B, C)."""
        fine: Tensor = self.fine(features).unflatten(1, self.shape)  # (B, C, M)
        if self.reduction == "probabilities":
            return fine.logsumexp(dim=2)
        return fine.sum(dim=2) if self.reduction == "sum" else fine.mean(dim=2)


class PrototypePoints(NamedTuple):
    """Global prototypes as samples: ``z`` (CM, d), ``labels``, ``fine`` and ``importance`` (CM,)."""

    z: Tensor
    labels: Tensor
    fine: Tensor
    importance: Tensor


class FedCD(Plugin[FedCDOptions]):
    """FedCD (Long, Xue, Chu, Zhang, Wu, Zang, Du, ACM MM 2023, doi 10.1145/3581783.3611966).

    Local objective (Eq. 11): mu * L_dcl + (1 - mu) * L_hpc + gamma * L_bpr + lambda * L_gid, mu = 1 - t/T. The server
    averages prototypes by fine counts (Eq. 1) and class vectors by their quality (Eqs. 12 to 15).
    """

    reads = ("global",)
    scales_task = True

    def __init__(self, options: FedCDOptions) -> None:
        super().__init__(options)
        self.adaptive = options.acla and options.aggregation != "fedavg"
        self.owns = ("classifier.*",) if self.adaptive else ()

    # --- both sides ----------------------------------------------------------------------------------------

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Project to z in R^256 and put the fine-grained classifier on it."""
        task.ensure_projection(model)
        task.reshape_classifier(self.name)
        if self.options.normalize:
            model.encoder.add_module("unit", UnitLength())
        with task.random("classifier"):
            model.classifier = FineClassifier(
                model.feature_dim, task.num_classes, self.options.fine_classes, self.options.W
            )

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Start P^k from P^g; classes without a global prototype start from k-means, now or in ``end_local``."""
        shape = (client.num_classes, self.options.fine_classes, client.model.feature_dim)
        start = torch.zeros(shape, device=client.device)
        known = torch.zeros(shape[:2], dtype=torch.bool, device=client.device)
        if client.received:
            start, known = client.received["prototypes"].clone(), client.received["counts"] > 0
        client.scratch.update(start=start, known=known)
        if self.options.kmeans == "before" and (new := self._without_prototype(client)):
            features, _, labels = client.forward()
            self._start_from_centres(client, new, features, labels)
        partners = torch.randint(client.n, shape[:2], generator=client.generator("mixed")).to(client.device)
        client.scratch.update(
            partners=partners,
            points=self._points_of(client.received),
            weights=eq.hierarchical_weights(known, self.options.alpha).to(start.dtype),
        )
        if self.options.hpc:
            client.add_parameters({"prototypes": start}, weight_decay=0.0)

    @hookimpl
    def task_loss(self, step: Step) -> Tensor:
        """Return L_dcl on the rebalanced set (Eq. 10)."""
        points = self._points(step)
        of_points = points and (step.model.classifier(points.z), points.labels)
        return self._mean(points, eq.debiased_classifier_loss, (step.logits, step.y), of_points)

    @hookimpl
    def local_loss(self, step: Step) -> list[Loss]:
        """Return L_hpc, L_bpr and L_gid with their weights in Eq. 11."""
        options = self.options
        mu = 1.0 - (step.round + options.first_t) / step.rounds
        hpc = self._hierarchical(step) if options.hpc else step.features.new_zeros(())
        losses = [Loss(hpc, weight=1.0 - mu if options.hpc else 0.0, task_scale=mu, name="hpc")]
        if options.bpr:
            bpr = eq.batch_prototype_loss(step.features, step.y, step.global_model.classifier, step.client.num_classes)
            losses.append(Loss(bpr, weight=options.gamma, name="bpr"))
        if options.gid:
            losses.append(Loss(self._distillation(step), weight=options.lambda_, name="gid"))
        return losses

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send P^k and the counts n^k_{c,m} of the final model's features (Eq. 2)."""
        start, known = client.scratch["start"], client.scratch["known"]
        features, _, labels = client.forward()
        new = self._without_prototype(client)
        self._start_from_centres(client, new, features, labels)
        fine = eq.assign_fine_classes(features, labels, start, known)
        if self.options.hpc:
            prototypes = client.added["prototypes"].detach()
            prototypes[new] = start[new]
        else:
            prototypes = eq.fine_means(features, labels, fine, start)
        return {"prototypes": prototypes, "counts": eq.fine_counts(labels, fine, known)}

    def _without_prototype(self, client: ClientContext) -> list[int]:
        """Return the client's classes without a prototype; none once they started from k-means."""
        known = client.scratch["known"].any(dim=1).tolist()
        return [c for c, n in enumerate(client.class_counts.tolist()) if n and not known[c]]

    def _start_from_centres(
        self, client: ClientContext, classes: Sequence[int], features: Tensor, labels: Tensor
    ) -> None:
        """Start the prototypes of some classes from the k-means centres of their features, and mark them as known."""
        start, known = client.scratch["start"], client.scratch["known"]
        for c in classes:
            seed = int(torch.randint(2**31, (), generator=client.generator(f"kmeans/{c}")))
            centres = eq.cluster_class(features[labels == c], self.options.fine_classes, seed)
            start[c, : len(centres)], known[c, : len(centres)] = centres, True

    def _hierarchical(self, step: Step) -> Tensor:
        scratch, points = step.client.scratch, self._points(step)
        fine = eq.assign_fine_classes(step.features, step.y, scratch["start"], scratch["known"])
        loss = partial(
            eq.hierarchical_prototype_loss,
            prototypes=step.added["prototypes"],
            alpha=self.options.alpha,
            temperature=self.options.temperature,
            known=scratch["known"],
            weights=scratch["weights"],
        )
        of_points = points and (points.z, points.labels, points.fine)
        return self._mean(points, loss, (step.features, step.y, fine), of_points)

    def _distillation(self, step: Step) -> Tensor:
        teacher, student, points = step.global_model.classifier, step.model.classifier, self._points(step)
        samples = (teacher(step.features.detach()), step.logits, step.y)
        of_points = points and (teacher(points.z), student(points.z), points.labels)
        if self.options.distillation == "kl":  # needs no labels
            return self._mean(points, eq.distillation_loss, samples[:2], of_points and of_points[:2])
        loss = partial(eq.decoupled_distillation_loss, xi=self.options.xi)
        return self._mean(points, loss, samples, of_points)

    def _points(self, step: Step) -> PrototypePoints | None:
        """Return the global prototypes in D^k+ of a batch; None without."""
        scratch = step.client.scratch
        points: PrototypePoints | None = scratch["points"]
        if points is None or self.options.rebalance != "mixed":
            return points
        # A prototype goes into the batch that holds its partner, a sample drawn once per round.
        partners = scratch["partners"].flatten().unsqueeze(1)  # (CM, 1)
        here = (partners == step.indices.to(partners.device)).any(dim=1)  # (CM,)
        return points._replace(importance=points.importance * here)

    def _points_of(self, received: Mapping[str, Tensor]) -> PrototypePoints | None:
        """Return the global prototypes as samples, those not known with importance 0; None without.

        Where they have a mean of their own (appended, averaged), their importance adds up to ``prototype_weight``.
        """
        mixed = self.options.rebalance == "mixed"
        left_out = not mixed and self.options.prototype_weight == 0
        if self.options.rebalance == "none" or left_out or not received:
            return None
        prototypes, counts = received["prototypes"], received["counts"]  # (C, M, d), (C, M)
        importance = counts.flatten()
        if not mixed:
            importance = self.options.prototype_weight * importance / importance.sum().clamp(min=1)
        index = torch.arange(counts.numel(), device=counts.device)
        per_class = counts.shape[1]
        return PrototypePoints(prototypes.flatten(0, 1), index // per_class, index % per_class, importance)

    def _mean(
        self,
        points: PrototypePoints | None,
        loss: Callable[..., Tensor],
        samples: Sequence[Tensor],
        of_points: Sequence[Tensor] | None,
    ) -> Tensor:
        """Return a loss over D^k+: the batch's samples with importance 1, the prototypes with theirs."""
        if points is None or of_points is None:
            return loss(*samples)
        joined = [torch.cat(pair) for pair in zip(samples, of_points, strict=True)]
        # Where they are not mixed: the samples' mean and the prototypes', each with its own divisor.
        each = 1.0 if self.options.rebalance == "mixed" else 1.0 / len(samples[0])
        importance = torch.cat([points.importance.new_full((len(samples[0]),), each), points.importance])
        mean = loss(*joined, importance=importance)
        # The sum keeps the samples' gradient whole; one divisor, as in Eqs. 5, 9 and 10, shortens their steps.
        return mean * importance.sum() if self.options.rebalance == "appended" else mean

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor] | None:
        """Send P^g and its counts; a count of 0 is a prototype that is not known."""
        if "prototypes" not in server.state:
            return None
        return {"prototypes": server.state["prototypes"], "counts": server.state["counts"]}

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add n^k_{c,m} P^k_{c,m} and n^k_{c,m} to the sums of Eq. 1."""
        shape = (server.num_classes, self.options.fine_classes)
        expected = {"prototypes": ((*shape, server.feature_dim), None), "counts": (shape, torch.int64)}
        check_tensors(update.payload, expected)
        counts = update.payload["counts"]  # (C, M)
        numbers: list[int] = counts.flatten().tolist()
        if min(numbers) < 0:
            raise ValueError(f"'counts' holds {min(numbers)}, expected no number below 0")
        samples = int(server.client_sizes[update.client])
        if sum(numbers) > samples:
            raise ValueError(
                f"'counts' add up to {sum(numbers)}, expected at most the client's {samples} training samples"
            )
        prototypes = update.payload.pop("prototypes")  # (C, M, d)
        if self.options.match == "hungarian" and "total" in server.state:
            prototypes, counts = self._matched(server, prototypes, counts)
            update.payload["counts"] = counts
        server.state.add("sum", counts.unsqueeze(2) * prototypes.double())
        server.state["total"] = server.state["total"] + counts if "total" in server.state else counts

    def _matched(self, server: ServerContext, prototypes: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return a client's first centres of a class, with their counts, in the order of the mean of those before."""
        total = server.state["total"]  # (C, M)
        means = server.state["sum"] / total.clamp(min=1).unsqueeze(2)
        without = ~server.state.get("counts", torch.zeros_like(total)).any(dim=1)  # classes that have no P^g
        prototypes, counts = prototypes.clone(), counts.clone()
        for c in torch.nonzero(without & total.any(dim=1) & counts.any(dim=1)).flatten().tolist():
            order = eq.matched_order(prototypes[c], counts[c] > 0, means[c], total[c] > 0)
            prototypes[c], counts[c] = prototypes[c, order], counts[c, order]
        return prototypes, counts

    @hookimpl
    def aggregate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> Mapping[str, Tensor]:
        """Weigh the clients' class vectors by what they make of the renewed P^g (Eqs. 12 to 15)."""
        prototypes, counts = self._global_prototypes(server)
        weights = torch.stack([update.model[WEIGHT].double() for update in updates])  # (K, CM, d)
        biases = torch.stack([update.model[BIAS].double() for update in updates])  # (K, CM)
        samples = torch.tensor([update.samples for update in updates], dtype=torch.float64)
        fedavg = (samples / samples.sum()).expand(biases.shape[1], -1)  # (CM, K)
        if self.options.aggregation == "adaptive":
            known = counts.flatten() > 0  # (CM,)
            shares = eq.class_vector_weights(weights, biases, prototypes.flatten(0, 1).double())
        else:
            fine = torch.stack([update.payload["counts"].flatten().double() for update in updates], dim=1)  # (CM, K)
            known = fine.sum(dim=1) > 0
            shares = fine / fine.sum(dim=1, keepdim=True).clamp(min=1)
        shares = torch.where(known.unsqueeze(1), shares, fedavg)  # (CM, K)
        return {
            WEIGHT: torch.einsum("jk,kjd->jd", shares, weights).to(updates[0].model[WEIGHT].dtype),
            BIAS: torch.einsum("jk,kj->j", shares, biases).to(updates[0].model[BIAS].dtype),
        }

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Renew P^g (Eq. 1)."""
        prototypes, counts = self._global_prototypes(server)
        del server.state["total"], server.state["sum"]
        server.state["prototypes"], server.state["counts"] = prototypes, counts

    def _global_prototypes(self, server: ServerContext) -> tuple[Tensor, Tensor]:
        """Return P^g and its counts after this round; what no client of the cohort has keeps its previous value."""
        total, sums = server.state["total"], server.state["sum"]
        held = total > 0
        prototypes, counts = (sums / total.clamp(min=1).unsqueeze(2)).float(), total
        if "prototypes" in server.state:
            prototypes = torch.where(held.unsqueeze(2), prototypes, server.state["prototypes"])
            counts = torch.where(held, total, server.state["counts"])
        return prototypes, counts
