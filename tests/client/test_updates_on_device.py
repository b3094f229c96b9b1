"""Which updates stay on the device."""

from __future__ import annotations

import pytest
import torch

from fedcore import Plugin, hookimpl
from fedcore.client.setup import READ_UPDATES, Setup
from fedcore.hooks.checks import HOOKS
from fedcore_testing import federate
from tests import support

SIZE = {"rounds": 1, "clients": 3, "participation": 1.0, "local_epochs": 1, "batch_size": 256}


class Reads(Plugin):
    @hookimpl
    def accumulate(self, server, update):
        server.state["norm"] = float(sum(tensor.double().norm() for tensor in update.model.values()))

    @hookimpl
    def observe(self, step):
        """With a hook on the client no runner for CPUs alone applies."""


class Sends(Plugin):
    @hookimpl
    def end_local(self, client):
        return {"one": torch.ones(1)}


@pytest.fixture
def moved(monkeypatch):
    """Return what was brought to the CPU: names of tensors, of each group."""
    seen = []
    monkeypatch.setattr("fedcore.client.runtime.on_cpu", lambda tensors: seen.append(sorted(tensors)) or dict(tensors))
    return seen


@pytest.mark.parametrize(("plugins", "transfers"), [((), 0), ((Sends,), 0), ((Reads,), 3), ((Sends, Reads), 6)])
def test_updates_stay_where_no_plugin_reads_them(plugins, transfers, moved, tmp_path):
    federate(tmp_path, *plugins, **SIZE)
    assert len(moved) == transfers


def test_answers_are_brought_to_the_cpu(moved, tmp_path):
    federate(tmp_path, "ccvr", **SIZE)
    assert moved
    assert not any(name.startswith("model/") for names in moved for name in names)


def test_the_hooks_that_get_updates_are_those_of_the_server():
    taking = {name for name, hook in HOOKS.items() if {"update", "updates"} & set(hook.__annotations__)}
    assert taking - {"pre_upload", "guard_upload"} == set(READ_UPDATES)


def test_bits_do_not_depend_on_it(tmp_path, monkeypatch):
    kept = federate(tmp_path, **SIZE)
    monkeypatch.setattr(Setup, "reads_updates", True)
    assert support.model_bytes(kept) == support.model_bytes(federate(tmp_path, **SIZE))
