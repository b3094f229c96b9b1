"""What hooks see is declared in hooks/contexts.py: fakes do in a unit test, real objects have the same names."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from fedcore import ClientUpdate, Loss, Plugin, RunConfig, hookimpl
from fedcore.base.errors import ConfigError
from fedcore.client.context import BatchStep, SessionContext
from fedcore.hooks.contexts import ClientContext, ServerContext, Step
from fedcore.hooks.plugin import PluginOptions
from fedcore.server.context import ScopeContext
from tests.sentences import raises
from tests.support import run_toy


class Method(Plugin):
    """A method that reads every context."""

    @hookimpl
    def check_run(self, setup):
        if setup.config.clients < 2:
            raise ConfigError(f"{self.name} needs two clients")

    @hookimpl
    def broadcast(self, server):
        return {"mean": server.state["sum"] / server.num_clients}

    @hookimpl
    def begin_local(self, client):
        client.scratch["pull"] = client.received["mean"] * client.lr

    @hookimpl
    def local_loss(self, step):
        return Loss((step.features - step.client.scratch["pull"]).pow(2).sum(), weight=step.progress)

    @hookimpl
    def accumulate(self, server, update):
        server.state["sum"] += update.payload.pop("own")


def test_hooks_run_on_plain_objects():
    method = Method(PluginOptions())
    method.name = "method"
    with raises(ConfigError):
        method.check_run(setup=SimpleNamespace(config=RunConfig(clients=1)))
    server = SimpleNamespace(state={"sum": torch.tensor([2.0])}, num_clients=4)
    client = SimpleNamespace(received=method.broadcast(server=server), scratch={}, lr=0.5)
    method.begin_local(client=client)
    assert client.scratch["pull"].tolist() == [0.25]
    step = SimpleNamespace(features=torch.tensor([[1.0], [0.25]]), client=client, progress=0.5)
    loss = method.local_loss(step=step)
    assert (loss.value.item(), loss.weight) == (0.5625, 0.5)
    update = ClientUpdate(3, {}, samples=1, steps=1, lr=0.5, momentum=0.0, payload={"own": torch.tensor([5.0])})
    method.accumulate(server=server, update=update)
    assert server.state["sum"].tolist() == [7.0]


SEEN: dict[str, object] = {}


class Looker(Plugin):
    """Notes the object behind each context."""

    @hookimpl
    def check_run(self, setup):
        SEEN["setup"] = setup

    @hookimpl
    def begin_round(self, server):
        SEEN["server in a round"] = server

    @hookimpl
    def local_loss(self, step):
        SEEN["step"], SEEN["client"] = step, step.client

    @hookimpl
    def post_train(self, server):
        SEEN["server after training"] = server


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Return the real contexts of a run."""
    SEEN.clear()
    run_toy(tmp_path_factory.mktemp("run"), Looker)
    return dict(SEEN)


def declared(protocol: type) -> set[str]:
    """Return the public names that a protocol declares."""
    return {name for name in (*inspect.get_annotations(protocol), *vars(protocol)) if not name.startswith("_")}


def implemented(found: object, protocol: type) -> set[str]:
    """Return the public names that an object has on its own, without what it inherits from the protocol."""
    classes = [cls for cls in type(found).__mro__ if cls not in (protocol, *protocol.__mro__)]
    names = {name for cls in classes for name in vars(cls)} | set(vars(found))
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize(
    ("name", "protocol", "internal"),
    [
        ("client", ClientContext, {"scoped"}),  # PluginSet takes each plugin's view by it
        ("step", Step, {"scoped"}),
        ("server in a round", ServerContext, {"scoped"}),
        ("server after training", ServerContext, {"scoped"}),
    ],
)
def test_what_is_declared_is_what_there_is(seen, name, protocol, internal):
    assert implemented(seen[name], protocol) - internal == declared(protocol)


def test_check_run_sees_the_plugins(seen):
    assert [plugin.name for plugin in seen["setup"].plugins] == ["quadratic", "looker"]


def members(context):
    """Return the functions of a context's methods and properties by name."""
    found = {name: inspect.getattr_static(context, name) for name in dir(context) if not name.startswith("_")}
    found = {name: value.fget if isinstance(value, property) else value for name, value in found.items()}
    return {name: value for name, value in found.items() if inspect.isfunction(value)}


@pytest.mark.parametrize(
    ("real", "declared"),
    [(SessionContext, ClientContext), (BatchStep, Step), (ScopeContext, ServerContext)],
)
def test_what_a_context_means_is_said_where_it_is_declared_only(real, declared):
    for name in members(declared):
        implemented = members(real)[name]
        assert implemented.__doc__ is None, f"{real.__name__}.{name} repeats {declared.__name__}.{name}"
        assert implemented.__override__
        assert inspect.getdoc(getattr(real, name)) == inspect.getdoc(getattr(declared, name))
