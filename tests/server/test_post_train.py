"""After the last round: corrections of the final model."""

from __future__ import annotations

import torch

from fedcore import DivergedError, Plugin, hookimpl, question
from fedcore_testing import W
from tests.sentences import raises
from tests.support import committed, weights


def test_post_train_corrects_the_model(go):
    class Flips(Plugin):
        corrects = ("classifier.*",)

        @hookimpl
        def post_train(self, server):
            server.update_model({"classifier.weight": -server.model["classifier.weight"]})

    plain, result = go(), go(Flips)
    before, after = weights(plain), weights(result)
    assert after["classifier.weight"].tolist() == (-before.pop("classifier.weight")).tolist()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert result.metrics["global_before_correction"] == plain.metrics["global"]
    assert result.metrics["global"] != plain.metrics["global"]


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


def test_a_state_that_is_not_finite_is_named_by_post_train(toy):
    class Infinite(Plugin):
        @hookimpl
        def post_train(self, server):
            server.state["sum"] = torch.tensor(torch.inf)

    with raises(DivergedError, "server.state", "'sum'", "'infinite'"):
        toy(Infinite)
