"""The attack: samples are poisoned on the clients, updates are replaced when all of a round have arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    ConfigError,
    Plugin,
    PluginConflictError,
    PluginOptions,
    RunConfig,
    RunSetup,
    ServerContext,
    Tensors,
    generator,
    hookimpl,
)
from fedcore_attacks import equations as eq
from fedcore_functional import moved_model, update_vector

if TYPE_CHECKING:
    from fedcore.data import ClientData

Kind = Literal[
    "label-flip",
    "backdoor",
    "sign-flip",
    "scale",
    "noise",
    "alie",
    "ipm",
    "mimic",
    "replacement",
    "payload-flip",
    "payload-scale",
    "payload-swap",
    "payload-counts",
]

STRENGTH = {
    "sign-flip": 1.0,
    "scale": 10.0,
    "noise": 0.1,
    "ipm": 0.5,
    "payload-flip": 1.0,
    "payload-scale": 10.0,
    "payload-counts": 10.0,
}
"""Default strengths."""

ON_DATA_ALONE = ("label-flip", "backdoor")
"""Attacks that poison samples and leave updates as training makes them."""
ON_DATA = (*ON_DATA_ALONE, "replacement")
"""Attacks that poison samples. Model replacement is a backdoor whose updates are scaled."""

ON_LABELS = (*ON_DATA, "payload-swap", "payload-counts")
"""Attacks that change what belongs to classes."""

OMNISCIENT = ("alie", "ipm", "mimic")
"""Attacks that read the honest updates."""
ON_PAYLOADS = ("payload-flip", "payload-scale", "payload-swap", "payload-counts")
"""Attacks on what methods send next to the model, and on answers to questions."""

CHUNK = 1000


class AttackOptions(PluginOptions):
    """Options of the attack."""

    kind: Kind = Field(default="sign-flip", description="What malicious clients do.")
    share: float = Field(default=0.2, ge=0, lt=1, description="Share of clients that are malicious, from the seed.")
    clients: tuple[int, ...] | None = Field(
        default=None, description="Ids of the malicious clients instead of a share."
    )
    start: int = Field(default=1, ge=1, description="First round of the attack, from 1.")
    strength: float | None = Field(
        default=None,
        ge=0,
        description="Factor of the update or payload, noise's deviation, ALIE's z, epsilon; by kind if left out.",
    )
    collude: bool = Field(
        default=False, description="Malicious clients send one common update (sign-flip, scale, noise, replacement)."
    )
    source: int | None = Field(
        default=None, ge=0, description="Label flip, payload swap: the class to change; default y -> C - 1 - y."
    )
    target: int = Field(default=0, ge=0, description="The class that the source class or the trigger shall get.")
    names: tuple[str, ...] | None = Field(
        default=None, description="Payload attacks: names of the tensors to change; all if left out."
    )
    poison: float = Field(default=0.5, gt=0, le=1, description="Backdoor: share of a client's samples with trigger.")
    trigger: int = Field(default=3, ge=1, description="Backdoor: side of the trigger in pixels.")
    value: float = Field(
        default=2.0, ge=-1e6, le=1e6, description="Backdoor: the trigger's value, in the model's normalised inputs."
    )

    @field_validator("clients", "names", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, (int, str)) else value


class Attack(Plugin[AttackOptions]):
    """Malicious clients: label flip, backdoor, sign flip, scaling, noise, ALIE, IPM, mimic, replacement, payloads.

    Data attacks change the samples of a malicious client in every task. Model attacks replace its update once all
    updates of the round have arrived, before any defence sees one. The omniscient ones read the honest updates there.
    Payload attacks change there what methods send next to the model, and on the client its answers to questions.
    """

    neutral = {"kind": "sign-flip", "share": 0.0}

    def __init__(self, options: AttackOptions) -> None:
        super().__init__(options)
        self.assumes = ("classes",) if options.kind in ON_LABELS else ()
        counts_all = options.kind == "replacement" and options.strength is None
        # dp of fedcore-dp reads it: all_updates takes nothing of an honest client into another client's update.
        self.own_updates_only = not counts_all and options.kind not in OMNISCIENT

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse ids and classes that do not fit, and attacks on models that do not travel in plain form.

        Warn of a payload attack without a method that sends a payload or asks clients.
        """
        options, classes = self.options, setup.task.num_classes
        if not set(options.clients or ()) <= set(range(setup.config.training_clients)):
            raise ConfigError(
                f"attack.clients={list(options.clients or ())}: ids go from 0 to {setup.config.training_clients - 1}"
            )
        if max(options.target, options.source or 0) >= classes:
            raise ConfigError(f"attack.source and attack.target: classes go from 0 to {classes - 1}")
        if options.kind in ("label-flip", "payload-swap"):
            if options.source == options.target:
                raise ConfigError(f"attack.source and attack.target are both {options.target}, so nothing changes")
            if options.source is None and options.target:
                raise ConfigError(
                    f"attack.target={options.target}: {options.kind} gives this class to the samples of attack.source; "
                    "give attack.source, too, or leave attack.target out, which changes all classes"
                )
        elif options.source is not None:
            raise ConfigError(f"attack.source: {options.kind} has no source class; leave the option out")
        on_models = options.kind not in (*ON_DATA_ALONE, *ON_PAYLOADS)
        if on_models:
            setup.require_received_start(self.name)
        nothing = on_models and not setup.layout.trainable.intersection(setup.layout.shared)
        if nothing and (keeper := setup.keeper_of(setup.layout.trainable)):
            reason = f"{keeper!r} keeps all parameters on the clients, so there is no update for {options.kind}"
            raise PluginConflictError.of(self.name, keeper, f"{reason}. Use attack.kind=label-flip or payload-flip")
        for other in setup.plugins:
            if other.encodes and (on_models or options.kind in ON_PAYLOADS):
                reason = f"{other.name!r} encodes uploads, and {options.kind} changes them in plain form"
                raise PluginConflictError.of(self.name, other.name, reason)
        sends = [other for other in setup.plugins if other.implements("end_local") or other.questions]
        if options.kind in ON_PAYLOADS and not sends:
            setup.note(
                self.name,
                f"{options.kind} changes what a method sends next to the model, but no plugin of this run "
                "sends anything there or asks clients, so nothing is attacked; add such a method, as fedproc, or take "
                "another attack.kind",
            )

    @hookimpl
    def local_samples(self, client: ClientContext, samples: ClientData) -> ClientData | None:
        """Poison a malicious client's samples. Which of them have the trigger does not change from round to round."""
        options = self.options
        if options.kind not in ON_DATA or client.id not in self._malicious(client.config, client.round):
            return None
        if options.kind == "label-flip":
            return samples.changed(labels=self._flipped(samples.labels, client.num_classes))
        stream = generator(client.config.seed, "attack/poison", client=client.id)
        chosen = torch.rand(len(samples), generator=stream) < options.poison
        chosen = chosen.to(samples.labels.device)
        inputs = samples.inputs(torch.arange(len(samples), device=samples.labels.device))
        marked = eq.triggered(inputs, options.trigger, options.value)
        poisoned = inputs.clone()
        poisoned[chosen] = marked[chosen]
        return samples.changed(inputs=poisoned, labels=torch.where(chosen, options.target, samples.labels))

    @hookimpl
    def pre_answer(self, client: ClientContext, answer: Mapping[str, Tensor]) -> Tensors | None:
        """Change what a malicious client answers to any plugin's question."""
        if self.options.kind not in ON_PAYLOADS or client.id not in self._malicious(client.config, client.round):
            return None
        return self._poisoned(answer, client.num_classes)

    @hookimpl
    def all_updates(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> list[ClientUpdate] | None:
        """Replace the updates of malicious clients, and keep the losses of honest and malicious ones apart."""
        malicious = self._malicious(server.config, server.round)
        evil = [update for update in updates if update.client in malicious]
        good = [update for update in updates if update.client not in malicious]
        server.state["losses"] = {"honest": _mean_loss(good), "malicious": _mean_loss(evil)}
        server.state["round"] = server.round
        if not evil or self.options.kind in ON_DATA_ALONE:
            return None
        if self.options.kind in ON_PAYLOADS:
            names = sorted({name for update in evil for sent in update.payload.values() for name in sent})
            if self.options.names and names and not set(self.options.names).intersection(names):
                server.note(
                    f"attack.names={list(self.options.names)} matches nothing that malicious clients send next "
                    f"to the model ({', '.join(names)}); it can still match their answers to questions"
                )
            return [
                replace(u, payload={name: self._poisoned(sent, server.num_classes) for name, sent in u.payload.items()})
                for u in evil
            ]
        if self.options.kind == "mimic":
            return self._mimicking(server, good, evil)
        names = [name for name in server.trainable if name in evil[0].model]
        return [
            replace(update, model={**update.model, **moved_model(server.model, row, names)})
            for update, row in zip(evil, self._rows(server, names, good, evil), strict=True)
        ]

    @hookimpl
    def report(self, server: ServerContext) -> dict[str, Any]:
        """Report the malicious clients, the losses of both groups, and the success on the test samples, or a reason."""
        figures: dict[str, Any] = {"malicious": sorted(malicious_clients(server.config, self.options))}
        if server.state.get("round") == server.round:  # a round without an accepted update keeps no losses
            figures |= {f"{name}_loss": loss for name, loss in server.state["losses"].items()}
        evaluated = (server.round + 1) % server.config.eval_every == 0 or server.round + 1 == server.rounds
        if self.options.kind in ON_DATA and evaluated:
            if server.personal:
                reason = f"no global model: parameters such as {server.personal[0]!r} stay on the clients"
                figures["success_reason"] = reason
            else:
                figures["success"] = self._success(server)
        return figures

    @property
    def _strength(self) -> float:
        """The strength of the options, or the kind's default; ALIE and model replacement compute theirs."""
        return STRENGTH.get(self.options.kind, 1.0) if self.options.strength is None else self.options.strength

    def _malicious(self, config: RunConfig, round: int) -> frozenset[int]:
        """Return who attacks in a round."""
        return malicious_clients(config, self.options) if round + 1 >= self.options.start else frozenset()

    def _poisoned(self, sent: Mapping[str, Tensor], num_classes: int) -> Tensors:
        """Return a payload with the named tensors changed."""
        options, strength = self.options, self._strength
        if options.kind == "payload-swap":
            target = None if options.source is None else options.target
            poisoned = eq.swapped_payload(sent, num_classes, options.source, target)
        elif options.kind == "payload-counts":
            poisoned = eq.inflated_payload(sent, strength)
        else:
            poisoned = eq.scaled_payload(sent, -strength if options.kind == "payload-flip" else strength)
        changed = sent if options.names is None else options.names
        return {name: poisoned[name] if name in changed else tensor for name, tensor in sent.items()}

    def _flipped(self, labels: Tensor, num_classes: int) -> Tensor:
        target = None if self.options.source is None else self.options.target
        return eq.flipped_labels(labels, num_classes, self.options.source, target)

    def _rows(
        self, server: ServerContext, names: list[str], good: list[ClientUpdate], evil: list[ClientUpdate]
    ) -> list[Tensor]:
        """Return what each malicious client sends, as y_k - w_t."""
        options, strength = self.options, self._strength
        if options.kind in ("alie", "ipm"):
            known = torch.stack([update_vector(update.model, server.model, names) for update in good or evil])
            if options.kind == "ipm":
                sent = eq.inner_product_manipulation(known, strength)
            else:
                z = eq.alie_z(len(good) + len(evil), len(evil)) if options.strength is None else strength
                sent = eq.alie(known, z)
            return [sent] * len(evil)
        own = [update_vector(update.model, server.model, names) for update in evil]
        if options.collude:
            own = [torch.stack(own).mean(dim=0)] * len(evil)
        if options.kind == "noise":
            streams = [server.generator(f"attack/noise/{0 if options.collude else u.client}") for u in evil]
            return [
                row + strength * torch.randn(row.shape, generator=stream, dtype=row.dtype)
                for row, stream in zip(own, streams, strict=True)
            ]
        if options.kind == "replacement" and options.strength is None:
            strength = sum(u.samples for u in good + evil) / sum(u.samples for u in evil)
        return [(-strength if options.kind == "sign-flip" else strength) * row for row in own]

    def _mimicking(
        self, server: ServerContext, good: list[ClientUpdate], evil: list[ClientUpdate]
    ) -> list[ClientUpdate] | None:
        """Return copies of the victim's update. A victim that is absent is replaced by a new one."""
        if not good:
            return None
        victim = server.state.get("victim")
        if victim not in [update.client for update in good]:
            rows = torch.stack([update_vector(update.model, server.model, server.trainable) for update in good])
            victim = good[eq.most_spread(rows)].client
            server.state["victim"] = victim
        (model,) = [update.model for update in good if update.client == victim]
        return [replace(update, model=dict(model)) for update in evil]

    def _success(self, server: ServerContext) -> float | None:
        """Return the share of test samples that get the label which the attack wants; None without such samples.

        Backdoor: samples of other classes with the trigger. Label flip: samples of the source class, or all of them.
        """
        test, options = server.test, self.options
        labels = test.labels.cpu()
        wanted = self._flipped(labels, server.num_classes)
        if options.kind != "label-flip":
            wanted = torch.full_like(labels, options.target)
        rows = (wanted != labels).nonzero().flatten()
        network, hits = server.network(), 0
        with torch.no_grad():
            for part in rows.split(CHUNK):
                inputs = test.inputs(part)
                if options.kind != "label-flip":
                    inputs = eq.triggered(inputs, options.trigger, options.value)
                largest, predicted = network(inputs).logits.cpu().max(dim=1)
                hits += int(((predicted == wanted[part]) & largest.isfinite()).sum())  # nan is no hit of class 0
        return hits / len(rows) if len(rows) else None


def malicious_clients(config: RunConfig, options: AttackOptions) -> frozenset[int]:
    """Return the ids of the malicious clients: those of the options, or a share that the run's seed draws.

    The share is rounded to clients. A share above 0 is at least one client.
    """
    if options.clients is not None:
        return frozenset(options.clients)
    count = max(1, round(options.share * config.training_clients)) if options.share else 0
    order = torch.randperm(config.training_clients, generator=generator(config.seed, "attack/clients"))
    return frozenset(order[:count].tolist())


def _mean_loss(updates: Sequence[ClientUpdate]) -> float | None:
    losses = [(u.samples, u.metrics["losses"]["task"]) for u in updates if "task" in u.metrics.get("losses", {})]
    return sum(n * loss for n, loss in losses) / sum(n for n, _ in losses) if losses else None
