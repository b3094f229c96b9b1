"""Clients with different models: each trains its own, and what travels has one form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedcore
from fedcore import ConfigError, RunConfig, SplitModel
from fedcore.data import load_dataset
from fedcore.models.mlp import mlp
from fedcore.runs.directory import RunDirectory
from fedcore.runs.saved import code_in
from fedcore_testing import interrupted, model_bytes, partition_of, personal_state, plugin_state, records, same_tensors
from tests.sentences import raises, warns

HERE = f"module:{__name__}"
DIGITS = load_dataset("digits")


def shallow(num_classes, input_shape):
    """A network with features as wide as those of mlp."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU()), 64, num_classes)


def convolutional(num_classes, input_shape):
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 64)]
    return SplitModel(nn.Sequential(*layers), 64, num_classes)


def narrow(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), 8, num_classes)


def same_as_mlp(num_classes, input_shape):
    return mlp(num_classes, input_shape)


NAMES = ["mlp", f"{HERE}.shallow", f"{HERE}.convolutional"]
MIXED = {"client_models": NAMES, "clients": 5, "rounds": 2, "local_epochs": 1, "client_test_fraction": 0.25}


def own_models(result, clients=range(5)):
    return [fedcore.client_model(result.directory, client, allow_code=True) for client in clients]


def test_each_client_trains_its_own_model(go):
    """Alone, client k trains as in a run in which all clients have its model: to the same bits."""
    mixed = go("solo", **MIXED)
    for number, name in enumerate(NAMES):
        plain = go("solo", **{**MIXED, "client_models": []}, model=name)
        for client in range(number, 5, 3):
            assert mixed.config.model_of(client) == name
            assert same_tensors(personal_state(mixed, client), personal_state(plain, client))
            found, expected = (fedcore.client_model(run.directory, client, allow_code=True) for run in (mixed, plain))
            assert same_tensors(found.state_dict(), expected.state_dict())
            for protocol in ("personal", "personal_global"):
                each = [run.metrics[protocol]["per_client"][str(client)] for run in (mixed, plain)]
                assert each[0] == each[1]
    assert mixed.metrics["global"] is None


def test_prototypes_of_different_models_are_averaged(go):
    """FedProto's C_j after a round, in float64: the mean over the clients that hold class j of their mean features."""
    result = go("fedproto", **{**MIXED, "rounds": 1})
    means, parts = [[] for _ in range(10)], partition_of(result).train
    for model, own in zip(own_models(result), parts, strict=True):
        with torch.no_grad():
            features = model.eval().model.encoder(DIGITS.train.gather(own)).double().numpy()
        labels = DIGITS.train.labels[own].numpy()
        for label in np.unique(labels):
            means[label].append(features[labels == label].mean(axis=0))
    found = plugin_state(result, "fedproto")["prototypes"]
    assert found.shape == (10, 64)
    np.testing.assert_allclose(found, [np.mean(each, axis=0) for each in means], atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plugin", ["fedproto", "lg-fedavg", "fedtgp"])
def test_one_model_under_two_names_is_one_model(go, plugin):
    """LG-FedAvg averages the classifiers, which all models have in common."""
    options = {**MIXED, "client_models": []}
    plain = go(plugin, **options, model="mlp")
    named = go(plugin, **{**options, "client_models": ["mlp", f"{HERE}.same_as_mlp"]})
    assert model_bytes(named) == model_bytes(plain)
    assert records(named) == records(plain)


def test_classifiers_of_different_models_are_averaged(go):
    result = go("lg-fedavg", **MIXED)
    heads = [model.classifier.state_dict() for model in own_models(result)]
    assert all(same_tensors(head, heads[0]) for head in heads)
    assert not any(name.startswith("classifier.") for name in personal_state(result, 1))


@pytest.mark.slow
def test_workers_and_a_resume_keep_the_bits(go, tmp_path):
    straight = go("fedproto", **MIXED, workers=0)
    assert records(go("fedproto", **MIXED, workers=2)) == records(straight)
    resumed = interrupted(tmp_path, "fedproto", after=1, **MIXED, samples=500)
    for client in range(5):
        assert same_tensors(personal_state(resumed, client), personal_state(straight, client))


def test_unseen_clients_adapt_their_own_model(go):
    metrics = go("fedproto", **MIXED, unseen_clients=0.4, adapt_epochs=1).metrics
    assert metrics["unseen_adapted"]["loss"] < metrics["unseen"]["loss"]


def test_a_trial_trains_every_model(tmp_path):
    result = fedcore.run(**MIXED, plugins="fedproto", fast_dev_run=True, progress=False)
    assert result.metrics["personal_global"]["clients"] == 3


@pytest.mark.parametrize(
    ("plugins", "options", "named"),
    [
        ({}, {}, ("'mlp'", f"'{HERE}.shallow'", "'encoder.")),
        ("fedper", {}, ("'mlp'", f"'{HERE}.shallow'", "'encoder.")),
        ("solo", {"client_models": f"mlp,{HERE}.narrow"}, (64, f"'{HERE}.narrow'", 8, "--projection")),
        ("solo", {"model": f"{HERE}.narrow"}, ("--client-models", "--model")),
        ("solo", {"client_models": f"mlp,{HERE}.none"}, ("'none'",)),
        ("solo", {"client_models": [shallow]}, ("--client-models",)),
    ],
)
def test_models_that_do_not_fit_are_refused(tmp_path, plugins, options, named):
    with raises(ConfigError, *named):
        fedcore.run(**{**MIXED, **options}, plugins=plugins, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_projection_gives_one_width(go):
    result = go("fedproto", **{**MIXED, "client_models": ["mlp", f"{HERE}.narrow"]}, projection=True)
    assert result.metrics["personal"]["clients"] == 5


class Flat(nn.Module):
    def __init__(self, num_classes=10, input_shape=(1, 8, 8), hidden=32):
        super().__init__()
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, num_classes)

    def forward(self, x):
        return self.out(self.hidden(x))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_program_gives_its_clients_models_as_objects(tmp_path, workers):
    class Local(Flat):
        """No other program can import it."""

    models = [Local, Flat(hidden=48), Flat(hidden=40), "mlp"]
    options = {**MIXED, "client_models": [], "projection": True, "plugins": "solo", "workers": workers}
    with warns(RuntimeWarning, "on_round", True):
        run = fedcore.run(**options, model=models, on_round=lambda row: True, out=tmp_path / "run")
    assert run.config.client_models == ["object:Local", "object:Flat", "object:Flat-2", "mlp"]
    assert "model=[Local, Flat, Flat-2, mlp]" in RunDirectory(run.directory).how_to_resume
    result = fedcore.resume(run.directory, model=models, changes={"rounds": 3})
    own = [fedcore.client_model(result.directory, client, model=models) for client in range(5)]
    assert [len(next(model.parameters())) for model in own] == [32, 48, 40, 128, 32]
    with raises(ConfigError, "4", "2"):
        fedcore.load_run(result.directory, model=models[:2])
    with raises(ConfigError):
        fedcore.load_run(result.directory)


def test_their_code_needs_the_permission():
    config = RunConfig.create({"client_models": ",".join(NAMES)})
    assert config.client_models == NAMES
    assert code_in(config) == NAMES[1:]
