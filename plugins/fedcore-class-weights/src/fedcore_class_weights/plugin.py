"""Class weights as a fedcore plugin."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore import Answer, ClientContext, Plugin, ServerContext, Step, check_tensors, hookimpl, question

COUNTS = "counts"


def balanced(counts: Tensor) -> Tensor:
    """Return n / (K n_c) for each class c of counts (C,), K the number of classes that have samples; 0 without any.

    The mean weight of a training sample is 1. scikit-learn's ``class_weight="balanced"`` is the same.
    """
    weights = counts.sum() / ((counts > 0).sum() * counts.clamp(min=1).double())
    return torch.where(counts > 0, weights, 0.0).float()


class ClassWeights(Plugin):
    """Cross-entropy in which each class counts the same: w_c = n / (K n_c), n_c over the clients' training samples."""

    assumes = ("classes",)

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Ask the clients that have not answered yet for their counts by class, and add them up."""
        answered = set(server.state.get("answered", []))
        missing = [client for client in range(server.num_clients) if client not in answered]

        def check(answer: Answer) -> None:
            check_tensors(answer.tensors, {COUNTS: ((server.num_classes,), torch.int64)})
            if int(answer.tensors[COUNTS].min()) < 0:
                raise ValueError("a count of samples is negative")

        for answer in server.ask(missing, self.counts, check=check) if missing else ():
            server.state.add(COUNTS, answer.tensors[COUNTS])
            answered.add(answer.client)
        server.state["answered"] = sorted(answered)

    @question
    def counts(self, client: ClientContext) -> dict[str, Tensor]:
        """Return the client's training samples per class."""
        return {COUNTS: client.class_counts}

    @hookimpl
    def broadcast(self, server: ServerContext) -> dict[str, Tensor]:
        """Send the weights of the classes."""
        return {"weights": balanced(server.state[COUNTS])} if COUNTS in server.state else {}

    @hookimpl
    def task_loss(self, step: Step) -> Tensor:
        """Return the sum of w_y times the cross-entropy, over the number of samples of the batch."""
        weights = step.client.received.get("weights")  # None if no client answered
        weights = weights if weights is None else weights.to(step.logits.dtype)
        return F.cross_entropy(step.logits, step.y, weight=weights, reduction="sum") / len(step.y)

    @hookimpl
    def report(self, server: ServerContext) -> dict[str, list[float]] | None:
        """Report the weights of the classes."""
        return {"weights": balanced(server.state[COUNTS]).tolist()} if COUNTS in server.state else None
