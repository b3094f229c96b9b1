"""The plugin: k models on the server, one of them trained by each client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    ConfigError,
    Plugin,
    PluginOptions,
    RunSetup,
    ServerContext,
    SplitModel,
    Tensors,
    check_tensors,
    hookimpl,
)
from fedcore_ifca import equations as eq

UPDATES = "updates"
"""The number of updates of each theta_j so far, in the server's state."""


class IFCAOptions(PluginOptions):
    """Options of IFCA."""

    clusters: int = Field(default=2, ge=1, le=64, description="k: number of models; 1 is FedAvg.")


class IFCA(Plugin[IFCAOptions]):
    """IFCA (Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020, arXiv 2006.04088), Algorithm 1, model averaging.

    The server sends k models; client i trains the one whose loss on its samples is the least, and theta_j becomes the
    mean of the models that were trained from it. theta_0 is the run's global model.
    """

    neutral = {"clusters": 1}
    owns = ("*",)
    starts = ("*",)
    assumes = ("cross-entropy",)  # the cluster is chosen by it

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse spectral normalisation: theta_1 to theta_{k-1} would have the singular vectors of other weights."""
        buffers = setup.layout.buffers.intersection(setup.layout.shared)
        vectors = sorted(name for name in buffers if name.endswith("_u") and f"{name[:-1]}v" in buffers)
        if vectors and self.options.clusters > 1:
            raise ConfigError(
                f"plugin {self.name!r}: {vectors[0]!r} is of spectral normalisation, which keeps singular vectors of "
                "the weights. Those of a redrawn model are others, so that its loss is far too large and no client "
                "chooses it; use a model without this normalisation"
            )

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Draw theta_1 to theta_{k-1} if there are none; a round without updates does not keep them. theta_0 is w_0."""
        if server.state:
            return
        for j in range(1, self.options.clusters):
            stream, drawn = server.generator(f"cluster-{j}"), set(server.trainable)
            for name in server.shared:
                w = server.model[name]
                server.state[f"{j}:{name}"] = eq.redrawn(w, stream) if name in drawn else w

    @hookimpl
    def broadcast(self, server: ServerContext) -> Tensors:
        """Send theta_1 to theta_{k-1}; theta_0 is the model that all get."""
        return {key: w for key, w in server.state.items() if key != UPDATES}

    @hookimpl
    def begin_local(self, client: ClientContext) -> Tensors:
        """Estimate the cluster, and start from its model."""
        client.scratch["cluster"] = self._fitted(client)[0]
        return _theta(client, client.scratch["cluster"])

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send the cluster, s_i."""
        return {"cluster": torch.tensor(client.scratch["cluster"])}

    @hookimpl
    def accumulate(self, update: ClientUpdate) -> None:
        """Refuse an answer that is no number. One outside of the clusters, as of local noise, counts as the nearest."""
        check_tensors(update.payload, {"cluster": ((), torch.int64)})
        update.payload["cluster"] = update.payload["cluster"].clamp(0, self.options.clusters - 1)

    @hookimpl
    def aggregate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> Tensors:
        """Take each cluster's mean; a cluster without clients keeps its model."""
        first: Tensors = {}
        counts = server.state.get(UPDATES, [0] * self.options.clusters)
        for j in range(self.options.clusters):
            group = [u for u in updates if int(u.payload["cluster"]) == j]
            counts[j] += len(group)
            mean = server.mean_of(group)
            if j == 0:
                first = mean or {name: server.model[name] for name in server.shared}
            else:
                server.state.update({f"{j}:{name}": tensor for name, tensor in mean.items()})
        server.state[UPDATES] = counts
        if 0 in counts and server.round + 1 == server.rounds:
            idle = ", ".join(f"theta_{j}" for j, count in enumerate(counts) if count == 0)
            server.note(f"no client chose {idle} in any round; another --seed draws other initial models")
        return first

    @hookimpl
    def report(self, server: ServerContext) -> dict[str, list[int]] | None:
        """Report how many updates each theta_j had so far."""
        return {UPDATES: server.state[UPDATES]} if UPDATES in server.state else None

    @hookimpl
    def personal_model(self, client: ClientContext) -> SplitModel:
        """Evaluate the model of the cluster that fits the client's training part best."""
        return self._fitted(client)[1]

    def _fitted(self, client: ClientContext) -> tuple[int, SplitModel]:
        """Return the cluster of least loss over the client's training part, and its model."""
        losses = []
        for j in range(self.options.clusters if client.received else 1):
            _, logits, labels = client.forward(model=client.network(_theta(client, j)))
            losses.append(float(client.task.loss(logits.double(), labels)))
        best, drawn = eq.best_clusters(losses), 0
        if len(best) > 1:  # adapters that start at 0: as functions all theta_j are the same at first
            drawn = int(torch.randint(len(best), (), generator=client.generator("ifca/equals")))
        return best[drawn], client.network(_theta(client, best[drawn]))


def _theta(client: ClientContext, j: int) -> Tensors:
    """Return theta_j as received; empty for theta_0, which is the model that the client has."""
    return {key.partition(":")[2]: w for key, w in client.received.items() if key.startswith(f"{j}:")}
