"""The plugin: a loss from every client, the weights of the mean, one step of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, ClientUpdate, Plugin, PluginOptions, ServerContext, check_tensors, hookimpl
from fedcore_functional import effective_steps, mean_loss
from fedcore_qffl import equations as eq

SUMS = "sums"
"""One round's sums [n_k, n_k eta A(K_k), n_k F_k^q, n_k times the bend]."""


class QFedAvgOptions(PluginOptions):
    """Options of q-FedAvg."""

    q: float = Field(default=1.0, ge=0, le=50, description="q of the objective (Eq. 2): larger is fairer; 0 is FedAvg.")
    lipschitz: float | None = Field(default=None, gt=0, description="L: estimate of the gradients' Lipschitz constant.")
    step: Literal["work", "rate"] = Field(
        default="work",
        description="1 / L without lipschitz: the local work, eta times the mean effective number of steps, or eta "
        "alone (the authors' code).",
    )
    weighting: Literal["samples", "uniform"] = Field(
        default="samples",
        description="How clients count in both sums: by samples n_k, or all the same (the authors' code).",
    )


class QFedAvg(Plugin[QFedAvgOptions]):
    """q-FedAvg (Li, Sanjabi, Beirami, Smith, ICLR 2020, arXiv 1905.10497), Algorithm 2.

    It minimises sum_k p_k F_k^(q+1) / (q+1): w_{t+1} = w_t - sum_k F_k^q Delta w_k / sum_k h_k, Delta w_k = L (w_t -
    y_k). A client's movement counts by its loss at w_t, and the step shrinks by the curvature that q adds.
    """

    neutral = {"q": 0.0}
    server_optimizer = True
    # After an exchange w_t - y_k is partly another's work; Delta w_k is a gradient by eta and the number of steps.
    assumes = ("displacement", "sgd")

    def __init__(self, options: QFedAvgOptions) -> None:
        super().__init__(options)
        self.reads_steps = options.step == "work" and options.lipschitz is None  # for local-dp, which hides them

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Take F_k(w_t), the mean task loss over the client's training part, in batches as in training."""
        if self.options.q > 0:
            _, logits, labels = client.forward()
            client.scratch["loss"] = mean_loss(client.task.loss, logits, labels, client.config.batch_size)

    @hookimpl
    def end_local(self, client: ClientContext) -> dict[str, Tensor]:
        """Send F_k(w_t)."""
        return {"loss": client.scratch["loss"]} if self.options.q > 0 else {}

    @hookimpl
    def weight(self, update: ClientUpdate) -> float:
        """Weigh y_k by F_k^q, times n_k unless all clients count the same."""
        return self._count(update) * eq.fair_weight(self._loss(update), self.options.q)

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add to the sums of F_k^q and of h_k's first part."""
        loss, q, n = self._loss(update), self.options.q, self._count(update)
        moved = sum(
            float((server.model[w].double() - update.model[w].double()).square().sum()) for w in server.trainable
        )
        work = update.lr * (effective_steps(update.steps, update.momentum) if self.options.step == "work" else 1.0)
        new = [n, n * work, n * eq.fair_weight(loss, q), n * eq.bend(loss, moved, q)]
        server.state[SUMS] = [a + b for a, b in zip(server.state.get(SUMS, [0.0] * 4), new)]
        update.payload.clear()

    @hookimpl
    def server_step(self, server: ServerContext, mean: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Go the share of the way to the mean that the curvature allows; all of it at q = 0."""
        count, works, weights, bends = server.state.pop(SUMS)
        factor = eq.step_factor(weights, bends, self.options.lipschitz or count / works)
        if self.options.q == 0:
            return None
        return {name: eq.fair_step(server.model[name], y, factor) for name, y in mean.items()}

    def _count(self, update: ClientUpdate) -> float:
        return float(update.samples) if self.options.weighting == "samples" else 1.0

    def _loss(self, update: ClientUpdate) -> float:
        """Return F_k(w_t) as the client sent it."""
        if self.options.q == 0:
            return 0.0
        check_tensors(update.payload, {"loss": ((), None)})
        return max(0.0, float(update.payload["loss"]))  # below 0 by a local noise
