"""The local objective: terms and the task's scale, what a step sees, and random numbers of a plugin."""

from __future__ import annotations

import torch

from fedcore import Loss, Plugin, hookimpl
from fedcore.base.errors import FedcoreError
from fedcore_functional import proximal_term
from fedcore_testing import W
from tests import support
from tests.sentences import raises
from tests.support import client_state, lines, model_bytes, weights

DROPOUT = {"model": "module:tests.toy.dropout_mlp"}


def test_terms_add_up_and_are_recorded_by_plugin_and_name(toy):
    class Terms(Plugin):
        @hookimpl
        def local_loss(self, step):
            total = step.logits.mean(dim=0).sum()
            return [Loss(total, weight=3.0, name="a"), Loss(total, weight=torch.tensor(2.0)), Loss(total, weight=-1.0)]

    result = toy(Terms, clients=1, dataset="module:tests.toy.one_centre", local_epochs=1)
    assert weights(result)[W].tolist() == [(2.0 - 4.0) * 0.5, -4.0 * 0.5]
    losses = lines(result)[0]["losses"]
    assert losses == {"task": 2.0, "terms": 0.0, "terms.a": 0.0}


def test_a_term_of_weight_0_is_not_computed(toy):
    computed = []

    class Lazy(Plugin):
        @hookimpl
        def local_loss(self, step):
            def term(name):
                computed.append(name)
                return step.logits.mean(dim=0).sum()

            weights = {"off": 0.0, "on": 3.0, "tensor": torch.tensor(0.0)}
            return [Loss(lambda name=name: term(name), weight=weight, name=name) for name, weight in weights.items()]

    result = toy(Lazy, clients=1, dataset="module:tests.toy.one_centre", local_epochs=1)
    assert computed == ["on", "tensor"]
    assert lines(result)[0]["losses"].keys() == {"task", "lazy.on", "lazy.tensor"}


def test_an_error_in_a_term_that_is_a_function_names_the_plugin(toy):
    class Raises(Plugin):
        @hookimpl
        def local_loss(self, step):
            return Loss(lambda: step.features["none"], weight=1.0)

    with raises(FedcoreError, "'raises'"):
        toy(Raises)


def test_task_scale(toy):
    class Scaler(Plugin):
        scales_task = True

        @hookimpl
        def local_loss(self, step):
            return [Loss(step.logits.mean(dim=0).sum(), weight=0.0, task_scale=0.5, name=name) for name in "ab"]

    result = toy(Scaler, clients=1, dataset="module:tests.toy.one_centre", local_epochs=1)
    assert weights(result)[W].tolist() == [0.25, 0.0]


class Infinite(Plugin):
    scales_task = True

    @hookimpl
    def local_loss(self, step):
        infinite = (step.logits.sum() * 0 + 1) / 0
        return [Loss(infinite, weight=0.0), Loss(proximal_term(step.parameters, step.reference), name="near")]


def test_a_term_of_weight_zero_is_left_out_even_if_infinite(toy):
    assert weights(toy(Infinite))[W].tolist() == weights(toy(("fedprox", {"mu": 1.0})))[W].tolist()


def test_a_task_of_scale_zero_is_left_out_even_if_infinite(tmp_path):
    class Broken(Plugin):
        scales_task = True

        @hookimpl
        def task_loss(self, step):
            return step.logits.sum() * torch.inf

        @hookimpl
        def local_loss(self, step):
            return Loss(step.logits.mean(dim=0).sum(), task_scale=0.0)

    result = support.run(tmp_path, Broken, **{**support.TOY, "local_epochs": 1})
    assert weights(result)[W].tolist() == [-0.5, -0.5]


def test_an_objective_without_a_gradient_is_refused(tmp_path):
    class Constant(Plugin):
        @hookimpl
        def task_loss(self, step):
            return torch.zeros(())

    with raises(FedcoreError):
        support.run(tmp_path, Constant, **support.TOY)


def test_the_last_short_batch_is_trained(toy):
    class Steps(Plugin):
        @hookimpl
        def end_local(self, client):
            client.state["steps"] = client.steps

    result = toy(Steps, batch_size=2)
    assert [client_state(result, client)["steps"]["steps"] for client in (0, 1)] == [2, 4]


def test_a_step_sees_the_batch(go):
    class Looker(Plugin):
        @hookimpl
        def local_loss(self, step):
            assert step.x.shape == (len(step.y), 1, 8, 8)
            assert torch.equal(step.features, step.model.encoder(step.x))
            assert torch.equal(step.logits, step.model.classifier(step.features))
            seen = step.client.scratch.setdefault("seen", [])
            seen += step.indices.tolist()
            _, _, labels = step.client.forward()
            assert torch.equal(labels[step.indices], step.y)
            assert step.progress == step.round / step.rounds
            names = [name for name, _ in step.model.named_parameters()]
            assert len(step.parameters) == len(step.reference) == len(names)

        @hookimpl
        def end_local(self, client):
            assert sorted(client.scratch["seen"]) == sorted([*range(client.n)] * 2)
            assert int(client.class_counts.sum()) == client.n

    assert lines(go(Looker, local_epochs=2))[0]["failures"] == []


def test_reference_stays_at_the_start_of_the_round(toy):
    class Reference(Plugin):
        @hookimpl
        def observe(self, step):
            assert step.reference[0].tolist() == [0.0, 0.0]
            assert step.epoch == 0 or step.parameters[0].tolist() != [0.0, 0.0]

    assert lines(toy(Reference))[0]["failures"] == []


class Drawing(Plugin):
    @hookimpl
    def local_loss(self, step):
        with step.random("noise"):
            step.client.scratch.setdefault("drawn", []).append(torch.rand(()).item())

    @hookimpl
    def end_local(self, client):
        client.state["drawn"] = client.scratch["drawn"]


class DrawingOutside(Drawing):
    @hookimpl
    def local_loss(self, step):
        step.client.scratch.setdefault("drawn", []).append(torch.rand(()).item())


def test_step_random_leaves_the_models_dropout_untouched(go):
    options = {**DROPOUT, "rounds": 2, "local_epochs": 2}
    plain, result = model_bytes(go(**options)), go(Drawing, **options)
    assert model_bytes(result) == plain
    outside = go(DrawingOutside, **options)
    assert model_bytes(outside) != plain
    for run, name in ((result, "drawing"), (outside, "drawingoutside")):
        drawn = [client_state(run, client)[name]["drawn"] for client in range(4)]
        flat = [value for values in drawn for value in values]
        assert len(set(flat)) == len(flat), "every client and batch has its own stream, dropout one in every epoch"
