"""FedBN: which layers stay, a run in NumPy, what travels, and with which layers a client is evaluated."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fedcore import Plugin, PluginConflictError, SplitModel, client_model, hookimpl
from fedcore_fedbn import batch_norm_names
from fedcore_testing import (
    Cohorts,
    PersonalClassifier,
    client_arrays,
    committed,
    federations,
    initial_weights,
    mean_by_hand,
    model_bytes,
    personal_state,
    records,
    same_tensors,
    small_config,
    softmax_by_hand,
    weights,
    with_batch_norm,
)
from tests.sentences import raises, warns

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16}
go = federations(**FEW)
SCALE, SHIFT, MEAN, VARIANCE = (f"encoder.base.1.{name}" for name in ("weight", "bias", "running_mean", "running_var"))
COUNT = "encoder.base.1.num_batches_tracked"


def test_the_type_of_a_layer_decides_and_not_its_name():
    model = nn.ModuleDict(
        {
            "bn1": nn.Linear(2, 2),
            "plain": nn.BatchNorm2d(3),
            "block": nn.Sequential(nn.SyncBatchNorm(4), nn.BatchNorm1d(5, affine=False)),
            "instance": nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
            "layer": nn.LayerNorm(2),
            "group": nn.GroupNorm(1, 2),
            "batch": nn.BatchNorm3d(2, track_running_stats=False),
        }
    )
    statistics = ["running_mean", "running_var", "num_batches_tracked"]
    expected = [f"plain.{name}" for name in ("weight", "bias", *statistics)]
    expected += [f"block.0.{name}" for name in ("weight", "bias", *statistics)]
    expected += [f"block.1.{name}" for name in statistics] + ["batch.weight", "batch.bias"]
    assert batch_norm_names(model) == expected
    assert batch_norm_names(nn.BatchNorm1d(1))[0] == "weight"


def normalised(num_classes, input_shape):
    """Return softmax regression on BatchNorm(x)."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64)), 64, num_classes)


def test_a_run_is_algorithm_1_in_numpy(go, tmp_path):
    """Full batches, momentum, weight decay, clients that come and go: layers stay, the classifier is averaged."""
    cohorts = [[0, 1], [1, 2], [0, 2]]
    options = {**FEW, "model": normalised, "batch_size": 500, "lr": 0.05, "weight_decay": 1e-2}
    options |= {"clients": 3, "rounds": 3, "local_epochs": 2}
    result = go("fedbn", (Cohorts, {"rounds": cohorts}), **options)
    w = {name: t.double().numpy() for name, t in initial_weights(small_config(tmp_path, **options)).items()}
    shared = {name: value for name, value in w.items() if name.startswith("classifier")}
    own = {k: {name: w[name] for name in (SCALE, SHIFT, MEAN, VARIANCE)} for k in range(3)}
    clients = client_arrays(result)
    for cohort in cohorts:
        ends = []
        for k in cohort:
            (x, y), local = clients[k], {**shared, **own[k]}
            normal = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
            speed = dict.fromkeys((SCALE, SHIFT, *shared), 0.0)
            for _ in range(2):
                _, gradient = softmax_by_hand(local, normal * local[SCALE] + local[SHIFT], y)
                z = (normal * local[SCALE] + local[SHIFT]) @ local["classifier.weight"].T + local["classifier.bias"]
                p = np.exp(z - z.max(1, keepdims=True))
                features = (p / p.sum(1, keepdims=True) - y) / len(x) @ local["classifier.weight"]
                gradient |= {SCALE: (features * normal).sum(0), SHIFT: features.sum(0)}
                local[MEAN] = 0.9 * local[MEAN] + 0.1 * x.mean(0)
                local[VARIANCE] = 0.9 * local[VARIANCE] + 0.1 * x.var(0, ddof=1)
                for name, g in gradient.items():
                    speed[name] = 0.9 * speed[name] + g + 1e-2 * local[name]
                    local[name] = local[name] - 0.05 * speed[name]
            own[k] = {name: local[name] for name in own[k]}
            ends.append({name: local[name] for name in shared})
        shared = mean_by_hand(ends, [len(clients[k][0]) for k in cohort])
    for name, value in shared.items():
        np.testing.assert_allclose(weights(result)[name], value, atol=1e-5)
    for k in range(3):
        for name, value in own[k].items():
            np.testing.assert_allclose(personal_state(result, k)[name], value, atol=1e-5)
        assert personal_state(result, k)[COUNT] == 4
    assert np.abs(own[0][MEAN] - own[1][MEAN]).max() > 1e-3


def test_without_batch_norm_it_is_fedavg_to_the_bit_and_says_so(go):
    fedavg = go({}, participation=0.7)
    with warns(RuntimeWarning, "fedbn", "BatchNorm"):
        fedbn = go("fedbn", participation=0.7)
    assert model_bytes(fedbn) == model_bytes(fedavg)
    assert fedbn.metrics["global"] == fedavg.metrics["global"]


def test_only_the_other_layers_travel(go):
    fedavg, fedbn = go({}, model=with_batch_norm), go("fedbn", model=with_batch_norm)
    kept = personal_state(fedbn, 0)
    assert sorted(kept) == sorted(batch_norm_names(with_batch_norm(10, (1, 8, 8))))
    size = sum(t.numel() * t.element_size() for t in kept.values())
    ways = [[line["bytes"]["up"] for line in records(result)] for result in (fedavg, fedbn)]
    assert all(more - less == 3 * size for more, less in zip(*ways))


def test_statistics_alone_stay_with_local_buffers_and_the_whole_layers_with_fedbn(go):
    buffers, layers = go({}, model=with_batch_norm, buffers="local"), go("fedbn", model=with_batch_norm)
    scale = "encoder.base.norm.weight"
    assert scale not in personal_state(buffers, 0)
    assert not torch.equal(personal_state(layers, 0)[scale], personal_state(layers, 1)[scale])


def test_a_client_keeps_its_layers_over_rounds_of_absence(go):
    cohorts = {"rounds": [[0, 1], [1], [1]]}
    found = {r: go("fedbn", (Cohorts, cohorts), model=with_batch_norm, rounds=r) for r in (1, 3)}
    assert same_tensors(personal_state(found[3], 0), personal_state(found[1], 0))
    assert not same_tensors(weights(found[3]), weights(found[1]))
    assert 2 not in committed(found[3]).manifest


def test_own_models_are_evaluated_and_there_is_no_global_one(go):
    result = go("fedbn", model=with_batch_norm, client_test_fraction=0.3)
    assert result.metrics["global"] is None
    assert "'encoder.base.norm." in result.summary["metrics"]["global_reason"]
    assert len(result.metrics["personal"]["per_client"]) == 3


def test_next_to_a_personal_classifier_clients_keep_both(go):
    both, fedbn = go("fedbn", PersonalClassifier, model=with_batch_norm), go("fedbn", model=with_batch_norm)
    kept = personal_state(both, 0)
    assert set(kept) == {*personal_state(fedbn, 0), "classifier.weight", "classifier.bias"}
    assert all(not torch.equal(kept[name], personal_state(both, 1)[name]) for name in kept if kept[name].ndim)
    assert set(kept) <= set(client_model(both.directory, 0, allow_code=True).state_dict())


def test_next_to_a_plugin_that_keeps_everything_it_is_refused(go):
    with raises(PluginConflictError, "'fedbn'", "'everything'"):
        go("fedbn", Everything, model=with_batch_norm)


class Everything(Plugin):
    @hookimpl
    def personal_parameters(self):
        return ["*"]
