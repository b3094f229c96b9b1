"""The protocols of evaluation: which models are evaluated, on which data."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedcore import Plugin, hookimpl
from fedcore.models import SplitModel
from fedcore.testing import PersonalClassifier
from tests.support import lines


class ConstantModel(SplitModel):
    def __init__(self, label):
        super().__init__(torch.nn.Flatten(), 64, 10)
        self.label = label

    def forward(self, x):
        return x.flatten(1), F.one_hot(torch.full((len(x),), self.label), 10).float()


class OwnModel(Plugin):
    @hookimpl
    def personal_model(self, client):
        return ConstantModel(client.id) if client.id < 2 else None


def test_personal_model(go):
    result = go(OwnModel)
    plain = go()
    found = result.metrics["personal_global"]
    test_labels = result.metrics["global"]["per_class"]
    assert result.metrics["global"] == plain.metrics["global"], "the global model is evaluated as it is"
    assert "personal_global" not in plain.metrics
    zeros, ones = 36 / 360, 36 / 360  # 36 of the 360 test samples are zeros, 36 are ones
    rest = result.metrics["global"]["accuracy"]
    expected = [zeros, ones, rest, rest]
    assert found["accuracy"] == pytest.approx(np.mean(expected))
    assert found["std"] == pytest.approx(np.std(expected))
    assert (found["clients"], found["untrained"]) == (4, 0)
    assert len(test_labels) == 10


def test_protocols(go):
    plain = go(client_test_fraction=0.2)
    assert set(plain.metrics) == {"global", "global_local", "silhouette", "best_by_validation"}
    found = plain.metrics["global_local"]
    assert found["clients"] == 4
    assert plain.metrics["best_by_validation"]["validation"] == "global_local"
    held_out = sum(len(part) for part in json.loads((plain.directory / "partition.json").read_text())["test"])
    assert found["accuracy"] * held_out == pytest.approx(round(found["accuracy"] * held_out))

    head = go(PersonalClassifier, client_test_fraction=0.2, participation=0.25, rounds=2)
    took_part = {client for record in lines(head) for client in record["cohort"]}
    assert head.metrics["global"] is None
    assert "global_local" not in head.metrics
    assert head.metrics["personal"]["untrained"] == 4 - len(took_part)
    assert head.metrics["personal_global"]["untrained"] == 4 - len(took_part)
    assert head.metrics["personal"]["worst10"] <= head.metrics["personal"]["accuracy"]

    without = go(PersonalClassifier)
    assert "personal" not in without.metrics
    assert "personal_global" in without.metrics
    assert without.metrics["best_by_validation"] is None


def test_eval_every(go):
    result = go(rounds=4, eval_every=3)
    assert [record["metrics"] is not None for record in lines(result)] == [False, False, True, True]
