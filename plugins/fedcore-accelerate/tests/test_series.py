"""Clients that no hook sees train in one session, with the bits of one by one."""

from __future__ import annotations

import dataclasses
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import DivergedError, Plugin, RoundFailedError, SplitModel, hookimpl
from fedcore.data import load_dataset
from fedcore.engines import ClientRuntime, SharedPayload
from fedcore_accelerate import offer_series, series
from fedcore_accelerate.series import Series
from fedcore_testing import federate, records, the_same_as_one_by_one
from tests.sentences import raises

UNEVEN = {"clients": 12, "partition": "dirichlet", "alpha": 0.1, "batch_size": 8, "rounds": 3, "participation": 0.5}
HERE = f"module:{__name__}."
RUNS = {
    "momentum": {"model": "mlp", "momentum": 0.9, "weight_decay": 0.01, "lr_decay": 0.5},
    "adam": {"model": "mlp", "optimizer": "adam", "lr": 0.001},
    "steps": {"model": "mlp", "local_steps": 5},
    "clipped": {"model": "mlp", "clip_norm": 0.1},
    "last batches left out": {"model": "mlp", "drop_last": True},
    "BatchNorm": {"model": f"{HERE}normed"},
    "dropout": {"model": f"{HERE}dropped"},
    "augmented": {"dataset": f"{HERE}flipped", "local_epochs": 2},
}


def normed(input_shape, num_classes):
    """Its buffers travel, and it trains no batch of one sample."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16)), 16, num_classes)


def dropped(input_shape, num_classes):
    """It draws in each step."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5)), 16, num_classes)


def noisy_at_times(input_shape, num_classes):
    """It draws, from each of the generators, in bright batches only."""
    return SplitModel(nn.Sequential(nn.Flatten(), NoisyInBrightBatches(), nn.Linear(64, 16)), 16, num_classes)


class NoisyInBrightBatches(nn.Module):
    def forward(self, x):
        if not self.training or x.mean() < 0.1:
            return x
        return x + torch.randn(()) * np.random.rand() + random.random()  # noqa: S311


def flipped(data_dir):
    return dataclasses.replace(load_dataset("digits"), augmentation="cifar10")


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_bits_are_those_of_one_by_one(monkeypatch, options):
    sessions = counted(monkeypatch)
    the_same_as_one_by_one(offer_series, "fedavgm", **{**UNEVEN, "workers": 0, **options})
    alone, clients = 3, 18  # rounds, and clients of the run that is one by one
    if options.get("model") != f"{HERE}normed":  # its clients of one sample fail, each in a session of its own
        assert len(sessions) == alone + clients


def test_clients_before_the_first_that_draws_are_not_seeded(monkeypatch):
    """This process takes tasks one at a time, workers a bundle."""
    monkeypatch.setattr(series, "FEW", 0)
    seeds, take = [], Series._take

    def noted(runner, training, *, seeded):
        seeds.append(seeded)
        take(runner, training, seeded=seeded)

    monkeypatch.setattr(Series, "_take", noted)
    options = {**UNEVEN, "workers": 0, "model": f"{HERE}noisy_at_times", "seed": 4}
    the_same_as_one_by_one(offer_series, "fedavgm", **options)
    assert seeds[:2] == [True, False]
    assert seeds[-2:] == [True, True]
    assert sum(seeds) < len(seeds) - 2


def counted(monkeypatch):
    """Return a list that grows with each session."""
    sessions, session = [], ClientRuntime.session
    monkeypatch.setattr(
        ClientRuntime, "session", lambda *given, **named: sessions.append(1) or session(*given, **named)
    )
    return sessions


class Watches(Plugin):
    """Sees one client's loss."""

    @hookimpl
    def observe(self, step):
        pass


class Sums(Plugin):
    """Works on the server alone."""

    @hookimpl
    def accumulate(self, server, update):
        pass


@pytest.mark.parametrize(("plugin", "sessions"), [(Sums, 2), (Watches, 6)])
def test_a_client_that_a_hook_sees_has_a_session_of_its_own(tmp_path, monkeypatch, plugin, sessions):
    counts = counted(monkeypatch)
    federate(tmp_path, plugin, clients=3, rounds=2, partition="iid", model="mlp", workers=0, participation=1.0)
    assert len(counts) == sessions


def third_fails(input_shape, num_classes):
    """Its forward pass raises in a client's third step."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), RaisesOnThird()), 16, num_classes)


class RaisesOnThird(nn.Module):
    def forward(self, x):
        if self.training:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 3:
                raise ValueError("the third step")
        return x


def test_a_client_that_raises_fails_alone_and_the_next_one_begins_anew(tmp_path):
    """Attributes of the network are the first ones for each client, so each fails in its third step."""
    options = {"clients": 4, "rounds": 1, "partition": "iid", "workers": 0, "participation": 1.0, "local_steps": 2}
    result = federate(tmp_path, Sums, model=f"{HERE}third_fails", **options)
    assert records(result)[0]["accepted"] == 4
    with raises(RoundFailedError):
        federate(tmp_path, Sums, model=f"{HERE}third_fails", **{**options, "local_steps": 3})


def test_a_client_that_diverges_says_so(tmp_path):
    options = {"clients": 3, "rounds": 1, "partition": "iid", "workers": 0, "participation": 1.0, "lr": 1e30}
    with raises(DivergedError):
        federate(tmp_path, Sums, model="mlp", local_epochs=4, **options)


def test_a_rounds_broadcast_is_freed_before_the_next_one_arrives(tmp_path, monkeypatch):
    """A worker maps one payload at a time."""
    copy_to, tensors, alive = SharedPayload.copy_to, [], []

    def copied(payload, placement):
        alive.append(sum(tensor() is not None for tensor in tensors))
        copy = copy_to(payload, placement)
        tensors.extend(map(weakref.ref, copy.model.values()))
        return copy

    monkeypatch.setattr(SharedPayload, "copy_to", copied)
    federate(tmp_path, Sums, clients=3, rounds=3, partition="iid", model="mlp", workers=0, participation=1.0)
    assert alive
    assert not any(alive)
