"""Parameters that are frozen in some local epochs: what moves when, and what the update says of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import Plugin, PluginConflictError, hookimpl
from fedcore.client.setup import Setup
from fedcore.client.working_model import WorkingModel
from fedcore.data import load_dataset
from fedcore_testing import federate, interrupted, model_bytes, records, small_config, weights, with_batch_norm
from tests.sentences import raises

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16, "rounds": 2, "local_epochs": 3}
MOVED = []


class Alternates(Plugin):
    """Trains the classifier in the first two epochs, the encoder in the last."""

    @hookimpl
    def begin_local(self, client):
        client.freeze(["encoder.*"], epochs=slice(0, 2))
        client.freeze(["classifier.*"], epochs=slice(2, None))


class Watches(Plugin):
    """Notes what has a gradient, in each epoch."""

    @hookimpl
    def observe(self, step):
        trained = {name.partition(".")[0] for name, p in step.model.named_parameters() if p.grad is not None}
        shared = {name for name, p in step.model.named_parameters() if any(p is q for q in step.parameters)}
        assert {name.partition(".")[0] for name in shared} == trained
        assert len(step.reference) == len(step.parameters)
        MOVED.append((step.epoch, *sorted(trained)))

    @hookimpl
    def end_local(self, client):
        assert {name.partition(".")[0] for name in client.parameters} == {"encoder", "classifier"}

    @hookimpl
    def accumulate(self, update):
        assert not update.frozen, "every parameter was trained in some epoch"


def test_each_epoch_trains_its_part(tmp_path):
    MOVED.clear()
    federate(tmp_path, Alternates, Watches, **FEW)
    assert set(MOVED) == {(0, "classifier"), (1, "classifier"), (2, "encoder")}


def test_a_copy_of_a_frozen_working_model_trains_batch_norm_again(tmp_path):
    """The second client of a stack gets a copy of the first one's model, in which that client froze the encoder."""
    config = small_config(tmp_path, model="module:fedcore_testing.problems.with_batch_norm")
    setup = Setup.build(config, load_dataset("digits"))
    setup.model.requires_grad_(False)
    assert WorkingModel(setup).smallest_batch == 2


def test_parameters_of_no_epoch_are_frozen_in_the_update(tmp_path):
    found = []

    class Half(Plugin):
        @hookimpl
        def begin_local(self, client):
            client.freeze(["classifier.weight"])
            client.freeze(["classifier.bias"], epochs=slice(0, 1))

        @hookimpl
        def accumulate(self, update):
            found.append(update.frozen)

    federate(tmp_path, Half, **FEW)
    assert set(found) == {frozenset({"classifier.weight"})}


def test_batch_norm_of_a_frozen_encoder_stands_still_and_momentum_waits(tmp_path):
    """Two epochs of which the second freezes the encoder end, in the encoder, like the first alone."""

    class OnlyFirst(Plugin):
        @hookimpl
        def begin_local(self, client):
            client.freeze(["encoder.*"], epochs=slice(1, None))

    options = {**FEW, "model": with_batch_norm, "rounds": 1}
    one = weights(federate(tmp_path, **{**options, "local_epochs": 1}))
    two = weights(federate(tmp_path, OnlyFirst, **{**options, "local_epochs": 2}))
    assert {name for name in one if torch.equal(one[name], two[name])} == {n for n in one if n.startswith("encoder.")}


def test_momentum_is_kept_while_a_parameter_is_frozen_by_hand(tmp_path):
    from fedcore_testing import Quadratic, W, analytic_federation

    class Waits(Plugin):
        @hookimpl
        def begin_local(self, client):
            client.freeze(["encoder.*"], epochs=slice(1, 2))
            client.add_parameters({"own": torch.zeros(1)})

        @hookimpl
        def local_loss(self, step):
            from fedcore import Loss

            return Loss(step.added["own"].sum())  # so that the frozen epoch has something to train

    options = {**analytic_federation([[2.0]]), "momentum": 0.5, "rounds": 1, "local_epochs": 3, "lr": 0.1}
    w = velocity = 0.0
    for _ in range(2):  # the middle one of three epochs is frozen
        velocity = 0.5 * velocity + (w - 2.0)
        w = w - 0.1 * velocity
    found = weights(federate(tmp_path, Quadratic, Waits, **options))[W]
    np.testing.assert_allclose(found, [w], rtol=1e-6)


def test_all_epochs_is_the_plain_freeze_and_a_stopped_run_is_the_same(tmp_path):
    class Whole(Plugin):
        @hookimpl
        def begin_local(self, client):
            client.freeze(["encoder.*"])

    class InEach(Plugin):
        @hookimpl
        def begin_local(self, client):
            client.freeze(["encoder.*"], epochs=slice(0, 3))

    assert model_bytes(federate(tmp_path, InEach, **FEW)) == model_bytes(federate(tmp_path, Whole, **FEW))
    plain = model_bytes(federate(tmp_path, Alternates, **FEW))
    assert model_bytes(interrupted(tmp_path, Alternates, after=0, **FEW)) == plain


@pytest.mark.parametrize("method", ["scaffold", "fednova"])
def test_methods_that_count_steps_are_refused(tmp_path, method):
    with raises(PluginConflictError, "'alternates'", method):
        federate(tmp_path, Alternates, method, **FEW)


def test_it_goes_with_an_exchange_in_mid_epoch(tmp_path):
    assert records(federate(tmp_path, Alternates, "fedcme", **{**FEW, "rounds": 1}))[0]["failures"] == []
