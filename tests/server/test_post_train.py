"""After the last round: corrections of the final model."""

from __future__ import annotations

import torch

from fedcore import Plugin, hookimpl, question
from fedcore_testing import W
from tests.support import committed, model_bytes, weights


class Retrain(Plugin):
    corrects = ("classifier.*",)

    @hookimpl
    def post_train(self, server):
        features = torch.eye(10, 64).repeat(5, 1)
        labels = torch.arange(10).repeat(5)
        server.retrain_classifier(features, labels, epochs=30, lr=0.5, batch_size=16)


def test_retrain_classifier(go):
    plain, result, again = go(), go(Retrain), go(Retrain)
    before, after = weights(plain), weights(result)
    different = [name for name in before if not torch.equal(before[name], after[name])]
    assert sorted(different) == ["classifier.bias", "classifier.weight"]
    assert model_bytes(again) == model_bytes(result)
    assert result.metrics["global_before_correction"] == plain.metrics["global"]
    assert result.metrics["global"] != plain.metrics["global"]
    logits = torch.eye(10, 64) @ after["classifier.weight"].T + after["classifier.bias"]
    assert logits.argmax(1).tolist() == list(range(10))


def test_post_train_that_changes_nothing_reports_no_correction(go):
    class Idle(Plugin):
        @hookimpl
        def post_train(self, server):
            server.state["done"] = True

    result = go(Idle)
    assert "global_before_correction" not in result.metrics
    assert committed(result).plugins["idle"] == {"done": True}
    assert committed(result).phase == "done"


def test_post_train_asks_with_the_final_model(toy):
    class Final(Plugin):
        @hookimpl
        def post_train(self, server):
            for answer in server.ask("all", self.w):
                server.state[str(answer.client)] = answer.tensors["w"]

        @question
        def w(self, client):
            return {"w": client.model.state_dict()[W].clone()}

    result = toy(Final, rounds=2)
    kept = committed(result).plugins["final"]
    assert kept["0"].tolist() == kept["1"].tolist() == weights(result)[W].tolist()
