"""Ditto as a fedcore plugin: a second model on each client, trained on the same batches as the shared one."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from fedcore import ClientContext, Loss, Plugin, PluginOptions, SplitModel, Step, hookimpl
from fedcore_functional import may_draw, proximal_term

__all__ = ["Ditto", "DittoOptions"]


class DittoOptions(PluginOptions):
    """Options of Ditto."""

    lambda_: float = Field(
        default=1.0,
        ge=0,
        alias="lambda",
        description="lambda of the objective (Ditto): pull of v_k to w_t; 0 is local training.",
    )


class Ditto(Plugin[DittoOptions]):
    """Ditto (Li, Hu, Beirami, Smith, ICML 2021, arXiv 2012.04221).

    Beside w, trained and averaged as FedAvg does, client k trains its own v_k on F_k(v_k) + lambda/2 ||v_k - w_t||^2
    (Algorithm 1), on the same batches and with w_t as received in this round. v_k never leaves the client.
    """

    neutral = {}  # whatever lambda is, the global model is FedAvg's
    assumes = ("cross-entropy",)

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Take v_k up where the last participation left it; before the first, v_k is the model received now."""
        model, scratch = client.model, client.scratch
        received = {name: w for name, w in model.named_parameters() if w.requires_grad}
        client.add_parameters({name: self._own(client, name, w) for name, w in received.items()})
        scratch["received"] = [w.detach().clone() for w in received.values()]
        scratch["buffers"] = {name: self._own(client, name, buffer) for name, buffer in model.named_buffers()}
        scratch["draws"] = may_draw(model)

    @staticmethod
    def _own(client: ClientContext, name: str, shared: Tensor) -> Tensor:
        """Return the client's own tensor in memory laid out as the shared one's."""
        return torch.empty_like(shared, requires_grad=False).copy_(client.state.get(name, shared.detach()))

    @hookimpl
    def local_loss(self, step: Step) -> list[Loss]:
        """Add h_k(v_k; w_t): it depends on v_k alone, so w's gradient stays FedAvg's."""
        scratch, personal = step.client.scratch, step.added
        tensors = {**personal, **scratch["buffers"]}
        # w's dropout must draw what FedAvg's draws: v_k draws from a separate stream.
        with step.random("personal") if scratch["draws"] else nullcontext():
            logits = functional_call(step.model, tensors, (step.x,)).logits  # renews v_k's buffers in place
        pull = partial(proximal_term, list(personal.values()), scratch["received"])
        return [
            Loss(step.task.loss(logits, step.y), name="personal"),
            Loss(pull, weight=self.options.lambda_, name="proximal"),
        ]

    @hookimpl
    def end_local(self, client: ClientContext) -> None:
        """Keep v_k, with its own buffers, on the client. Those that no model is saved with begin anew."""
        own, saved = {**client.added, **client.scratch["buffers"]}, client.model.state_dict()
        client.state.update({name: tensor for name, tensor in own.items() if name in saved})

    @hookimpl
    def personal_model(self, client: ClientContext) -> SplitModel:
        """Evaluate v_k as the client's last participation left it."""
        return client.network(client.state)
