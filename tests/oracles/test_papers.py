"""Whole rounds of methods that no other library has, next to NumPy's float64 from their papers' text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcore_fedgen
from fedcore.data import Dataset, ResidentSamples, with_public
from fedcore_testing import (
    Cohorts,
    client_arrays,
    federate,
    hidden_tanh,
    initial_weights,
    plugin_state,
    small_config,
    weights,
)
from tests.oracles import calls, papers

COHORTS = [[0, 1, 2, 3], [0, 2], [1, 2, 3], [0, 3], [0, 1, 2]]
EPOCHS, LR, CLASSES = 2, 0.4, 3
# Each client's samples of classes 0, 1 and 2: skewed, and client 1 lacks a class, client 3 two.
HELD = ((6, 2, 1), (0, 7, 3), (3, 3, 8), (0, 5, 0))


def samples(data_dir: Path | None = None) -> Dataset:
    """Return 38 samples of five numbers, client by client."""
    draws = np.random.default_rng(7)
    labels = np.concatenate([np.repeat(np.arange(CLASSES), counts) for counts in HELD])
    middles = draws.standard_normal((CLASSES, 5))
    x = np.round(middles[labels] + draws.standard_normal((len(labels), 5)), 2).astype(np.float32)
    own = ResidentSamples(torch.from_numpy(x).view(-1, 1, 1, 5), torch.from_numpy(labels), [0.0], [1.0])
    return Dataset("papers", own, own, num_classes=CLASSES, input_shape=(1, 1, 5))


def by_client(labels: Any, num_clients: int, **_: Any) -> list[Any]:
    """Give each client its samples."""
    return list(np.split(np.arange(len(labels)), np.cumsum([sum(counts) for counts in HELD])[:-1]))


def in_turn(labels: Any, num_clients: int, **_: Any) -> list[Any]:
    """Give each client every n-th sample."""
    return [np.arange(len(labels))[client::num_clients] for client in range(num_clients)]


def projected(num_classes: int, input_shape: tuple[int, ...]) -> Any:
    """Return ``hidden_tanh`` as a model that has its projection head, so that FedCD does not put one of 256 on it."""
    model = hidden_tanh(num_classes, input_shape)
    model.projection_width = 256
    return model


OPTIONS: dict[str, Any] = {
    "dataset": samples,
    "partition": by_client,
    "model": projected,
    "clients": len(HELD),
    "rounds": len(COHORTS),
    "local_epochs": EPOCHS,
    "batch_size": 100,
    "lr": LR,
    "momentum": 0.0,
    "weight_decay": 0.0,
}
DRAWN = (Cohorts, {"rounds": COHORTS})


def federation_of(result: Any, start: dict[str, torch.Tensor], cohorts: Any = COHORTS) -> papers.Federation:
    """Return the run's federation in NumPy."""
    clients = [papers.Client(x, y.argmax(axis=1)) for x, y in client_arrays(result)]
    return papers.Federation(clients, cohorts, in_numpy(start), EPOCHS, LR, CLASSES)


def in_numpy(tensors: dict[str, torch.Tensor]) -> papers.Weights:
    """Return weights in NumPy; FedCD's fine classifier has one row for each class here, and is the classifier."""
    return {name.replace(".fine.", "."): tensor.double().numpy() for name, tensor in tensors.items()}


def assert_close(result: Any, wanted: papers.Weights, start: papers.Weights) -> None:
    """Assert that a run ended in these weights: float32 against float64, next to how far the rounds moved them."""
    got = in_numpy(weights(result))
    assert set(got) >= set(wanted)
    moved = max(float(np.abs(wanted[name] - start[name]).max()) for name in wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, atol=2e-5 * moved, rtol=0, err_msg=name)


@dataclasses.dataclass(frozen=True)
class Method:
    plugin: str
    options: dict[str, Any]
    by_hand: Callable[[papers.Federation], papers.Weights]


METHODS = {
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
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_rounds_with_some_of_the_clients_are_the_papers(tmp_path: Path, method: Method) -> None:
    plugins = [(method.plugin, method.options), DRAWN]
    start = initial_weights(small_config(tmp_path, *plugins, **OPTIONS))
    result = federate(tmp_path, *plugins, **OPTIONS)
    federation = federation_of(result, start)
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


def test_fedgen(tmp_path: Path) -> None:
    """Its first round is FedAvg's; what follows depends on draws, so its equations are compared one by one."""
    cohorts = (Cohorts, {"rounds": COHORTS[:1]})
    start = initial_weights(small_config(tmp_path, "fedgen", cohorts, **{**OPTIONS, "rounds": 1}))
    result = federate(tmp_path, "fedgen", cohorts, **{**OPTIONS, "rounds": 1})
    federation = federation_of(result, start)
    trained = [papers.trained_by_task(federation, federation.start, client) for client in federation.clients]
    mean = papers.mean_of(trained, [len(client.y) for client in federation.clients])
    assert_close(result, mean, federation.start)

    draws = np.random.default_rng(3)
    y, noise, counts = draws.integers(0, CLASSES, 9), draws.standard_normal((9, 4)), np.array(HELD)[:3]
    outputs = draws.standard_normal((3, 9, CLASSES))
    shares = fedcore_fedgen.label_weights(torch.tensor(counts))
    labels = torch.tensor(y)
    got = fedcore_fedgen.consensus_loss([torch.tensor(s) for s in outputs], labels, shares.double())
    np.testing.assert_allclose(float(got), papers.consensus(list(outputs), y, counts), rtol=1e-6)
    rows = draws.standard_normal((9, 6))
    got = fedcore_fedgen.diversity_loss(torch.tensor(noise), torch.tensor(rows))
    np.testing.assert_allclose(float(got), papers.diversity(noise, rows), rtol=1e-9)
    known = np.array([True, False, True])[y]
    got = fedcore_fedgen.consistency_loss(torch.tensor(outputs[0]), torch.tensor(outputs[1]), torch.tensor(known))
    np.testing.assert_allclose(float(got), papers.consistency(outputs[0], outputs[1], known), rtol=1e-6)
    generator = fedcore_fedgen.first_generator(4, 5, 6, CLASSES, torch.Generator().manual_seed(0))
    generator = {name: value.double() for name, value in generator.items()}
    got = fedcore_fedgen.generate(generator, torch.tensor(noise), labels, train=True)
    wanted = papers.generated_features(in_numpy(generator), noise, y, CLASSES)
    np.testing.assert_allclose(got.detach().numpy(), wanted, atol=1e-9)


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
