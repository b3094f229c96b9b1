"""DP-SGD on each client: differential privacy of its samples, for any server."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedcore import (
    ClientContext,
    ClientUpdate,
    ConfigError,
    Plugin,
    PluginConflictError,
    RunConfig,
    RunSetup,
    ServerContext,
    Step,
    hookimpl,
)
from fedcore_dp.accountant import count_cohort, counts_of, privacy_report, spent_by, spent_epsilon
from fedcore_dp.conflicts import refuse_chosen_rounds, refuse_hooks, refuse_questions, refuse_shared_buffers
from fedcore_dp.noise import secure_normal, secure_uniform, seeded_normal
from fedcore_dp.options import MechanismOptions
from fedcore_dp.per_example import Gradients, clipped_sum, noised_mean, one_pass, pass_by_pass

if TYPE_CHECKING:
    from fedcore.data import ClientData

LOOKS_AT_SAMPLES = {
    "begin_local": "may look at the client's samples before training: label counts, a chosen start, own parameters",
    "observe": "adds up what it sees of the client's samples",
    "end_local": "may look at the client's samples, to send or keep what it finds",
    "pre_upload": "may look at the client's samples before it changes what goes up",
}
"""Hook -> what it can take from samples past the noised gradients."""


class ExampleDPOptions(MechanismOptions):
    """Options of DP-SGD."""

    clip: float = Field(default=1.0, gt=0, description="C: largest norm of one sample's gradient.")
    delta: float = Field(default=1e-5, gt=0, lt=1, description="delta at which a client's epsilon is reported.")
    sampling: Literal["shuffle", "poisson"] = Field(
        default="shuffle",
        description="shuffle: the run's batches, accounted as if each sample were in them by itself; poisson: batches "
        "that are drawn so.",
    )
    passes: Literal["one", "each"] = Field(
        default="one",
        description="one: a pass per batch, for cross-entropy alone; each: a pass per sample, for the terms of other "
        "plugins and any model.",
    )


class ExampleDP(Plugin[ExampleDPOptions]):
    """DP-SGD (Abadi et al., CCS 2016, arXiv 1607.00133) on every client: its samples are protected from the server.

    A step follows (sum of g_i min(1, C / ||g_i||) + N(0, z^2 C^2 I)) / L, with the gradients g_i of single samples.
    """

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse models that mix samples, and plugins that see more of them than the noised gradients."""
        _refuse_batch_norm(setup, self.name)
        if self.options.private:
            refuse_shared_buffers(setup, self.name)
            refuse_chosen_rounds(setup, self.name)
            refuse_questions(setup, self.name)
            refuse_hooks(setup, self.name, LOOKS_AT_SAMPLES)
        # Last: passes=each, which it advises, does not help against the refusals above.
        if self.options.passes == "one":
            self._require_plain_steps(setup)
        elif self.options.sampling == "poisson":
            raise ConfigError(f"plugin {self.name!r}: sampling=poisson draws samples for passes=one only")

    def _require_plain_steps(self, setup: RunSetup) -> None:
        """Refuse what one pass for all samples of a batch cannot compute."""
        each = f"Use {self.name}.passes=each, which takes a pass for each sample."
        for hook in ("task_loss", "local_loss"):
            for other in setup.plugins.implementers(hook):
                reason = f"{other.name!r} implements {hook}, and passes=one is for cross-entropy alone. {each}"
                raise PluginConflictError.of(self.name, other.name, reason)
        if not setup.task.kind.classes:
            reason = f"passes=one is for cross-entropy alone, but the task is {setup.task.kind.name!r}"
            raise ConfigError(f"plugin {self.name!r}: {reason}. {each}")
        for name, parameter in setup.model.named_parameters():
            if parameter._backward_hooks:
                reason = f"{name!r} has a hook on its gradient, which passes=one leaves out"
                raise ConfigError(f"plugin {self.name!r}: {reason}. {each}")
        if setup.config.precision == "bf16":
            raise ConfigError(f"plugin {self.name!r}: passes=one computes in float32, not --precision bf16. {each}")
        if self.options.sampling == "poisson" and setup.config.augment:
            raise ConfigError(f"plugin {self.name!r}: sampling=poisson draws samples without --augment; leave it out")

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl(trylast=True)
    def local_samples(self, client: ClientContext, samples: ClientData) -> None:
        """Keep the samples from which batches are drawn, as the other plugins left them."""
        if self.options.sampling == "poisson":
            client.scratch["samples"] = samples

    @hookimpl
    def gradients(self, step: Step, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the noised mean of the samples' clipped gradients."""
        options, client = self.options, step.client
        number = client.steps  # reading it keeps the step from being captured: a graph would repeat its noise
        lot = min(client.config.batch_size, client.n)
        total = clipped_sum(self._examples(step, number, gradients), options.clip)
        normal = seeded_normal(client.generator(f"dp-sgd/noise/{number}")) if options.seed_noise else secure_normal
        noised = {}
        for name, gradient in gradients.items():
            noise = normal(gradient.shape) if self.options.private else torch.zeros(())
            mean = noised_mean(
                total.get(name, 0.0), noise.to(gradient.device), options.noise_multiplier, options.clip, lot
            )
            noised[name] = mean.to(gradient.dtype)
        return noised

    def _examples(self, step: Step, number: int, names: Iterable[str]) -> Iterator[Gradients]:
        """Yield the gradients of the batch's samples, or of those that are drawn in its place."""
        if self.options.passes == "each":
            yield from pass_by_pass(step.gradients_at, len(step.y))
            return
        x, y = step.x, step.y
        if self.options.sampling == "poisson":
            samples: ClientData = step.client.scratch["samples"]
            drawn = self._drawn(step.client, number).to(y.device)
            x, y = samples.inputs(drawn), samples.labels[drawn]
        if not isinstance(x, Tensor):
            raise ValueError(f"inputs are {type(x).__name__}, not one tensor; use {self.name}.passes=each")
        if not len(y):
            return
        try:
            with step.random("dp-sgd"):  # dropout
                yield from one_pass(step.model, names, x, y)
        except RuntimeError as error:  # of a layer such as LSTM
            raise ValueError(
                f"torch.func.vmap does not run the model ({error}); use {self.name}.passes=each"
            ) from error

    def _drawn(self, client: ClientContext, number: int) -> Tensor:
        """Return the positions of a Poisson sample: each by itself with chance L / n."""
        rate = sampling_rate(client.config, client.n)
        if self.options.seed_noise:
            stream = client.generator(f"dp-sgd/sample/{number}")
            chances = torch.rand(client.n, generator=stream, dtype=torch.float64)
        else:
            chances = torch.tensor(secure_uniform(client.n), dtype=torch.float64)
        return (chances < rate).nonzero().flatten()

    @hookimpl
    def pre_upload(self, update: ClientUpdate) -> ClientUpdate | None:
        """Leave the losses out: they are of the samples, without noise."""
        return replace(update, metrics={"losses": {}}) if self.options.private else None

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Count each client's trainings."""
        count_cohort(server, "trainings")

    @hookimpl
    def report(self, server: ServerContext) -> dict[str, Any]:
        """Report the largest epsilon of any client; none where there is no noise.

        Of shuffled batches also the epsilon that needs no sampling: a sample is in one batch of an epoch.
        """
        options, config = self.options, server.config
        spent: dict[str, float] = {}
        if self.options.private:
            trainings: list[int] = counts_of(server, "trainings").tolist()
            work = [work_of(config, n) for n in server.client_sizes.tolist()]
            rates = [sampling_rate(config, n) for n in server.client_sizes.tolist()]
            steps = [count * each for count, (each, _) in zip(trainings, work, strict=True)]
            for rate, most in worst(zip(rates, steps, strict=True)):
                epsilons = spent_by(options.accountant, options.noise_multiplier, rate, most, options.delta)
                spent = {name: max(epsilon, spent.get(name, 0.0)) for name, epsilon in epsilons.items()}
            if options.sampling == "shuffle":
                epochs = max(count * each for count, (_, each) in zip(trainings, work, strict=True))
                spent["epsilon_unsampled"] = spent_epsilon(
                    options.noise_multiplier, 1.0, epochs, options.delta, options.accountant
                )
        return privacy_report(spent, options.delta, seeded=options.seed_noise)


def sampling_rate(config: RunConfig, samples: int) -> float:
    """Return q, the chance that one of a client's samples is in a batch."""
    return min(1.0, config.batch_size / max(1, samples))


def work_of(config: RunConfig, samples: int) -> tuple[int, int]:
    """Return the steps of a client's training, and the passes over its samples of which they are a part."""
    batches = config.batches(samples)
    unit, amount = config.local_work
    if unit == "epochs" or not batches:
        return amount * batches, amount
    return amount, math.ceil(amount / batches)


def worst(spent: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return those (rate, steps) that no other exceeds in both: one of them has the largest epsilon.

    >>> worst([(0.5, 3), (0.5, 2), (0.1, 9), (0.2, 3), (0.1, 0)])
    [(0.5, 3), (0.1, 9)]
    """
    front: list[tuple[float, int]] = []
    for rate, steps in sorted(set(spent), reverse=True):
        if not front or steps > front[-1][1]:
            front.append((rate, steps))
    return front


def _refuse_batch_norm(setup: RunSetup, name: str) -> None:
    """Refuse BatchNorm that trains: a sample's gradient would depend on the others.

    :raises ConfigError: says which module, and what to do.
    """
    for path, module in setup.model.named_modules():
        trains = [parameter.requires_grad for parameter in module.parameters()]
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (any(trains) or not trains):
            raise ConfigError(
                f"plugin {name!r}: {path!r} is BatchNorm, which mixes the samples of a batch, so that a single sample "
                "has no gradient of its own. Use a model with GroupNorm, or without normalisation."
            )
