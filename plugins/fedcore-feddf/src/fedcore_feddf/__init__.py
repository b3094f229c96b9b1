"""FedDF as a fedcore plugin: the server distils the clients' ensemble on public samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    ClientUpdate,
    ConfigError,
    Plugin,
    PluginConflictError,
    PluginOptions,
    RunSetup,
    ServerContext,
    SplitModel,
    hookimpl,
)
from fedcore.data import PublicSamples
from fedcore_feddf.equations import distillation_loss, learning_rate

__all__ = ["FedDF", "FedDFOptions", "distillation_loss", "learning_rate"]

CHUNK = 500
"""Public samples per forward pass; a constant, so that the bits do not depend on the machine."""


class FedDFOptions(PluginOptions):
    """Options of FedDF."""

    steps: int = Field(default=100, ge=0, le=1_000_000, description="N: steps of distillation per round; 0 is FedAvg.")
    lr: float = Field(default=1e-3, gt=0, description="eta: Adam's learning rate at the first step, annealed to 0.")
    batch_size: int = Field(default=128, ge=1, le=1_000_000, description="Public samples per step.")


class FedDF(Plugin[FedDFOptions]):
    """FedDF (Lin, Kong, Stich, Jaggi, NeurIPS 2020, arXiv 2006.07242, Algorithm 1).

    The clients' mean model is the student; it is trained to give the clients' mean logits on public samples.
    """

    neutral = {"steps": 0}
    assumes = ("classes",)
    server_optimizer = True
    reads = ("public",)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse models of which parts stay on the clients: the ensemble's members must be whole."""
        if keeper := setup.keeper_of(setup.layout.personal):
            reason = f"{self.name!r} needs whole models on the server, but {keeper!r} keeps parts on the clients"
            raise PluginConflictError.of(self.name, keeper, reason)
        if setup.layout.personal:
            raise ConfigError(f"plugin {self.name!r} needs whole models on the server; leave out --buffers local")

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add the client's logits on the public samples to their sum."""
        if not self.options.steps:
            return
        assert server.public is not None
        model = server.network(update.model)
        with torch.no_grad():
            parts = [_logits(model, server.public, rows) for rows in torch.arange(len(server.public)).split(CHUNK)]
        logits = torch.cat(parts)  # (n, C)
        if not bool(logits.isfinite().all()):
            raise ValueError("its model's logits on the public samples are not finite")
        server.state.add("logits", logits.cpu())

    @hookimpl
    def server_step(self, server: ServerContext, mean: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Train the mean model on the ensemble's mean logits (Algorithm 1, lines 7 to 10)."""
        steps, public = self.options.steps, server.public
        if not steps:
            return None
        assert public is not None
        teacher = (server.state.pop("logits") / len(server.accepted)).float()
        student = server.network({**mean, **server.buffers})
        trained = {name: p for name, p in student.named_parameters() if name in mean and name not in server.frozen}
        # Adam's epsilon and most squares are 0 in float16. Weights of float32 are stepped in place.
        wide = [p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in trained.values()]
        optimizer = torch.optim.Adam(wide, lr=self.options.lr)
        draws = server.generator("feddf")
        with torch.enable_grad():
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = learning_rate(self.options.lr, step, steps)
                rows = torch.randint(len(public), (self.options.batch_size,), generator=draws)
                logits = _logits(student, public, rows)
                student.zero_grad()
                distillation_loss(logits, teacher[rows].to(logits.device)).backward()
                for weights, p in zip(wide, trained.values(), strict=True):
                    weights.grad = None if p.grad is None else p.grad.to(weights.dtype)
                optimizer.step()
                for weights, p in zip(wide, trained.values(), strict=True):
                    p.data.copy_(weights)
        return {name: parameter.detach() for name, parameter in trained.items()}


def _logits(model: SplitModel, public: PublicSamples, rows: Tensor) -> Tensor:
    """Return a model's logits on public samples, (B, C)."""
    logits: Tensor = model(public.inputs(rows).to(next(model.parameters()).device))[1]
    return logits
