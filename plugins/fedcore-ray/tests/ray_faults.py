"""Plugins that go wrong, for the tests of this package; workers import them by name."""

from __future__ import annotations

import os
import time

import torch

from fedcore import Plugin, PluginOptions, hookimpl
from fedcore_ray import nodes


class Hangs(Plugin):
    """Client 1 never ends its first round."""

    @hookimpl
    def begin_local(self, client):
        if client.id == 1 and client.round == 0:
            time.sleep(600)


class Breaks(Plugin):
    """Answers a hook with what it may not."""

    @hookimpl
    def local_loss(self, step):
        return torch.ones(3)


class AwayOptions(PluginOptions):
    driver: int


class Away(Plugin):
    """Ends every process but the run's own, before it is ready."""

    Options = AwayOptions

    @hookimpl
    def configure_model(self, model, task):
        if os.getpid() != self.options.driver:
            os._exit(7)


class CannotSetUp(Away):
    """Raises in every process but the run's own."""

    @hookimpl
    def configure_model(self, model, task):
        if os.getpid() != self.options.driver:
            raise RuntimeError("no such file on this machine")


class Notes(Plugin):
    """Keeps which process a client was trained by, and with how many threads."""

    @hookimpl
    def end_local(self, client):
        return {"where": torch.tensor([os.getpid(), torch.get_num_threads()])}

    @hookimpl
    def accumulate(self, server, update):
        seen = server.state.get("seen", torch.zeros(0, 2, dtype=torch.int64))
        server.state["seen"] = torch.cat([seen, update.payload["where"][None]])


def look_elsewhere(state_dir, token):
    """Look as a node does that has another folder at the same path."""
    return nodes.look(f"{state_dir}-of-another-disk", token)
