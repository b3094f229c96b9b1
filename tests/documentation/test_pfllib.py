"""The table of PFLlib's methods: complete, and true to what is installed."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from fedcore import Loss, Plugin, hookimpl
from fedcore.base.registry import available
from fedcore.hooks.checks import HOOKS
from fedcore.models import Outputs
from fedcore_testing import federate

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "lab" / "pfllib.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| (?!method|---)", line)
]


def test_it_has_39_methods_each_with_a_plugin_or_hooks():
    assert len(ROWS) == 39
    assert len({row[0] for row in ROWS}) == 39
    assert not [row[0] for row in ROWS if not row[1] and not row[2]]


def test_every_plugin_that_it_names_exists():
    named = {name for row in ROWS for name in re.findall(r"`([\w-]+)`", row[1])}
    assert {"fedavg", "moon", "fedntd", "fedlc", "fedamp"} <= named
    assert named <= set(available("plugin"))


def test_every_hook_that_it_names_exists():
    words = {name for row in ROWS for name in re.findall(r"`([a-z_]+)`", row[2])}
    assert words - set(HOOKS) <= {"owns", "encodes", "add_parameters"}


def hooks_of(method):
    """Return the hooks that a row names."""
    (row,) = (row for row in ROWS if row[0] == method)
    return {name for name in re.findall(r"`([a-z_]+)`", row[2]) if name in HOOKS}


def test_methods_whose_clients_start_from_models_of_their_own_evaluate_these():
    """But FedCross: its models are candidates for the one global model."""
    own = [row[0] for row in ROWS if "`broadcast_to`, `begin_local` (start)" in row[2]]
    assert {"FedPAC", "FedCross", "FedFomo"} <= set(own)
    without = [name for name in own if not hooks_of(name) & {"personal_model", "personal_parameters"}]
    assert without == ["FedCross"]


class Sum(nn.Module):
    """The logits of the shared head and of the client's own, added."""

    def __init__(self, model, weight, bias):
        super().__init__()
        self.model, self.weight, self.bias = model, weight, bias

    def forward(self, x):
        features, logits = self.model(x)
        return Outputs(features, logits + F.linear(features, self.weight, self.bias))


class FedRoD(Plugin):
    """Balanced softmax for the shared head; a personal head on features without gradient (ICLR 2022)."""

    @hookimpl
    def begin_local(self, client):
        client.scratch["prior"] = client.class_counts.log()
        head = client.model.classifier
        client.add_parameters({n: client.state.get(n, torch.zeros_like(p)) for n, p in head.named_parameters()})

    @hookimpl
    def task_loss(self, step):
        return F.cross_entropy(step.logits + step.client.scratch["prior"], step.y)

    @hookimpl
    def local_loss(self, step):
        own = F.linear(step.features.detach(), step.added["weight"], step.added["bias"])
        return Loss(F.cross_entropy(step.logits.detach() + own, step.y))

    @hookimpl
    def end_local(self, client):
        client.state.update(client.added)

    @hookimpl
    def personal_model(self, client):
        return Sum(client.model, client.state["weight"], client.state["bias"])


def test_fedrod_has_the_global_and_the_personal_protocols_with_the_hooks_of_its_row(tmp_path):
    assert {hook for hook in HOOKS if hasattr(FedRoD, hook)} == hooks_of("FedRoD")
    options = {"clients": 4, "alpha": 0.3, "client_test_fraction": 0.25, "rounds": 3, "local_epochs": 2}
    result = federate(tmp_path, FedRoD, **options, batch_size=16)
    figures = {name: result.metrics[name]["accuracy"] for name in ("global", "global_local", "personal")}
    assert figures["global"] > 0.3
    assert figures["personal"] > figures["global_local"]
