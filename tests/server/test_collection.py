"""What the server keeps of updates until they are aggregated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcore import Plugin, SplitModel, hookimpl
from fedcore_testing import federate, weights
from fedcore_testing.problems import few_digits

CLIENTS = 8
OPTIONS = {"dataset": few_digits, "clients": CLIENTS, "rounds": 1, "workers": 1}
SEEN = {}


def wide(num_classes, input_shape):
    """An update of this model takes 0.9 MB."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 3000), nn.ReLU()), 3000, num_classes)


class Notes(Plugin):
    """Notes how much memory the updates keep that it has to aggregate."""

    @hookimpl
    def aggregate(self, server, updates):
        held = [value for update in updates for value in (*update.model.values(), *update.payload.values())]
        kept = [value for value in held if isinstance(value, torch.Tensor)]
        assert all(update.payload.get("note", [update.client]) == [update.client] for update in updates)
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        SEEN.update(kept=sum(t.nbytes for t in kept), memory=sum(memory.values()))
        return server.mean_of(updates)


class OwnsTheBias(Notes):
    owns = ("classifier.bias",)


class OwnsTheBiasAndSends(OwnsTheBias):
    @hookimpl
    def end_local(self, client):
        return {"large": torch.ones(100_000), "small": torch.ones(10)}

    @hookimpl
    def accumulate(self, server, update):
        del update.payload["large"]
        update.payload["note"] = [update.client]


@pytest.mark.parametrize("plugin", [OwnsTheBias, OwnsTheBiasAndSends])
def test_owned_parameters_do_not_keep_whole_updates(tmp_path, plugin):
    federate(tmp_path, plugin, model=wide, **OPTIONS)
    assert SEEN["memory"] <= 2 * SEEN["kept"]


class RoundsTheBias(Plugin):
    """Its second tensor can have the address of the one that the client sent, which nobody else holds by then."""

    @hookimpl
    def accumulate(self, server, update):
        update.model["classifier.bias"] = update.model["classifier.bias"].clamp(-1, 1)
        update.model["classifier.bias"] = update.model["classifier.bias"].round()


def test_what_a_hook_puts_into_an_update_is_aggregated(tmp_path):
    result = federate(tmp_path, RoundsTheBias, model=wide, **OPTIONS)
    assert not weights(result)["classifier.bias"].any()
