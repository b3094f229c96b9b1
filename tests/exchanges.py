"""Plugins whose clients pause before local epoch 1 and exchange their classifiers."""

from __future__ import annotations

from collections.abc import Mapping

from fedcore import Exchange, hookimpl
from fedcore.base.types import Tensors
from fedcore_testing import ExchangesClassifier


class PausesOnce(ExchangesClassifier):
    """Pauses; what is exchanged is a subclass's to say."""

    exchanges = Exchange(("classifier.*",), lambda epochs: {1})


class Rotates(PausesOnce):
    """Moves the classifiers one client on."""

    @hookimpl
    def mid_local_epoch(self, snapshots: Mapping[int, Tensors]) -> dict[int, Tensors]:
        clients = sorted(snapshots)
        return {client: snapshots[other] for client, other in zip(clients, [*clients[1:], clients[0]])}
