"""Whole rounds of methods that keep something on each client, of FedDF and of LoRA, next to NumPy's float64."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import SplitModel
from fedcore.data import with_public
from fedcore_testing import Cohorts, federate, initial_weights, personal_state, plugin_state, small_config, weights
from tests.oracles import papers, personalised
from tests.oracles.papers import CLASSIFIER, HIDDEN
from tests.oracles.rounds import (
    COHORTS,
    DRAWN,
    EPOCHS,
    LATE,
    OPTIONS,
    assert_close,
    assert_near,
    federation_of,
    in_numpy,
    in_turn,
    recorded,
    samples,
)

LORA = {"rank": 2, "alpha": 3.0}


@dataclasses.dataclass(frozen=True)
class Method:
    plugin: str
    options: dict[str, Any]
    by_hand: Callable[[papers.Federation], tuple[papers.Weights, personalised.Kept]]
    epochs: int = EPOCHS
    cohorts: list[list[int]] = dataclasses.field(default_factory=lambda: COHORTS)


METHODS = {
    "FedPer": Method("fedper", {}, lambda f: personalised.kept_apart(f, CLASSIFIER)),
    "LG-FedAvg": Method("lg-fedavg", {}, lambda f: personalised.kept_apart(f, HIDDEN)),
    "FedRep": Method(
        "fedrep",
        {"representation_epochs": 1},
        lambda f: personalised.kept_apart(f, CLASSIFIER, lambda epoch: CLASSIFIER if epoch < 2 else HIDDEN),
        epochs=3,
    ),
    "FedBABU": Method("fedbabu", {}, lambda f: personalised.kept_apart(f, (), lambda epoch: HIDDEN)),
    "FedPAC": Method(
        "fedpac",
        {"lambda": 0.7, "head_lr": 0.3, "head_epochs": 1},
        lambda f: personalised.fedpac(f, lam=0.7, head_lr=0.3),
        epochs=3,
    ),
    "FedPAC, a class comes later": Method(
        "fedpac", {"lambda": 2.0, "head_lr": 0.1}, lambda f: personalised.fedpac(f, lam=2.0, head_lr=0.1), 3, LATE
    ),
    "LoRA": Method("lora", LORA, lambda f: (personalised.lora(f, **LORA), {})),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_global_and_personal_weights_are_the_papers(tmp_path: Path, method: Method) -> None:
    plugins = [(method.plugin, method.options), (Cohorts, {"rounds": method.cohorts})]
    options = {**OPTIONS, "local_epochs": method.epochs}
    start = initial_weights(small_config(tmp_path, *plugins, **options))
    result = federate(tmp_path, *plugins, **options)
    federation = federation_of(result, start, method.cohorts, method.epochs)
    wanted, kept = method.by_hand(federation)
    own = {name for some in kept.values() for name in some}
    assert_close(result, {name: value for name, value in wanted.items() if name not in own}, federation.start)
    for client, some in kept.items():
        if some:
            assert_near(kept_of(result, method.plugin, client), some, federation.start)


def kept_of(result: Any, plugin: str, client: int) -> papers.Weights:
    """Return what a client keeps, and what the server keeps for it."""
    waiting = {
        name.partition(":")[2]: tensor
        for name, tensor in plugin_state(result, plugin).items()
        if name.startswith(f"{client}:")
    }
    return in_numpy({**personal_state(result, client), **waiting})


def test_fedbabu_is_evaluated_after_fine_tuning(tmp_path: Path) -> None:
    plugins = [("fedbabu", {"epochs": 3, "batch_size": 100}), DRAWN]
    result = federate(tmp_path, *plugins, **OPTIONS)
    federation = federation_of(result, weights(result))
    tuned = personalised.fine_tuned(federation, federation.start, 3)
    everyone = papers.Client(
        np.concatenate([client.x for client in federation.clients]),
        np.concatenate([client.y for client in federation.clients]),
    )
    losses = [personalised.task(own, everyone) for own in tuned.values()]
    before = personalised.task(federation.start, everyone)
    assert result.metrics["personal_global"]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert abs(np.mean(losses) - before) > 0.01


def test_ditto(tmp_path: Path) -> None:
    plugins = [("ditto", {"lambda": 0.8}), DRAWN]
    start = initial_weights(small_config(tmp_path, *plugins, **OPTIONS))
    result = federate(tmp_path, *plugins, **OPTIONS)
    federation = federation_of(result, start)
    wanted, kept = personalised.ditto(federation, lam=0.8)
    assert_close(result, wanted, federation.start)
    for client, own in kept.items():
        assert_near(in_numpy(personal_state(result, client, "ditto")), own, federation.start)


def normalised(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return a linear layer of 6 units, BatchNorm and tanh below a classifier."""
    layers = [nn.Flatten(), nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh()]
    return SplitModel(nn.Sequential(OrderedDict((str(number), layer) for number, layer in enumerate(layers))), 6, 3)


@pytest.mark.parametrize("plugins", [["fedbn"], []], ids=["FedBN", "FedAvg"])
def test_fedbn(tmp_path: Path, plugins: list[str]) -> None:
    chosen, options = [*plugins, DRAWN], {**OPTIONS, "model": normalised}
    start = initial_weights(small_config(tmp_path, *chosen, **options))
    result = federate(tmp_path, *chosen, **options)
    federation = federation_of(result, {name: tensor for name, tensor in start.items() if tensor.is_floating_point()})
    wanted, kept = personalised.fedbn(federation, local=bool(plugins))
    own = {name for some in kept.values() for name in some}
    assert_close(result, {name: value for name, value in wanted.items() if name not in own}, federation.start)
    for client, some in kept.items():
        if some:
            assert_near(in_numpy(personal_state(result, client)), some, federation.start)


def test_fedcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one draw of the Gumbel noise for all steps and samples."""
    noise = np.random.default_rng(5).gumbel(size=(2, 6))
    monkeypatch.setattr(
        nn.functional,
        "gumbel_softmax",
        lambda scores, dim: (scores + torch.tensor(noise, dtype=scores.dtype)).softmax(dim),
    )
    plugins = [("fedcp", {"lambda": 0.6}), DRAWN]
    start = initial_weights(small_config(tmp_path, *plugins, **OPTIONS))
    result = federate(tmp_path, *plugins, **OPTIONS)
    federation = federation_of(result, start)
    context = federation.start["classifier.context"]
    wanted, kept = personalised.fedcp(federation, lam=0.6, context=context, noise=noise)
    assert_close(result, wanted, federation.start)
    for client, own in kept.items():
        got = in_numpy(personal_state(result, client))
        assert_near(got, own, federation.start)
        np.testing.assert_allclose(got["classifier.context"], personalised.of_rows(own["P.weight"]), atol=1e-5)


def test_feddf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the public samples that its steps drew."""
    steps, size, cohorts = 4, 11, COHORTS[:3]
    drawn = recorded(monkeypatch, torch, "randint")
    options = {**OPTIONS, "public": "0.3", "partition": in_turn, "rounds": 3}
    plugins = [("feddf", {"steps": steps, "lr": 0.05, "batch_size": size}), DRAWN]
    start = initial_weights(small_config(tmp_path, *plugins, **options))
    drawn.clear()
    result = federate(tmp_path, *plugins, **options)
    public = with_public(samples(), "0.3", result.config.seed, None).public
    assert public is not None
    x = public.inputs(torch.arange(len(public))).double().flatten(1).numpy()
    rows = [one.numpy() for _, one in drawn if one.shape == (size,)]
    batches = [rows[number * steps :][:steps] for number in range(3)]
    federation = federation_of(result, start, cohorts)
    assert_close(result, personalised.feddf(federation, x, batches, 0.05), federation.start)
