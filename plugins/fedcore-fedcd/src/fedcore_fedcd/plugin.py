"""The FedCD plugin: its hooks, with the equations that each computes, and its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from pydantic import Field
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
from fedcore_functional import FeatureOptions, check_counts, check_means, check_moves

WEIGHT, BIAS = "classifier.fine.weight", "classifier.fine.bias"


class FedCDOptions(FeatureOptions):
    """Options of FedCD; the defaults are the paper's for CIFAR-10."""

    fine_classes: int = Field(default=3, ge=1, description="M, fine-grained prototypes per class (section 3.2).")
    alpha: float = Field(default=0.1, ge=0, le=1, description="alpha of Eq. 4: weight of a class's other prototypes.")
    temperature: float = Field(default=1.0, gt=0, description="tau of psi = exp(cos / tau) (Eq. 3).")
    gamma: float = Field(default=0.1, ge=0, description="gamma of Eq. 11: weight of L_bpr.")
    lambda_: float = Field(default=0.1, ge=0, alias="lambda", description="lambda of Eq. 11: weight of L_gid.")
    xi: float = Field(default=0.5, ge=0, description="xi of Eq. 8: weight of NCKD; 0.5 for 10 classes, 8 for many.")
    bound_moves: bool = Field(
        default=True,
        description="Refuse prototypes that moved further than SGD can move them. false: for the noise of local-dp.",
    )


class FedCD(Plugin[FedCDOptions]):
    """FedCD (Long, Xue, Chu, Zhang, Wu, Zang, Du, ACM MM 2023, doi 10.1145/3581783.3611966).

    The local objective is mu * L_dcl + (1 - mu) * L_hpc + gamma * L_bpr + lambda * L_gid, mu = 1 - t/T (Eq. 11). The
    server averages prototypes by fine counts (Eq. 1) and class vectors by their quality (Eqs. 12 to 15).
    """

    means_of_hpc = 2.0
    """The weights that L_hpc's means have together: the samples' has 1, the prototypes' has 1."""
    owns: tuple[str, ...] = ("classifier.*",)
    reads = ("global",)
    assumes = ("rounds", "classes")
    scales_task = True

    # --- both sides ----------------------------------------------------------------------------------------

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Project to z in R^256 and put the fine-grained classifier on it."""
        task.ensure_projection(model)
        task.reshape_classifier(self.name)
        with task.random("classifier"):
            model.classifier = self._classifier(model.feature_dim, task.num_classes)

    def _classifier(self, width: int, num_classes: int) -> eq.FineClassifier:
        """Return D and W (Eq. 6)."""
        return eq.FineClassifier(width, num_classes, self.options.fine_classes)

    def _t(self, round: int) -> int:
        """Return t of a round in mu = 1 - t/T (Eq. 11)."""
        return round

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Start P^k from P^g. A class without a global prototype has none until ``end_local``."""
        start, known = self._start(client)
        weights = eq.hierarchical_weights(known, self.options.alpha).to(start.dtype)
        client.scratch.update(start=start, known=known, weights=weights, points=self._points(client))
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
        mu = 1.0 - self._t(step.round) / step.rounds
        bpr = partial(eq.batch_prototype_loss, step.features, step.y, global_classifier, step.client.num_classes)

        def gid() -> Tensor:
            teacher = batch.logits(global_classifier(step.features.detach()), global_classifier)
            student = batch.logits(step.logits, step.model.classifier)
            return batch.mean(self._distillation(teacher, student, batch.labels))

        return [
            Loss(partial(self._hierarchical, step, batch), weight=self._weight_of_hpc(mu), task_scale=mu, name="hpc"),
            Loss(bpr, weight=options.gamma, name="bpr"),
            Loss(gid, weight=options.lambda_, name="gid"),
        ]

    def _weight_of_hpc(self, mu: float) -> float:
        """Return the weight of L_hpc in Eq. 11."""
        return 1.0 - mu

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send P^k and the counts n^k_{c,m} of the final model's features (Eq. 2)."""
        start, known, prototypes = client.scratch["start"], client.scratch["known"], client.added["prototypes"].detach()
        features, labels, new = self._start_from_centres(client, start, known)
        if new:
            prototypes[new] = start[new]
        fine = eq.assign_fine_classes(features, labels, start, known)
        return {"prototypes": prototypes, "counts": eq.fine_counts(labels, fine, known)}

    def _start(self, client: ClientContext) -> tuple[Tensor, Tensor]:
        """Return what P^k (C, M, d) starts from, and which prototypes there are, (C, M) bool."""
        shape = (client.num_classes, self.options.fine_classes, client.model.feature_dim)
        start = client.received.get("prototypes", torch.zeros(shape, device=client.device))
        counts = client.received.get("counts", torch.zeros(shape[:2], device=client.device))
        return start.to(dtype_of(client), copy=True), counts > 0

    def _points(self, client: ClientContext) -> eq.Points:
        """Return P^g as samples, whose importances add up to 1; none in a round without P^g."""
        if not client.received:
            return eq.no_points(client.model.feature_dim, client.device)
        counts = client.received["counts"]
        prototypes = client.received["prototypes"].to(dtype_of(client))
        return eq.points_of(prototypes, counts / counts.sum().clamp(min=1))

    def _rebalanced(self, step: Step) -> eq.Rebalanced:
        """Return D^k+ of the batch."""
        return eq.appended(step.y, step.client.scratch["points"])

    def _hierarchical(self, step: Step, batch: eq.Rebalanced) -> Tensor:
        """Return L_hpc (Eqs. 2 to 5)."""
        start, known, weights = (step.client.scratch[name] for name in ("start", "known", "weights"))
        fine = eq.assign_fine_classes(step.features, step.y, start, known)
        z, fine = batch.join(step.features, batch.points.features), batch.join(fine, batch.points.fine)
        prototypes, tau = step.added["prototypes"], self.options.temperature
        each = eq.hierarchical_contrast(z, batch.labels, fine, prototypes, known, weights, tau)
        return batch.mean(each)

    def _distillation(self, teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        """Return L_gid of each sample (Eq. 8), (N,)."""
        return eq.decoupled_distillation(teacher, student, labels, xi=self.options.xi)

    def _start_from_centres(
        self, client: ClientContext, start: Tensor, known: Tensor
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Start the prototypes of the client's classes that have none from the k-means centres of their features.

        :param start: P^k (C, M, d), and ``known`` (C, M) bool; both are changed in place.
        :returns: all features and labels, and the classes that had no prototype.
        """
        features, _, labels = client.forward()
        if known.any(dim=1).all():  # as in most rounds: nothing depends on the client's classes
            return features, labels, []
        new = torch.nonzero((client.class_counts > 0) & ~known.any(dim=1)).flatten().tolist()
        for c in new:
            seed = int(torch.randint(2**31, (), generator=client.generator(f"kmeans/{c}")))
            centres = eq.cluster_class(features[labels == c], self.options.fine_classes, seed)
            start[c, : len(centres)], known[c, : len(centres)] = centres, True
        return features, labels, new

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse ``bound_moves`` next to a plugin that changes all that clients send (local-dp)."""
        for other in setup.plugins.implementers("guard_upload") if self.options.bound_moves else ():
            reason = f"{other.name!r} moves prototypes further than training. Use --set {self.name}.bound_moves=false"
            raise PluginConflictError.of(self.name, other.name, reason)

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor]:
        """Send P^g and its counts, nothing in the first round. A count of 0 is a prototype that is not known."""
        return {name: server.state[name] for name in ("prototypes", "counts") if name in server.state}

    @hookimpl
    def accumulate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> None:
        """Add n^k_{c,m} P^k_{c,m} and n^k_{c,m} to the sums of Eq. 1."""
        shape = (server.num_classes, self.options.fine_classes)
        expected = {"prototypes": ((*shape, server.feature_dim), None), "counts": (shape, torch.int64)}
        for update in updates:
            check_tensors(update.payload, expected)
            check_counts(update.payload["counts"], int(server.client_sizes[update.client]))
        prototypes = torch.stack([update.payload["prototypes"] for update in updates])  # (K, C, M, d)
        counts = torch.stack([update.payload["counts"] for update in updates])  # (K, C, M)
        held, known = counts > 0, server.state.get("counts", torch.zeros(shape)) > 0
        self._check_first(prototypes[held & ~known])
        self._check_trained(server, prototypes, held & known, torch.tensor([update.steps for update in updates]))
        self._add(server, updates, prototypes, counts)
        for update in updates:
            del update.payload["prototypes"]  # of no use to "aggregate"

    def _check_first(self, prototypes: Tensor) -> None:
        """Refuse first prototypes (n, d) that are no means of features."""
        check_means("prototypes", prototypes, self.options.narrowed())

    def _check_trained(self, server: ServerContext, sent: Tensor, trained: Tensor, steps: Tensor) -> None:
        """Refuse P^k (K, C, M, d) that SGD cannot have moved there from P^g, where ``trained`` (K, C, M) is True.

        :param steps: the clients' numbers of steps, (K,).
        """
        if self.options.bound_moves and trained.any():
            weight = self._t(server.round) / server.rounds * self.means_of_hpc
            start, tau = server.state["prototypes"].expand_as(sent)[trained], self.options.temperature
            steps = steps.view(-1, 1, 1).expand_as(trained)[trained]
            check_moves("prototypes", sent[trained], start, server, steps=steps, weight=weight, temperature=tau)

    def _add(self, server: ServerContext, updates: Sequence[ClientUpdate], prototypes: Tensor, counts: Tensor) -> None:
        """Add clients' prototypes (K, C, M, d) and counts (K, C, M) to the sums of Eq. 1, one after the other."""
        for weighted in counts.unsqueeze(3) * prototypes.double():
            server.state.add("sum", weighted)
        server.state["total"] = counts.sum(dim=0) + server.state.get("total", 0)

    @hookimpl
    def aggregate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> Mapping[str, Tensor]:
        """Weigh the clients' class vectors by how well they recognise the renewed P^g (Eqs. 12 to 15)."""
        vectors = {name: torch.stack([update.model[name].double() for update in updates]) for name in (WEIGHT, BIAS)}
        shares, known = self._shares(server, updates, vectors)
        samples = torch.tensor([update.samples for update in updates], dtype=torch.float64)
        shares = torch.where(known.unsqueeze(1), shares, samples / samples.sum())  # (CM, K); FedAvg's if not known
        means = {name: eq.aggregate_class_vectors(shares, vectors[name]) for name in vectors}
        return {name: mean.to(updates[0].model[name].dtype) for name, mean in means.items()}

    def _shares(
        self, server: ServerContext, updates: Sequence[ClientUpdate], vectors: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return v^j[k] (CM, K) of Eq. 14, and for which class vectors it is known, (CM,) bool.

        :param vectors: the clients' class vectors (K, CM, d) and biases (K, CM) by name.
        """
        prototypes, counts = self._global_prototypes(server)
        shares = eq.class_vector_weights(vectors[WEIGHT], vectors[BIAS], prototypes.flatten(0, 1).double())
        return shares, counts.flatten() > 0

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


def dtype_of(client: ClientContext) -> torch.dtype:
    """Return the dtype of the model's features. The mean of prototypes is float32."""
    return next(client.model.classifier.parameters()).dtype
