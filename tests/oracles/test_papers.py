"""Whole rounds of methods that no other library has, next to NumPy's float64 from their papers' text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcore_fedgen
from fedcore import Plugin, Step, hookimpl
from fedcore.data import with_public
from fedcore_testing import Cohorts, federate, initial_weights, plugin_state, small_config, weights
from tests.oracles import calls, papers
from tests.oracles.rounds import (
    CLASSES,
    COHORTS,
    DRAWN,
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


@dataclasses.dataclass(frozen=True)
class Method:
    plugin: str
    options: dict[str, Any]
    by_hand: Callable[[papers.Federation], papers.Weights]
    cohorts: list[list[int]] = dataclasses.field(default_factory=lambda: COHORTS)


METHODS = {
    "class weights": Method("class-weights", {}, papers.class_weighted),
    "FedProc, Algorithm 1": Method(
        "fedproc",
        {"first_round": "contrast", "prototype_weights": "clients"},
        papers.prototype_contrast,
    ),
    "FedProc, the plugin's defaults": Method(
        "fedproc",
        {},
        lambda f: papers.prototype_contrast(f, first="task", weights="samples"),
    ),
    "FedProc, alpha .5 (Table 4)": Method(
        "fedproc",
        {"first_round": "contrast", "alpha": 0.5},
        lambda f: papers.prototype_contrast(f, weights="samples", alpha=0.5),
    ),
    "FedECCR, stage 1": Method(
        "fedeccr",
        {"correct": False, "first_round": "contrast", "prototype_weights": "clients"},
        lambda f: papers.prototype_contrast(f, temperature=0.5),
    ),
    "FedECCR, stage 1, contrast weight .1": Method(
        "fedeccr",
        {"correct": False, "contrast_weight": 0.1, "temperature": 1.0},
        lambda f: papers.prototype_contrast(f, first="task", weights="samples", factor=0.1),
    ),
    "FDCL": Method("fdcl", {"mu": 0.7}, lambda f: papers.fdcl(f, mu=0.7, temperature=0.5)),
    "FDCL, on logits": Method(
        "fdcl",
        {"mu": 0.7, "outputs": "logits", "temperature": 1.0},
        lambda f: papers.fdcl(f, mu=0.7, temperature=1.0, outputs="logits"),
    ),
    "FedCME": Method(
        "fedcme",
        {"mu": 0.05, "distance": "sum", "evaluation_fraction": 1.0},
        lambda f: papers.fedcme(f, mu=0.05),
    ),
    "FedCME, exchange only": Method(
        "fedcme",
        {"align": False, "evaluation_fraction": 1.0},
        lambda f: papers.fedcme(f, mu=0.0),
    ),
    "FedCD, one fine class": Method(
        "fedcd",
        {"fine_classes": 1, "gamma": 0.3, "lambda": 0.4, "xi": 2.0, "bound_moves": False},
        lambda f: papers.fedcd(f, gamma=0.3, lam=0.4, xi=2.0, alpha=0.1),
    ),
    "FedCD, two fine classes": Method(
        "fedcd",
        {"fine_classes": 2, "gamma": 0.3, "lambda": 0.4, "xi": 2.0, "alpha": 0.2, "bound_moves": False},
        lambda f: papers.fedcd(f, gamma=0.3, lam=0.4, xi=2.0, alpha=0.2, fine=2),
    ),
    "FedCD, two fine classes, a class comes later": Method(
        "fedcd",
        {"fine_classes": 2, "bound_moves": False},
        lambda f: papers.fedcd(f, gamma=0.1, lam=0.1, xi=0.5, alpha=0.1, fine=2),
        cohorts=LATE,
    ),
}


OTHER_OPTIONS = {
    "FedProc, the plugin's defaults",
    "FedProc, alpha .5 (Table 4)",
    "FDCL, on logits",
    "FedCME, exchange only",
    "FedCD, one fine class",
    "FedCD, two fine classes",
}
"""Of methods of which another row is quick."""


@pytest.mark.parametrize(
    "method",
    [pytest.param(row, id=name, marks=[pytest.mark.slow] * (name in OTHER_OPTIONS)) for name, row in METHODS.items()],
)
def test_rounds_with_some_of_the_clients_are_the_papers(tmp_path: Path, method: Method) -> None:
    plugins = [(method.plugin, method.options), (Cohorts, {"rounds": method.cohorts})]
    start = initial_weights(small_config(tmp_path, *plugins, **OPTIONS))
    result = federate(tmp_path, *plugins, **OPTIONS)
    federation = federation_of(result, start, method.cohorts)
    assert_close(result, method.by_hand(federation), federation.start)


def test_uscc_retrains_the_classifier_on_draws_of_all_clients_features(tmp_path: Path) -> None:
    """One step on one batch of simulated features, next to NumPy's own draws: equal up to the draws' mean error."""
    few = {**OPTIONS, "rounds": 2, "lr": 0.2}
    cohorts = (Cohorts, {"rounds": COHORTS[:2]})
    before = federate(tmp_path, cohorts, **few)
    per_class, lr = 1000, 3.0
    options = {"per_class": per_class, "epochs": 1, "lr": lr, "batch_size": per_class * CLASSES}
    after = federate(tmp_path, ("uscc", options), cohorts, **few)
    w = in_numpy(weights(before))
    federation = federation_of(before, weights(before))
    several = [
        papers.corrected_classifier(federation, w, per_class, lr, np.random.default_rng(seed)) for seed in range(5)
    ]
    got = in_numpy(weights(after))
    for name in papers.HIDDEN:
        np.testing.assert_array_equal(got[name], w[name])
    for name in papers.CLASSIFIER:
        each = np.stack([one[name] for one in several])
        error = float(each.std(axis=0).max())
        np.testing.assert_allclose(got[name], each.mean(axis=0), atol=8 * error, rtol=0)
        assert np.abs(got[name] - w[name]).max() > 16 * error


def test_fltrust(tmp_path: Path) -> None:
    options = {**OPTIONS, "public": "0.3", "partition": in_turn, "rounds": 3, "clients": 3}
    plugins = ["fltrust", (Cohorts, {"rounds": [[0, 1, 2], [0, 2], [1, 2]]})]
    start = initial_weights(small_config(tmp_path, *plugins, **options))
    result = federate(tmp_path, *plugins, **options)
    public = with_public(samples(), "0.3", result.config.seed, None).public
    assert public is not None
    inputs = public.inputs(torch.arange(len(public)))
    root = papers.Client(inputs.double().flatten(1).numpy(), public.labels.numpy())
    federation = federation_of(result, start, [[0, 1, 2], [0, 2], [1, 2]])
    assert_close(result, papers.fltrust(federation, root), federation.start)


def test_ifca(tmp_path: Path) -> None:
    """From the models that the first round left, since the start of the second one is a drawn order of weights."""
    first = federate(tmp_path, ("ifca", {"clusters": 2}), DRAWN, **{**OPTIONS, "rounds": 1})
    result = federate(tmp_path, ("ifca", {"clusters": 2}), DRAWN, **OPTIONS)
    federation = federation_of(result, weights(first), COHORTS[1:])
    models, chosen = papers.ifca(federation, [in_numpy(weights(first)), _second(first)])
    assert {one for some in chosen for one in some} == {0, 1}, "all clients chose one model: the test shows nothing"
    assert_close(result, models[0], federation.start)
    for name, value in _second(result).items():
        np.testing.assert_allclose(value, models[1][name], atol=2e-5)


SEEN: list[tuple[int, int, np.ndarray]] = []


class Sees(Plugin):
    """Keeps the inputs of each step's batch."""

    @hookimpl
    def local_loss(self, step: Step) -> None:
        """Keep them, with round and client."""
        SEEN.append((step.round, step.client.id, step.x.double().flatten(1).numpy()))


def test_fedgen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the labels and the noise that the generator got, and its weights at the start."""
    SEEN.clear()
    first = recorded(monkeypatch, fedcore_fedgen.equations, "first_generator")
    generated = recorded(monkeypatch, fedcore_fedgen.equations, "generate")
    size, steps = 7, 3
    options = {"alpha": 0.8, "beta": 0.6, "eta": 0.5, "decay": 0.9, "lr": 0.05, "weight_decay": 0.02}
    sizes = {"hidden": 5, "noise": 4, "batch_size": size, "steps": steps}
    plugins = [("fedgen", {**options, **sizes}), Sees, (Cohorts, {"rounds": LATE})]
    start = initial_weights(small_config(tmp_path, *plugins, **OPTIONS))
    result = federate(tmp_path, *plugins, **OPTIONS)
    federation = federation_of(result, start, LATE)
    drawn = [(noise.double().numpy(), labels.numpy()) for (_, noise, labels), _ in generated]
    of_steps = iter([one for one in drawn if len(one[1]) > size])
    of_generator = iter([one for one in drawn if len(one[1]) == size])
    batches = [(t, client, x, *next(of_steps)) for t, client, x in SEEN if t > 0]

    def of_server(t: int, known: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for _ in range(steps):
            noise, labels = next(of_generator)
            assert set(labels) <= set(known)
            yield labels, noise

    def of_client(t: int, client: int, known: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for of_round, number, x, noise, labels in batches:
            if (of_round, number) == (t, client):
                assert set(labels[:size]) <= set(known)
                row = np.abs(federation.clients[client].x[:, None] - x[None]).sum(axis=2).argmin(axis=1)
                yield labels[:size], noise[:size], noise[size:][row]

    generator = in_numpy(first[0][1])
    wanted, made = papers.fedgen(
        federation,
        {name: generator[name] for name in papers.GENERATOR},
        **options,
        of_server=of_server,
        of_client=of_client,
    )
    assert_close(result, wanted, federation.start)
    assert_near(in_numpy({n: v for n, v in plugin_state(result, "fedgen").items() if n in made}), made, generator)


def _second(result: Any) -> papers.Weights:
    """Return IFCA's second model."""
    state = plugin_state(result, "ifca")
    return {
        name: next(value for key, value in state.items() if key.endswith(name)).double().numpy()
        for name in (*papers.HIDDEN, *papers.CLASSIFIER)
    }


def test_equations_of_single_terms() -> None:
    """Terms of methods of which no fixture has a case, next to NumPy from the papers' equations."""
    draws = np.random.default_rng(11)
    local, received = draws.standard_normal((2, 7, 5))
    y, x = draws.integers(0, 5, 7), draws.standard_normal((9, 4))
    own, global_, slope, share = draws.standard_normal((4, 6))
    share = np.clip(share, 0, 1)
    correlations = np.corrcoef(x.T)
    points = np.array([[1.0, 0.1], [1.0, 0.2], [0.1, 1.0], [0.2, 1.0], [-1.0, -1.0], [-1.0, -0.8]])
    means = draws.standard_normal((4, 3))
    apart = np.linalg.norm(means[:, None] - means, axis=2) + 1e9 * np.eye(4)
    sent, labels = draws.standard_normal((6, 3)), draws.integers(0, 4, 6)
    off = correlations[~np.eye(4, dtype=bool)]
    wanted: dict[str, tuple[dict[str, Any], Any]] = {
        "not_true_distillation": (
            {"local": local, "received": received, "labels": y, "temperature": 2.0},
            papers.not_true_distillation(local, received, y, 2.0),
        ),
        "decorrelation": ({"features": x}, (correlations**2).mean()),
        # the authors' code does not divide the products, but the mean of their squares, by the samples
        "decorrelation off the diagonal": ({"features": x, "form": "off-diagonal"}, (8 * off) @ (8 * off) / 12 / 9),
        "ala_share": (
            {"share": share, "gradient": slope, "own": own, "received": global_, "eta": 0.5},
            np.clip(share - 0.5 * slope * (global_ - own), 0, 1),
        ),
        "ala_mixture": ({"own": own, "received": global_, "share": share}, own + (global_ - own) * share),
        "etf_gram": ({"classes": 5, "width": 8}, papers.simplex(5)),
        "tukey": ({"values": np.abs(own), "power": 0.5}, np.abs(own) ** 0.5),
        "finch_groups": ({"points": points}, papers.first_neighbours(points)),
        "tgp_margin": ({"means": means, "known": [True] * 4, "threshold": 100.0}, apart.min(axis=1).max()),
        "tgp_loss": (
            {"sent": sent, "labels": labels, "prototypes": means, "margin": 0.7},
            papers.margin_contrast(sent, labels, means, 0.7),
        ),
        "feddc_weight": ({"samples": 30, "mean_samples": 20.0}, 1.5),
        "flipped_labels": ({"labels": y, "classes": 5}, 4 - y),
    }
    for name, (inputs, value) in wanted.items():
        plain = {key: one.tolist() if isinstance(one, np.ndarray) else one for key, one in inputs.items()}
        got = calls.compute({"call": name.split(" ")[0], "inputs": plain})
        np.testing.assert_allclose(np.array(got), np.array(value), rtol=2e-5, atol=2e-6, err_msg=name)
