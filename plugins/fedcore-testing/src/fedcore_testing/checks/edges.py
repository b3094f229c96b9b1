"""Checks on unusual federations: one client, one sample, absent classes, stale updates, personal parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedcore import ConfigError
from fedcore.engines import ClientSite
from fedcore.tools import RunDirectory
from fedcore_testing.checks.base import NotApplicable, check
from fedcore_testing.companions import StartWatch
from fedcore_testing.engines import Listening
from fedcore_testing.federation import committed, data_of, initial_weights, personal_state, weights
from fedcore_testing.findings import Finding, Rule
from fedcore_testing.fingerprint import by_path
from fedcore_testing.stub_plugins import PersonalClassifier
from fedcore_testing.trial import HERE, Trial, finished


def _require_trains(trial: Trial, **options: Any) -> None:
    finished(trial.run(**{"participation": 1.0, **options}))


@check("a client may have no other client: skip what needs a pair of clients or a mean over the others.")
def check_works_with_one_client(trial: Trial) -> None:
    """A federation of one client, one round and one local epoch."""
    _require_trains(trial, clients=1, rounds=1, local_epochs=1, min_clients=1)


@check("no variance over one sample, no division by n - 1; guard with clamp(min=1).")
def check_works_with_a_client_of_one_sample(trial: Trial) -> None:
    """One client has one sample."""
    _require_trains(trial, partition=f"{HERE}one_sample")


@check("a batch may hold one sample: keep the batch dimension (no bare squeeze()), no variance over the batch.")
def check_works_with_a_last_batch_of_one(trial: Trial) -> None:
    """Every client's last batch holds one sample."""
    _require_trains(trial, partition=f"{HERE}one_over", client_test_fraction=0.0)


@check("a class without samples has no mean: mask it out, divide by counts.clamp(min=1), and keep the old row.")
def check_works_with_absent_classes(trial: Trial) -> None:
    """Each client lacks half of the classes, and of more than two no client has the last one."""
    _require_trains(trial, clients=4, partition=f"{HERE}halves")


@check(
    "go over the names of update.model or server.trainable: parameters without gradients are in neither, nor are "
    "buffers that no model is saved with. Look at the model through client.forward: model.train() would also switch "
    "frozen layers."
)
def check_works_with_a_frozen_backbone(trial: Trial) -> None:
    """A model whose first layers have no gradients: they do not travel, are not kept, and stay as they are.

    A buffer that is not saved with the model is no obstacle.
    """
    if "model" in trial.overrides:
        raise NotApplicable("it needs a model of its own, and one was given")
    findings: list[Finding] = []
    result = finished(trial.run(model=f"{HERE}with_fixed_layers", participation=1.0, findings=findings))
    changed = [f"hook {finding.hook} {finding.what}" for finding in findings if finding.rule is Rule.MODEL]
    assert not changed, "; ".join(changed[:4])
    initial, final = initial_weights(RunDirectory(result.directory).read_config()), weights(result)
    for name in ("1.weight", "2.running_mean"):
        whole = f"encoder.base.backbone.{name}"
        if whole not in final:
            raise NotApplicable("the plugin builds another encoder")
        assert torch.equal(initial[whole], final[whole]), f"{whole!r} has no gradient, but changed"


@check("let clients that sit a round out keep their state; count on server.accepted, not on all clients.")
def check_works_with_partial_participation(trial: Trial) -> None:
    """One of three clients, of very different sizes, takes part in each of four rounds."""
    _require_trains(trial, partition=f"{HERE}uneven", participation=0.34, rounds=4, local_epochs=1)


@check(
    "keep the last models in server.state, send a late client that of server.staleness[client] steps ago in broadcast, "
    "and return it from begin_local."
)
def check_works_with_stale_updates(trial: Trial) -> None:
    """Where clients do not wait for each other, each begins with the model of ``server.staleness`` steps ago."""
    if "staleness" not in trial.plugin.reads:
        raise NotApplicable("the plugin does not read the staleness")
    system = {"concurrency": 3, "slow": 0.5, "slow_factor": 6}
    finished(trial.run(StartWatch, clients=4, participation=0.5, rounds=6, local_epochs=1, system=system))


@check(
    "go over the names in gradients, update.model, server.shared or client.parameters, not over the whole model's: "
    "step.parameters and step.reference hold only what travels, gradients only what is trained."
)
def check_works_beside_personal_parameters(trial: Trial) -> None:
    """It trains next to a plugin that keeps the classifier on the clients, and so do these classifiers."""
    keeps, changes = trial.plugin.implements("personal_parameters"), trial.plugin.implements("gradients")
    if keeps and not changes:
        raise NotApplicable("the plugin keeps parameters on the clients itself")
    try:
        result = trial.run(*(() if keeps else (PersonalClassifier,)), rounds=1, participation=1.0)
    except ConfigError as refused:
        raise NotApplicable(f"the plugin refuses such a run: {refused}") from refused
    finished(result)
    initial = initial_weights(RunDirectory(result.directory).read_config())
    for client in committed(result).manifest if changes else ():
        for name, kept in personal_state(result, client).items():
            assert not torch.equal(kept, initial[name]), f"{name!r}, which client {client} keeps, was never trained"


@check(
    "send sums with counts (fedcore_functional.prototypes), and divide each class by the counts of those who have it."
)
def check_absent_classes_are_not_averaged_as_zeros(trial: Trial) -> None:
    """The mean of a class is taken over the clients that have it, not diluted by those that lack it."""
    engines: list[Listening] = []

    def listening(spec: ClientSite) -> Listening:
        engines.append(Listening(spec))
        return engines[-1]

    result = finished(
        trial.run(engine=listening, partition=f"{HERE}halves", participation=1.0, client_test_fraction=0.0)
    )
    dataset, partition = data_of(result)
    if not dataset.task.classes:
        raise NotApplicable("the task has no classes")
    labels = {client: dataset.train.labels[part] for client, part in enumerate(partition.train)}
    updates = {client: by_path(sent.payload) for (at, client), sent in engines[0].updates.items() if at == 0}
    if 1 not in updates:
        raise NotApplicable("client 1, which alone has the odd classes, does not train")
    shared = [sent for sent in engines[0].broadcasts[1:] if sent]
    later = [*shared[:1], *(sent for (number, _), sent in engines[0].messages.items() if number == 1)]
    received = [(name, tensor) for sent in later for name, tensor in sent.items()]
    names = [name for name in updates[1] if _by_class(name, updates, labels)]
    if not names or not received:
        raise NotApplicable("the plugin sends no statistics by class up and down")
    factors = {
        "the number of clients": 1 / len(updates),
        "the samples": len(labels[1]) / sum(map(len, labels.values())),
    }
    for name in names:
        own = updates[1][name]  # client 1 alone has the odd classes
        for other, tensor in received:
            if tensor.shape != own.shape:
                continue
            held = sorted(set(labels[1].tolist()))
            for by, factor in factors.items():
                assert not torch.allclose(tensor[held].double(), own[held].double() * factor, rtol=1e-4, atol=1e-9), (
                    f"{name} of class {held[0]}, which 1 of {len(updates)} clients has, comes "
                    f"back as {other} times {factor:.3g}: divided by {by}, with zeros for "
                    "the clients that lack the class"
                )


def _by_class(name: str, updates: dict[int, dict[str, Tensor]], labels: dict[int, Tensor]) -> bool:
    """Return whether a tensor has a row or a number per class that is zero if a client lacks the class.

    A class count, a share or a mark of the present classes does not count: its zero is a value.
    """
    for client, sent in updates.items():
        tensor, counts = sent.get(name), labels[client].bincount(minlength=10).double()
        if tensor is None or tensor.shape[:1] != (10,):
            return False
        if not torch.equal((tensor.reshape(10, -1) != 0).any(dim=1), counts > 0):
            return False
        if tensor.ndim == 1 and any(_proportional(tensor.double(), to) for to in (counts, counts.sign())):
            return False
    return True


def _proportional(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one * other.sum(), other * one.sum(), rtol=1e-4)
