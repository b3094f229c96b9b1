"""The FedGen plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedcore import (
    ClientContext,
    ClientUpdate,
    Loss,
    Plugin,
    PluginConflictError,
    PluginOptions,
    RunSetup,
    ServerContext,
    Step,
    Tensors,
    check_tensors,
    hookimpl,
)
from fedcore_fedgen import equations as eq
from fedcore_functional import check_counts, refuse_changed_counts

HEAD = "classifier."
GENERATOR = (*eq.TRAINED, *eq.MEASURED)
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""Adam's state of one parameter, as torch names it."""


class FedGenOptions(PluginOptions):
    """Options of FedGen."""

    alpha: float = Field(default=10.0, ge=0, le=1e6, description="alpha: weight of the loss on generated features.")
    beta: float = Field(
        default=1.0, ge=0, le=1e6, description="beta: weight of the distance from predictions on generated features."
    )
    decay: float = Field(default=0.98, gt=0, le=1, description="Factor of alpha, beta and lr in each round.")
    eta: float = Field(default=1.0, ge=0, le=1e6, description="eta: weight of the generator's diversity loss.")
    steps: int = Field(default=50, ge=1, le=1_000_000, description="Steps of the generator in each round.")
    batch_size: int = Field(
        default=32, ge=2, le=1_000_000, description="Generated features in a step of the generator, and of a client."
    )
    lr: float = Field(default=3e-4, gt=0, le=1e3, description="Adam's learning rate for the generator.")
    weight_decay: float = Field(default=1e-2, ge=0, le=1e3, description="Weight decay of the generator.")
    hidden: int = Field(default=256, ge=1, le=100_000, description="Hidden units of the generator.")
    noise: int = Field(default=32, ge=1, le=100_000, description="m: width of the generator's noise.")


class FedGen(Plugin[FedGenOptions]):
    """FedGen (Zhu, Hong, Zhou, ICML 2021, arXiv 2105.10056): CE + alpha * CE on generated features + beta * KL.

    The server trains a generator of features by label, so that the clients' classifiers agree on them. Clients classify
    generated features next to their own, and draw their predictions to those on features of the same label.
    """

    neutral = {"alpha": 0.0, "beta": 0.0}
    assumes = ("one-model", "classes")

    @property
    def generates(self) -> bool:
        """Whether the clients use a generator."""
        return bool(self.options.alpha or self.options.beta)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse classifiers that stay on the clients, with which the generator is trained, and changed counts."""
        refuse_changed_counts(setup, self.name)
        if keeper := setup.keeper_of([name for name in setup.layout.personal if name.startswith(HEAD)]):
            reason = f"{self.name!r} needs the clients' classifiers, which {keeper!r} keeps on the clients"
            raise PluginConflictError.of(self.name, keeper, reason)

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """List the classes that the generator knows. This waits for the device, so it is not done in a step."""
        if client.received:
            client.scratch["classes"] = client.received["known"].nonzero().squeeze(1)

    @hookimpl
    def local_loss(self, step: Step) -> list[Loss] | None:
        """Add the loss on generated features, and the distance of predictions; nothing before a generator exists."""
        received, scratch = step.client.received, step.client.scratch
        if not received:
            return None
        size, device, decay = self.options.batch_size, step.y.device, self.options.decay**step.round

        @cache
        def generated() -> tuple[Tensor, Tensor]:
            """Return the logits (size + B, C) and labels of generated features: drawn ones, then the batch's."""
            with step.random("fedgen"):
                drawn = torch.randint(len(scratch["classes"]), (size,), device=device)
                labels = torch.cat([scratch["classes"][drawn], step.y])
                noise = torch.randn(len(labels), self.options.noise, device=device)
                features = eq.generate(received, noise, labels).to(step.logits.dtype)
                return step.model.classifier(features), labels

        def cross_entropy() -> Tensor:
            logits, labels = generated()
            return F.cross_entropy(logits[:size], labels[:size])

        def consistency() -> Tensor:
            return eq.consistency_loss(step.logits, generated()[0][size:], received["known"][step.y])

        return [
            Loss(cross_entropy, weight=self.options.alpha * decay, name="generated"),
            Loss(consistency, weight=self.options.beta * decay, name="consistency"),
        ]

    @hookimpl
    def end_local(self, client: ClientContext) -> Tensors | None:
        """Send the client's class counts."""
        return {"counts": client.class_counts} if self.generates else None

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def accumulate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Keep the client's classifier and its class counts until the round's end."""
        if not self.generates:
            return
        check_tensors(update.payload, {"counts": ((server.num_classes,), torch.int64)})
        check_counts(update.payload["counts"], update.samples, complete=True)
        head = {name: tensor for name, tensor in update.model.items() if name.startswith(HEAD)}
        server.state.update({f"{update.client}:{name}": tensor for name, tensor in (head | update.payload).items()})

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Train the generator with the classifiers of the round's clients."""
        if not self.generates:
            return
        state = server.state
        heads, counts = [], []
        for client in server.accepted:
            own = {name: state.pop(name) for name in list(state) if name.startswith(f"{client}:")}
            counts.append(own.pop(f"{client}:counts"))
            heads.append({name.removeprefix(f"{client}:{HEAD}"): tensor for name, tensor in own.items()})
        self._train(server, heads, eq.label_weights(torch.stack(counts)))

    def _train(self, server: ServerContext, heads: Sequence[Tensors], weights: Tensor) -> None:
        """Take the round's steps of the generator, on the CPU.

        :param heads: the clients' classifiers, as tensors by name; ``weights`` (K, C) their label weights.
        """
        state, options, draws = server.state, self.options, server.generator("fedgen")
        if "known" not in state:
            sizes = options.noise, options.hidden, server.feature_dim, server.num_classes
            state.update(eq.first_generator(*sizes, draws))
            state["known"] = torch.zeros(server.num_classes, dtype=torch.bool)
        known = weights.sum(0) > 0
        classes = known.nonzero().squeeze(1)
        generator = {name: state[name].clone() for name in GENERATOR}
        optimizer = _adam(generator, state, lr=options.lr * options.decay**server.round, decay=options.weight_decay)
        classifier = server.network().classifier.to("cpu").requires_grad_(False)
        dtype = next(classifier.parameters()).dtype
        with torch.enable_grad():
            for _ in range(options.steps):
                labels = classes[torch.randint(len(classes), (options.batch_size,), generator=draws)]
                noise = torch.randn(options.batch_size, options.noise, generator=draws)
                features = eq.generate(generator, noise, labels, train=True)
                logits = [functional_call(classifier, head, (features.to(dtype),)) for head in heads]
                consensus = eq.consensus_loss(logits, labels, weights)
                diversity = eq.diversity_loss(noise, features)
                optimizer.zero_grad()
                (consensus + options.eta * diversity).backward()
                optimizer.step()
        state.update({name: tensor.detach() for name, tensor in generator.items()})
        state.update({f"{n}:{moment}": optimizer.state[generator[n]][moment] for n in eq.TRAINED for moment in MOMENTS})
        state["known"] = state["known"] | known
        state["losses"], state["round"] = {"consensus": consensus.item(), "diversity": diversity.item()}, server.round

    @hookimpl
    def broadcast(self, server: ServerContext) -> Tensors | None:
        """Send the generator with the classes that it knows, from the second round on."""
        return {name: server.state[name] for name in (*GENERATOR, "known")} if "known" in server.state else None

    @hookimpl
    def report(self, server: ServerContext) -> dict[str, float] | None:
        """Report the losses of the generator's last step of this round."""
        return server.state["losses"] if server.state.get("round") == server.round else None


def _adam(generator: Tensors, state: Mapping[str, Any], *, lr: float, decay: float) -> torch.optim.Adam:
    """Return the generator's Adam, which goes on from the moments in the server's state."""
    parameters = {name: generator[name].requires_grad_() for name in eq.TRAINED}
    optimizer = torch.optim.Adam(parameters.values(), lr=lr, weight_decay=decay)
    for name, parameter in parameters.items():
        if f"{name}:step" in state:
            optimizer.state[parameter] = {moment: state[f"{name}:{moment}"].clone() for moment in MOMENTS}
    return optimizer
