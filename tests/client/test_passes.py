"""Frozen models: their outputs are those of a plain forward pass, computed once."""

from __future__ import annotations

import pytest
import torch

from fedcore import Plugin, hookimpl
from fedcore.data import Dataset, ResidentSamples
from fedcore_testing import same_tensors
from tests.support import FEW, lines, model_bytes

DROPOUT = {"model": "module:tests.toy.dropout_mlp"}
BATCH_NORM = {"model": "module:tests.toy.batch_norm_mlp"}


SEEN: dict[str, list] = {}


class Frozen(Plugin):
    reads = ("global", "previous")

    @hookimpl
    def begin_local(self, client):
        client.scratch["global"] = client.forward()[:2]
        previous = client.previous_model
        client.scratch["previous"] = None if previous is None else client.forward(model=previous)[:2]
        client.scratch["model"] = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}

    @hookimpl
    def local_loss(self, step):
        for name in ("global", "previous"):
            expected, found = step.client.scratch[name], step.frozen(name)
            SEEN.setdefault(name, []).append(found is not None)
            assert (expected is None) == (found is None)
            if found is not None:
                torch.testing.assert_close(found.features, expected[0][step.indices], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(found.logits, expected[1][step.indices], rtol=1e-5, atol=1e-5)
                assert not found.features.requires_grad
                assert step.frozen(name) is found, "computed once per batch, whoever asks"
        assert not step.global_model.training
        assert not any(parameter.requires_grad for parameter in step.global_model.parameters())
        assert same_tensors(dict(step.global_model.state_dict()), step.client.scratch["model"])

    @hookimpl
    def end_local(self, client):
        trained = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
        if client.previous_model is not None:
            kept = {name: client.state[name] for name in trained}
            assert same_tensors(dict(client.previous_model.state_dict()), kept)
        for name, tensor in trained.items():
            client.state[name] = tensor


@pytest.mark.parametrize("model", [DROPOUT, BATCH_NORM], ids=["dropout", "batch norm"])
def test_frozen_outputs_are_those_of_a_plain_forward(go, model):
    SEEN.clear()
    options = {**model, "rounds": 3, "participation": 0.5, "local_epochs": 2}
    result = go(Frozen, **options)
    assert all(record["failures"] == [] for record in lines(result))
    assert all(SEEN["global"])
    assert {True, False} == set(SEEN["previous"]), "None on the first participation, the model afterwards"
    assert model_bytes(result) == model_bytes(go(**options)), "looking changes nothing"


class Brighter:
    """Adds a drawn number to each image."""

    def draw(self, n, generator):
        return torch.rand(n, 1, generator=generator)

    def apply(self, x, drawn, mean, std):
        return x + drawn[:, :, None, None]


BRIGHTER = Brighter()


def black(data_dir=None):
    samples = ResidentSamples(torch.zeros(40, 1, 8, 8), torch.arange(40) % 2, [0.0], [1.0])
    return Dataset("black", samples, samples, 2, (1, 8, 8), augmentation=f"module:{__name__}.BRIGHTER")


class Augmented(Plugin):
    reads = ("global",)

    @hookimpl
    def local_loss(self, step):
        for found, expected in zip(step.frozen("global"), step.global_model(step.x)):
            torch.testing.assert_close(found, expected)
        SEEN.setdefault("drawn", []).extend(step.x[:, 0, 0, 0].tolist())


def test_frozen_outputs_are_those_of_augmented_samples_and_each_epoch_augments_anew(go):
    SEEN.clear()
    result = go(Augmented, **DROPOUT, dataset=f"module:{__name__}.black", augment=True, local_epochs=2)
    assert lines(result)[0]["failures"] == []
    assert len(SEEN["drawn"]) == len(set(SEEN["drawn"])) == 2 * 40


class CountForwards(Plugin):
    reads = ("global", "previous")
    samples = 0

    @hookimpl
    def local_loss(self, step):
        if not step.global_model.encoder._forward_pre_hooks:
            step.global_model.encoder.register_forward_pre_hook(self._count)
        step.frozen("global")
        step.frozen("global")

    @staticmethod
    def _count(module, inputs):
        CountForwards.samples += len(inputs[0])


def test_frozen_outputs_are_computed_once_per_sample_and_round(go):
    CountForwards.samples = 0
    go(CountForwards, local_epochs=3, rounds=2)
    assert CountForwards.samples == 2 * 4 * FEW
