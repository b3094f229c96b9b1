"""Models and plugins whose steps can be captured, or cannot, and the run that they are tried in."""

from __future__ import annotations

import torch
from torch import nn

from fedcore import Loss, Plugin, SplitModel, hookimpl

RUN = {
    "dataset": "module:fedcore_testing.problems.few_digits",
    "rounds": 2,
    "local_epochs": 4,
    "participation": 0.5,
    "batch_size": 8,
}
ADAMW = {"optimizer": "adamw", "lr": 0.001}


def with_dropout(num_classes, input_shape):
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5))
    return SplitModel(base, 32, num_classes)


def with_batch_norm(num_classes, input_shape):
    base = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32))
    return SplitModel(base, 32, num_classes)


class Waits(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean() * (1.0 if step.logits.sum().item() > 0 else 2.0))


class Rebinds(Plugin):
    @hookimpl
    def observe(self, step):
        scratch = step.client.scratch
        scratch["seen"] = scratch.get("seen", torch.zeros(())) + len(step.x)

    @hookimpl
    def end_local(self, client):
        return {"seen": client.scratch["seen"]}

    @hookimpl
    def accumulate(self, server, update):
        assert float(update.payload["seen"]) == update.samples * RUN["local_epochs"]


class CountsInPython(Rebinds):
    @hookimpl
    def observe(self, step):
        notes = step.client.scratch
        notes["count"] = notes.get("count", 0) + len(step.x)

    @hookimpl
    def end_local(self, client):
        return {"seen": torch.tensor(float(client.scratch["count"]))}


class InPlace(Rebinds):
    @hookimpl
    def begin_local(self, client):
        client.scratch["seen"] = torch.zeros((), device=next(client.model.parameters()).device)

    @hookimpl
    def observe(self, step):
        step.client.scratch["seen"].add_(len(step.x))


class Noisy(Plugin):
    @hookimpl
    def local_loss(self, step):
        with step.random("noise"):
            return Loss((step.features * torch.randn_like(step.features)).mean())


class ByEpoch(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean(), weight=0.1 * step.epoch)


class ByRound(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean(), weight=step.progress)


class Adds(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.add_parameters({"shift": torch.zeros(client.model.feature_dim)})

    @hookimpl
    def local_loss(self, step):
        return Loss((step.features - step.added["shift"]).square().mean())


class Freezes(Plugin):
    @hookimpl
    def begin_local(self, client):
        if client.id % 2:
            client.freeze(["classifier.*"])


class Ascends(Plugin):
    @hookimpl
    def gradients(self, step, gradients):
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt() + 1e-12
        return step.gradients_at({n: step.model.get_parameter(n) + 0.05 / norm * g for n, g in gradients.items()})


class Starts(Plugin):
    starts = ("classifier.*",)
    reads = ("global",)

    @hookimpl
    def begin_local(self, client):
        return {"classifier.weight": client.model.classifier.weight * (0.5 + 0.1 * client.id)}

    @hookimpl
    def local_loss(self, step):
        return Loss((step.logits - step.frozen("global").logits).square().mean())


class Alternates(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.freeze(["classifier.*"], epochs=slice(1, None, 2))
        client.freeze(["encoder.*"], epochs=slice(0, None, 2))


class OnRows(Plugin):
    @hookimpl
    def gradients(self, step, gradients):
        return step.gradients_at({n: step.model.get_parameter(n) - 0.01 * g for n, g in gradients.items()}, slice(0, 4))
