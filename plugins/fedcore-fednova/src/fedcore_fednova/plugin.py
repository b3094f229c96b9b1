"""The FedNova plugin: the weights of the mean, two sums per round, one step of the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from pydantic import Field
from torch import Tensor

from fedcore import ClientUpdate, Loss, Plugin, PluginOptions, RunSetup, ServerContext, Step, hookimpl
from fedcore_fednova import equations as eq
from fedcore_functional import proximal_term

SUMS = "sums"
"""One round's [unit of work, sum n_i, sum n_i tau_i, sum n_i / a_i]."""


class FedNovaOptions(PluginOptions):
    """Options of FedNova; the defaults are the official code's."""

    mu: float = Field(
        default=0.0, ge=0, description="mu: strength of a proximal term in the local loss, counted in a_i."
    )
    gmf: float = Field(default=0.0, ge=0, lt=1, description="gmf: momentum of the server's step; 0 is none.")
    tau_eff: Literal["norm", "steps"] = Field(
        default="norm", description="tau_eff: sum of p_i |a_i|_1, or sum of p_i K_i (the official code's where mu > 0)."
    )


class FedNova(Plugin[FedNovaOptions]):
    """FedNova (Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020, arXiv 2007.07481).

    w_{t+1} = w_t - tau_eff sum_i p_i d_i with d_i = (w_t - y_i) / |a_i|_1: clients that do more local steps count no
    more than their data. Clients with equal work make it FedAvg, bit by bit (mu = 0, gmf = 0).
    """

    server_optimizer = True
    reads_steps = True  # for local-dp, which hides them
    assumes = ("displacement", "sgd")  # after an exchange w_t - y_i is partly another client's work

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Tell of clients that all do the same work."""
        config, plain = setup.config, self.options.mu == self.options.gmf == 0
        if plain and config.local_steps is not None and getattr(config, "system", None) is None:
            setup.note(
                self.name,
                "with --local-steps all clients take the same number of steps, so the mean is FedAvg's; use "
                "--local-epochs",
            )

    @hookimpl
    def local_loss(self, step: Step) -> Loss:
        """Add mu/2 |w - w_t|^2."""
        pull = partial(proximal_term, step.parameters, step.reference)
        return Loss(pull, weight=self.options.mu, name="proximal")

    @hookimpl
    def weight(self, server: ServerContext, update: ClientUpdate) -> float:
        """Weigh by n_i / |a_i|_1, in units of the round's first client: of equal clients exactly n_i."""
        norm = self._norm(update)
        unit: float = server.state.get(SUMS, [norm])[0]
        return update.samples * (unit / norm)

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Add to the sums of tau_eff and of n_i / |a_i|_1."""
        norm, n = self._norm(update), update.samples
        work = norm if self.options.tau_eff == "norm" else float(update.steps)
        unit, samples, works, inverses = server.state.get(SUMS, [norm, 0, 0.0, 0.0])
        server.state[SUMS] = [unit, samples + n, works + n * (work / unit), inverses + n * (unit / norm)]

    @hookimpl
    def server_step(self, server: ServerContext, mean: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Step from w_t by tau_eff sum_i p_i d_i, with the server's momentum if there is one."""
        factor = eq.step_factor(*server.state.pop(SUMS)[1:])
        if factor != 1:
            mean = {name: eq.normalised_step(server.model[name], y, factor) for name, y in mean.items()}
        return dict(mean) if self.options.gmf == 0 else self._with_momentum(server, mean)

    def _with_momentum(self, server: ServerContext, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take v = gmf v + (w_t - plain) / eta and w_{t+1} = w_t - eta v; ``plain`` is the step without momentum."""
        new, lr, gmf = {}, server.lr, self.options.gmf
        for name, w in plain.items():
            new[name] = w
            if name in server.frozen:  # nobody moved it in this round
                continue
            key = f"momentum.{name}"
            velocity = (server.model[name] - w) / lr
            if key in server.state:
                carried = gmf * server.state[key]
                velocity, new[name] = velocity + carried, w - lr * carried
            server.state[key] = velocity
        return new

    def _norm(self, update: ClientUpdate) -> float:
        return eq.local_norm(update.steps, update.momentum, update.lr * self.options.mu)
