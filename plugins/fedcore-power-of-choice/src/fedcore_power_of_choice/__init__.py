"""Power-of-Choice as a fedcore plugin: of d candidates the clients with the highest loss train."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    Answer,
    ClientContext,
    ConfigError,
    Plugin,
    PluginOptions,
    RunSetup,
    ServerContext,
    check_tensors,
    hookimpl,
    question,
)
from fedcore_functional import mean_loss

__all__ = ["PowerOfChoice", "PowerOfChoiceOptions", "draw_candidates", "highest"]


def draw_candidates(sizes: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Return ``count`` distinct positions, drawn one after the other with chances in proportion to ``sizes`` (n,).

    :source: Cho, Wang, Joshi, arXiv 2010.01243, Section 3, step 1: p_k is the client's share of the data.
    """
    return torch.multinomial(sizes.double(), count, generator=generator).tolist()


def highest(losses: Mapping[int, float], count: int) -> list[int]:
    """Return the ``count`` clients of the highest loss in ascending order; ties go to the lower id.

    :source: Section 3, step 3.

    >>> highest({4: 0.5, 1: 2.0, 2: 0.5, 7: 0.1}, 2)
    [1, 2]
    """
    return sorted(sorted(losses, key=lambda client: (-losses[client], client))[:count])


class PowerOfChoiceOptions(PluginOptions):
    """Options of Power-of-Choice."""

    candidates: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="d: clients that are asked for their loss; default twice the cohort.",
    )
    samples: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Samples on which a candidate estimates its loss (cpow-d), drawn each round; default all (pow-d).",
    )


class PowerOfChoice(Plugin[PowerOfChoiceOptions]):
    """Power-of-Choice (Cho, Wang, Joshi, 2020, arXiv 2010.01243), pow-d and cpow-d.

    d candidates, drawn in proportion to their data, compute F_k(w_t); the m of them with the highest loss train.
    """

    assumes = ("one-model",)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse fewer candidates than a cohort has clients; tell of a cohort of all clients."""
        wanted, m, clients = self.options.candidates, setup.config.cohort_size, setup.config.training_clients
        if wanted is not None and not m <= wanted <= clients:
            raise ConfigError(
                f"{self.name}.candidates is {wanted}, but a round trains {m} of {clients} clients: "
                f"candidates must be from {m} to {clients}"
            )
        if m == clients:
            setup.note(self.name, "all clients train in every round, so none is chosen; use a smaller --participation")

    @hookimpl
    def select_clients(self, server: ServerContext) -> list[int]:
        """Draw the candidates, ask them for their losses, and take the highest."""
        available, m = list(server.available), server.config.cohort_size
        d = min(len(available), self.options.candidates or 2 * m)
        drawn = draw_candidates(server.client_sizes[available], d, server.generator("candidates"))
        candidates = [available[place] for place in drawn]
        asked = server.ask(candidates, self.loss, check=_check)
        losses = {answer.client: float(answer.tensors["loss"]) for answer in asked}
        return highest(losses, m) if losses else sorted(candidates[:m])

    @question
    def loss(self, client: ClientContext) -> dict[str, Tensor]:
        """Return F_k(w_t), the mean task loss over the training samples or some of them, in batches as in training."""
        indices = None
        if self.options.samples is not None and self.options.samples < client.n:
            order = torch.randperm(client.n, generator=client.generator("candidate"))
            indices = order[: self.options.samples].sort().values
        _, logits, labels = client.forward(indices)
        return {"loss": mean_loss(client.task.loss, logits, labels, client.config.batch_size)}


def _check(answer: Answer) -> None:
    check_tensors(answer.tensors, {"loss": ((), torch.float64)})
