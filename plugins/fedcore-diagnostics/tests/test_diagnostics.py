"""Diagnostics: the measures against NumPy, the figures of a whole run by hand, and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import ConfigError, Plugin, PluginConflictError, generator, hookimpl
from fedcore.data import load_dataset
from fedcore_diagnostics import (
    angle_spread,
    correlation,
    distance_from_simplex,
    duality_distance,
    linear_cka,
    nearest_mean_mismatch,
    norm_spread,
    prototype_drift,
    update_cosine,
    within_class_variability,
)
from fedcore_diagnostics.plugin import _cka
from fedcore_testing import (
    client_arrays,
    federations,
    initial_weights,
    model_bytes,
    plugin_state,
    records,
    small_config,
    weights,
)
from tests.sentences import raises

SKEWED = {"partition": "classes", "classes_per_client": 4}
SEEN: dict = {}
go = federations(public="digits")
rng = np.random.default_rng(0)
Z, LABELS = rng.standard_normal((30, 6)) + 2, np.repeat(np.arange(5), 6)
MEANS = np.stack([Z[c == LABELS].mean(0) for c in range(5)])
ROWS = rng.standard_normal((5, 6))


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()


class Models(Plugin):
    """Notes the clients' models at the end of their training."""

    @hookimpl
    def end_local(self, client):
        SEEN[client.round, client.id] = client.network()


# --- the measures -----------------------------------------------------------------------------------------------


def close(found, expected, tolerance=1e-10):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=tolerance, atol=1e-12)


def t(array):
    return torch.tensor(array)


def test_cka_is_that_of_the_gram_matrices():
    x, y = rng.standard_normal((20, 5)), rng.standard_normal((20, 8)) + 3
    centre = np.eye(20) - 1 / 20
    k, m = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    close(linear_cka(t(x), t(y)), (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))
    close(linear_cka(t(x), t(x)), 1.0)
    rotation = np.linalg.qr(rng.standard_normal((5, 5)))[0]
    close(linear_cka(t(x), t(-3 * x @ rotation + 1)), 1.0)
    assert linear_cka(t(x), torch.ones(20, 3).double()).isnan()


def test_nc1_is_that_of_the_covariances():
    within = np.mean([np.cov(Z[c == LABELS].T, bias=True) for c in range(5)], axis=0)
    between = np.cov(MEANS.T, bias=True)
    found = within_class_variability(t(Z), t(LABELS), t(MEANS))
    close(found, np.trace(within @ np.linalg.pinv(between, rcond=1e-10)) / 5, 1e-8)
    assert within_class_variability(t(MEANS[LABELS]), t(LABELS), t(MEANS)) == 0
    assert within_class_variability(t(Z), t(LABELS), torch.ones(5, 6).double()).isnan()


def test_nc1_counts_classes_equally():
    doubled = np.concatenate([Z, Z[LABELS == 2]]), np.concatenate([LABELS, LABELS[LABELS == 2]])
    found = within_class_variability(t(doubled[0]), t(doubled[1]), t(MEANS))
    close(found, within_class_variability(t(Z), t(LABELS), t(MEANS)))


def test_nc2_in_numpy_and_of_a_simplex():
    lengths = np.linalg.norm(ROWS, axis=1)
    cosines = [ROWS[i] @ ROWS[j] / lengths[i] / lengths[j] for i in range(5) for j in range(i)]
    close(norm_spread(t(ROWS)), lengths.std() / lengths.mean())
    close(angle_spread(t(ROWS)), np.std(cosines))
    close(distance_from_simplex(t(ROWS)), np.mean(np.abs(np.array(cosines) + 1 / 4)))
    simplex = t(np.eye(5) - 1 / 5)
    for measure in (norm_spread, angle_spread, distance_from_simplex):
        assert measure(simplex).item() == pytest.approx(0, abs=1e-12)


def test_nc3_and_nc4_in_numpy():
    centred = MEANS - MEANS.mean(0)
    apart = ROWS / np.linalg.norm(ROWS) - centred / np.linalg.norm(centred)
    close(duality_distance(t(ROWS), t(MEANS)), (apart**2).sum())
    close(duality_distance(t(7 * centred), t(MEANS)), 0)
    close(duality_distance(t(-centred), t(MEANS)), 4)
    logits = Z @ ROWS.T
    nearest = ((Z[:, None] - MEANS) ** 2).sum(2).argmin(1)
    close(nearest_mean_mismatch(t(logits), t(Z), t(MEANS)), np.mean(logits.argmax(1) != nearest))
    close(nearest_mean_mismatch(t(np.nan * logits), t(Z), t(MEANS)), 1.0)


def test_drifts_and_correlation_in_numpy():
    own = MEANS + rng.standard_normal(MEANS.shape)
    spread = np.linalg.norm(MEANS - MEANS.mean(0), axis=1).mean()
    close(prototype_drift(t(own), t(MEANS)), np.linalg.norm(own - MEANS, axis=1) / spread)
    close(correlation(t(Z[0]), t(Z[1])), np.corrcoef(Z[0], Z[1])[0, 1])
    assert correlation(t(Z[0]), torch.ones(6).double()).isnan()
    assert correlation(t(Z[0]), t(1 + 5e-8 * Z[1])).isnan(), "lengths that are 1 but for rounding, as FedNH's"
    close(correlation(t(Z[0]), t(1 + 1e-3 * Z[1])), np.corrcoef(Z[0], Z[1])[0, 1], 1e-7)
    close(update_cosine(t(Z[0]), t(Z[1])), Z[0] @ Z[1] / np.linalg.norm(Z[0]) / np.linalg.norm(Z[1]))
    assert update_cosine(t(Z[0]), torch.zeros(6).double()).isnan()


# --- whole runs -------------------------------------------------------------------------------------------------


def test_the_figures_of_a_round_by_hand(go, tmp_path):
    result = go({"diagnostics": {"samples": 300}}, Models, **SKEWED, rounds=1)
    (record,) = records(result)
    found = record["reports"]["diagnostics"]
    dataset = load_dataset("digits", None)
    rows = torch.randperm(len(dataset.train), generator=generator(0, "diagnostics"))[:300]
    x, y = dataset.train.gather(rows), dataset.train.labels[rows].numpy()
    clients = [SEEN[0, k] for k in range(3)]
    with torch.no_grad():
        z, logits = (part.double().numpy() for part in result.model(x))
        own = [model(x).features.double().numpy() for model in clients]
    assert found["clients"] == [0, 1, 2]

    cka = [linear_cka(t(one), t(z)).item() for one in own]
    assert found["cka_of_clients"] == pytest.approx(cka)
    assert (found["cka"], found["cka_lowest"]) == (pytest.approx(np.mean(cka)), min(found["cka_of_clients"]))

    means = np.stack([z[y == c].mean(0) for c in range(10)])
    w, b = (weights(result)[f"classifier.{name}"].double().numpy() for name in ("weight", "bias"))
    assert found["nc1"] == pytest.approx(within_class_variability(t(z), t(y), t(means)).item())
    assert found["nc2_norms"] == pytest.approx(norm_spread(t(means - means.mean(0))).item())
    assert found["nc2_simplex_rows"] == pytest.approx(distance_from_simplex(t(w)).item())
    assert found["nc3"] == pytest.approx(duality_distance(t(w), t(means)).item())
    assert found["nc4"] == pytest.approx(nearest_mean_mismatch(t(logits), t(z), t(means)).item())

    counts = np.stack([labels.sum(0) for _, labels in client_arrays(result)])
    assert found["norms"] == pytest.approx(np.linalg.norm(w, axis=1))
    assert found["biases"] == pytest.approx(b)
    assert found["shares"] == pytest.approx(counts.sum(0) / counts.sum())
    heads = [(m.classifier.weight.detach().norm(dim=1).numpy(), m.classifier.bias.detach().numpy()) for m in clients]
    for name, part in (("norms_by_shares", 0), ("biases_by_shares", 1)):
        each = [np.corrcoef(head[part], own_counts)[0, 1] for head, own_counts in zip(heads, counts)]
        assert found[name] == pytest.approx(np.mean(each), rel=1e-4)

    drift = np.stack([prototype_drift(t(means_of(one, y)), t(means)).numpy() for one in own])
    assert found["prototypes_held"] == pytest.approx(drift[counts > 0].mean())
    assert found["prototypes_lacked"] == pytest.approx(drift[counts == 0].mean())

    start = initial_weights(small_config(tmp_path, **SKEWED))
    moved = [np.concatenate([(p.detach() - start[n]).double().numpy().ravel() for n, p in m.named_parameters()])
             for m in clients]  # fmt: skip
    mean = np.average(moved, axis=0, weights=counts.sum(1))
    assert found["drift_of_clients"] == pytest.approx([np.linalg.norm(each) for each in moved], rel=1e-5)
    cosines = [each @ mean / np.linalg.norm(each) / np.linalg.norm(mean) for each in moved]
    assert found["drift_cosine_of_clients"] == pytest.approx(cosines, rel=1e-5)
    assert (found["drift"], found["drift_cosine"]) == (
        pytest.approx(np.mean(found["drift_of_clients"])), pytest.approx(np.mean(cosines), rel=1e-5)
    )  # fmt: skip


def means_of(z, y):
    return np.stack([z[y == c].mean(0) for c in range(10)])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", ["fedavg", "moon", "scaffold", "fedproc", "fedavgm", "topk", "fednh", "lora"])
def test_the_training_is_the_same_to_the_bit_next_to(go, method):
    alone = go(method, **SKEWED)
    beside = go(method, "diagnostics", **SKEWED)
    assert model_bytes(beside) == model_bytes(alone)
    assert [r["losses"] for r in records(beside)] == [r["losses"] for r in records(alone)]


def test_an_update_is_measured_before_another_plugin_clips_it(go):
    pytest.importorskip("fedcore_robust")

    def drift(*others):
        result = go(*others, {"diagnostics": {"measures": ["drift"]}}, rounds=1)
        return result.summary["reports"]["diagnostics"]["drift_of_clients"]

    assert drift({"norm-clip": {"bound": 0.01}}) == drift()


def test_every_few_rounds_and_the_last_one_are_measured(go):
    result = go({"diagnostics": {"every": 2, "measures": ["drift"]}}, rounds=5)
    assert [("reports" in record) for record in records(result)] == [False, True, False, True, True]
    assert set(result.summary["reports"]["diagnostics"]) == {
        "clients", "drift", "drift_cosine", "drift_of_clients", "drift_cosine_of_clients"
    }  # fmt: skip
    assert set(plugin_state(result, "diagnostics")) == {"figures", "round"}


def test_classifier_and_drift_need_no_public_samples(go):
    result = go({"diagnostics": {"measures": ["classifier", "drift"]}}, public=None)
    assert result.summary["reports"]["diagnostics"]["drift"] > 0
    with raises(ConfigError, "'diagnostics'"):
        go("diagnostics", public=None)


def test_what_is_not_defined_is_null(go):
    """If all clients hold all classes, none is lacked. A classifier of several modules has no rows."""

    class Deep(Plugin):
        @hookimpl
        def configure_model(self, model, task):
            model.classifier = nn.Sequential(model.classifier)

    found = records(go("diagnostics", Deep, partition="iid"))[0]["reports"]["diagnostics"]
    assert found["prototypes_lacked"] is None
    assert "nc3" not in found
    assert "norms" not in found
    json.dumps(found, allow_nan=False)


def test_the_lowest_cka_is_of_the_clients_that_have_one():
    """A model with the same features for all samples has none. First of the clients, it took the figure's place."""
    flat = torch.ones(10, 6)
    for each in ([flat, t(Z[:10])], [t(Z[:10]), flat]):
        found = _cka(each, t(Z[:10]))
        assert found["cka_lowest"] == found["cka"] == pytest.approx(1.0)
    assert math.isnan(_cka([flat], flat)["cka_lowest"])


@pytest.mark.parametrize(("other", "needs"), [("fedper", "'collapse'"), ("lg-fedavg", "'cka'"), ("solo", "'cka'")])
def test_parts_that_stay_on_the_clients_are_refused(go, other, needs):
    with raises(PluginConflictError, needs, other):
        go("diagnostics", "fedbn", other)  # FedBN keeps nothing of this model


def test_what_is_left_after_a_refusal_runs(go):
    assert (
        "cka"
        in go({"diagnostics": {"measures": ["cka", "drift", "prototypes"]}}, "fedper").summary["reports"]["diagnostics"]
    )
    assert "norms" in go({"diagnostics": {"measures": ["classifier"]}}, "lg-fedavg").summary["reports"]["diagnostics"]
