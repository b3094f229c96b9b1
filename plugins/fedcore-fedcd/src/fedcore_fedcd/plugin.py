"""The FedCD plugin: what is computed in which hook, and what travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from fedcore import (
    ClientContext,
    ClientUpdate,
    Loss,
    ModelTask,
    Plugin,
    PluginConflictError,
    RunSetup,
    ServerContext,
    SplitModel,
    Step,
    check_tensors,
    hookimpl,
)
from fedcore_fedcd import equations as eq
from fedcore_functional import SLACK, FeatureOptions, FeatureRange, UnitLength, check_counts, check_means

WEIGHT, BIAS = "classifier.fine.weight", "classifier.fine.bias"


class FedCDOptions(FeatureOptions):
    """Options of FedCD; the defaults are the paper's for CIFAR-10."""

    fine_classes: int = Field(default=3, ge=1, description="M, fine-grained prototypes per class (section 3.2).")
    alpha: float = Field(
        default=0.1, ge=0, le=1, description="alpha of Eq. 4: weight of the other prototypes of the same class."
    )
    temperature: float = Field(default=1.0, gt=0, description="tau of psi = exp(cos / tau) (Eq. 3).")
    gamma: float = Field(default=0.1, ge=0, description="gamma of Eq. 11: weight of L_bpr.")
    lambda_: float = Field(default=0.1, ge=0, alias="lambda", description="lambda of Eq. 11: weight of L_gid.")
    xi: float = Field(default=0.5, ge=0, description="xi of Eq. 8: weight of NCKD; 0.5 for 10 classes, 8 for many.")
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
    bound_moves: bool = Field(
        default=True,
        description="Refuse prototypes that moved further than SGD can move them. false: for the noise of local-dp.",
    )
    hpc: bool = Field(default=True, description="L_hpc; false: prototypes are feature means (FedCD-hpc of Table 4).")
    bpr: bool = Field(default=True, description="L_bpr; false: FedCD-bpr of Table 4.")
    gid: bool = Field(default=True, description="L_gid; false: FedCD-dkd of Table 4.")
    distillation: Literal["dkd", "kl"] = Field(
        default="dkd", description="L_gid decoupled (Eq. 8), or plain KL (FedCD/kd of Table 4)."
    )
    aggregation: Literal["adaptive", "count", "fedavg"] = Field(
        default="adaptive",
        description="Weights of class vectors. adaptive: Eqs. 13 and 14. count: fine sample counts (FedCD/cla of "
        "Table 4). fedavg: the clients' sample counts (FedCD-acla).",
    )

    @model_validator(mode="after")
    def _a_loss_in_the_last_round(self) -> FedCDOptions:
        if self.first_t == 1 and not (self.hpc or (self.bpr and self.gamma) or (self.gid and self.lambda_)):
            raise ValueError(
                "first_t: 1 leaves the last round no loss without hpc, bpr and gid; use 0, or keep one of them"
            )
        return self


class FedCD(Plugin[FedCDOptions]):
    """FedCD (Long, Xue, Chu, Zhang, Wu, Zang, Du, ACM MM 2023, doi 10.1145/3581783.3611966).

    The local objective is mu * L_dcl + (1 - mu) * L_hpc + gamma * L_bpr + lambda * L_gid, mu = 1 - t/T (Eq. 11). The
    server averages prototypes by fine counts (Eq. 1) and class vectors by their quality (Eqs. 12 to 15).
    """

    reads = ("global",)
    assumes = ("rounds",)
    scales_task = True

    def __init__(self, options: FedCDOptions) -> None:
        super().__init__(options)
        self.owns = () if options.aggregation == "fedavg" else ("classifier.*",)

    # --- both sides ----------------------------------------------------------------------------------------

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Project to z in R^256 and put the fine-grained classifier on it."""
        task.ensure_projection(model)
        task.reshape_classifier(self.name)
        if self.options.normalize:
            model.encoder.add_module("unit", UnitLength())
        with task.random("classifier"):
            model.classifier = eq.FineClassifier(
                model.feature_dim, task.num_classes, self.options.fine_classes, self.options.W
            )

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Start P^k from P^g; classes without a global prototype start from k-means, here or in ``end_local``."""
        shape = (client.num_classes, self.options.fine_classes, client.model.feature_dim)
        start = torch.zeros(shape, device=client.device)
        counts = torch.zeros(shape[:2], dtype=torch.int64, device=client.device)
        if client.received:
            start, counts = client.received["prototypes"].clone(), client.received["counts"]
        known = counts > 0
        client.scratch.update(start=start, known=known, points=self._points(client, start, counts))
        if self.options.kmeans == "before" and (new := self._without_prototype(client)):
            features, _, labels = client.forward()
            self._start_from_centres(client, new, features, labels)
        client.scratch["weights"] = eq.hierarchical_weights(known, self.options.alpha).to(start.dtype)
        if self.options.hpc:
            client.add_parameters({"prototypes": start}, weight_decay=0.0)

    @hookimpl
    def task_loss(self, step: Step) -> Tensor:
        """Return L_dcl, the cross-entropy on D^k+ (Eq. 10)."""
        batch = self._rebalanced(step)
        logits = batch.logits(step.logits, step.model.classifier)
        return batch.mean(F.cross_entropy(logits, batch.labels, reduction="none"))

    @hookimpl
    def local_loss(self, step: Step) -> list[Loss]:
        """Return L_hpc, L_bpr and L_gid with their weights in Eq. 11."""
        options, batch, global_classifier = self.options, self._rebalanced(step), step.global_model.classifier
        mu = 1.0 - (step.round + options.first_t) / step.rounds
        hpc = self._hierarchical(step, batch) if options.hpc else step.features.new_zeros(())
        losses = [Loss(hpc, weight=1.0 - mu if options.hpc else 0.0, task_scale=mu, name="hpc")]
        if options.bpr:
            bpr = eq.batch_prototype_loss(step.features, step.y, global_classifier, step.client.num_classes)
            losses.append(Loss(bpr, weight=options.gamma, name="bpr"))
        if options.gid:
            teacher = batch.logits(global_classifier(step.features.detach()), global_classifier)
            student = batch.logits(step.logits, step.model.classifier)
            if options.distillation == "dkd":
                gid = eq.decoupled_distillation(teacher, student, batch.labels, xi=options.xi)
            else:
                gid = eq.distillation(teacher, student)
            losses.append(Loss(batch.mean(gid), weight=options.lambda_, name="gid"))
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

    def _points(self, client: ClientContext, prototypes: Tensor, counts: Tensor) -> eq.Points:
        """Return P^g as samples: empty in a round without P^g, and where the options leave it out."""
        options = self.options
        mixed = options.rebalance == "mixed"
        partners = torch.randint(client.n, counts.shape, generator=client.generator("mixed")).to(client.device)
        # Prototypes that are not mixed have a mean of their own: their importance adds up to its weight.
        importance = counts if mixed else options.prototype_weight * counts / counts.sum().clamp(min=1)
        points = eq.points_of(prototypes, importance.float(), partners)
        used = client.received and options.rebalance != "none" and (mixed or options.prototype_weight > 0)
        return points if used else eq.Points(*(tensor[:0] for tensor in points))

    def _without_prototype(self, client: ClientContext) -> list[int]:
        """Return the classes that the client holds and that have no prototype yet."""
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

    def _rebalanced(self, step: Step) -> eq.Rebalanced:
        """Return D^k+ of the batch."""
        points: eq.Points = step.client.scratch["points"]
        size, mode = len(step.y), self.options.rebalance if len(points.labels) else "none"
        of_points = points.importance
        if mode == "mixed":
            here = points.partners.unsqueeze(1) == step.indices.to(points.partners.device)  # (P, B)
            of_points = of_points * here.any(dim=1)
        each = 1.0 / size if mode in ("appended", "averaged") else 1.0
        importance = torch.cat([of_points.new_full((size,), each), of_points])
        return eq.Rebalanced(points, torch.cat([step.y, points.labels]), importance, summed=mode == "appended")

    def _hierarchical(self, step: Step, batch: eq.Rebalanced) -> Tensor:
        """Return L_hpc (Eqs. 2 to 5)."""
        scratch, points = step.client.scratch, batch.points
        fine = eq.assign_fine_classes(step.features, step.y, scratch["start"], scratch["known"])
        each = eq.hierarchical_contrast(
            batch.join(step.features, points.features),
            batch.labels,
            batch.join(fine, points.fine),
            step.added["prototypes"],
            scratch["known"],
            scratch["weights"],
            temperature=self.options.temperature,
        )
        return batch.mean(each)

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse ``bound_moves`` next to a plugin that changes all that clients send (local-dp)."""
        for other in setup.plugins.implementers("guard_upload") if self.options.bound_moves else ():
            reason = f"{other.name!r} changes prototypes by more than training does. Use --set fedcd.bound_moves=false"
            raise PluginConflictError.of(self.name, other.name, reason)

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
        check_counts(counts, int(server.client_sizes[update.client]))
        prototypes = update.payload.pop("prototypes")  # (C, M, d)
        self._check_prototypes(server, prototypes, counts > 0, update.steps)
        if self.options.match == "hungarian" and "total" in server.state:
            prototypes, counts = self._matched(server, prototypes, counts)
            update.payload["counts"] = counts
        server.state.add("sum", counts.unsqueeze(2) * prototypes.double())
        server.state["total"] = server.state["total"] + counts if "total" in server.state else counts

    def _check_prototypes(self, server: ServerContext, sent: Tensor, held: Tensor, steps: int) -> None:
        """Refuse P^k (C, M, d) that no training gives from P^g, and new ones that are no means of features.

        :raises ValueError: names the finding and the bound.
        """
        options = self.options
        known = server.state["counts"] > 0 if options.hpc and "counts" in server.state else torch.zeros_like(held)
        trained = held & known
        # With kmeans=before new prototypes are trained, too, and may be longer than any feature.
        means = held & ~known if options.kmeans == "after" or not options.hpc else torch.zeros_like(held)
        within = options.narrowed(FeatureRange(1.0) if options.normalize else FeatureRange())
        check_means("prototypes", sent[means], within)
        if not options.bound_moves or not trained.any() or server.config.optimizer != "sgd":
            return
        summed = options.rebalance == "appended"
        weight = (server.round + options.first_t) / server.rounds * (1 + options.prototype_weight * summed)
        start = server.state["prototypes"].double()[trained]  # (known, d)
        most = eq.largest_move(
            start,
            weight=weight,
            temperature=options.temperature,
            lr=server.lr,
            momentum=server.config.momentum,
            steps=steps,
        )
        moved = (sent.double()[trained] - start).norm(dim=1)  # (known,)
        over = moved > SLACK * most + 1e-3 * start.norm(dim=1)  # single precision rounds in every step
        if over.any():
            raise ValueError(
                f"'prototypes' moved {float(moved[over][0]):.3g} from P^g, but {steps} steps of SGD move at most "
                f"{float(most[over][0]):.3g}"
            )

    def _matched(self, server: ServerContext, prototypes: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return a client's first centres and their counts in the order of the mean of the clients before."""
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
        """Weigh the clients' class vectors by how well they recognise the renewed P^g (Eqs. 12 to 15)."""
        prototypes, counts = self._global_prototypes(server)
        weights = torch.stack([update.model[WEIGHT].double() for update in updates])  # (K, CM, d)
        biases = torch.stack([update.model[BIAS].double() for update in updates])  # (K, CM)
        if self.options.aggregation == "adaptive":
            known = counts.flatten() > 0  # (CM,)
            shares = eq.class_vector_weights(weights, biases, prototypes.flatten(0, 1).double())
        else:
            fine = torch.stack([update.payload["counts"].flatten().double() for update in updates], dim=1)  # (CM, K)
            known = fine.sum(dim=1) > 0
            shares = fine / fine.sum(dim=1, keepdim=True).clamp(min=1)
        samples = torch.tensor([update.samples for update in updates], dtype=torch.float64)
        shares = torch.where(known.unsqueeze(1), shares, samples / samples.sum())  # (CM, K); FedAvg's if not known
        model = updates[0].model
        return {
            WEIGHT: eq.aggregate_class_vectors(shares, weights).to(model[WEIGHT].dtype),
            BIAS: eq.aggregate_class_vectors(shares, biases).to(model[BIAS].dtype),
        }

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Renew P^g (Eq. 1)."""
        prototypes, counts = self._global_prototypes(server)
        del server.state["total"], server.state["sum"]
        server.state["prototypes"], server.state["counts"] = prototypes, counts

    def _global_prototypes(self, server: ServerContext) -> tuple[Tensor, Tensor]:
        """Return P^g and its counts after this round."""
        sums, totals = server.state["sum"], server.state["total"]
        prototypes = server.state.get("prototypes", torch.zeros(sums.shape))
        return eq.global_prototypes(sums, totals, prototypes, server.state.get("counts", torch.zeros_like(totals)))
