"""Every trap of a plugin is closed at start-up, by an error that names the plugin and the hook."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from fedcore import Exchange, Loss, Plugin, PluginOptions, hookimpl, question
from fedcore.base.errors import (
    ConfigError,
    FedcoreError,
    PluginCallError,
    PluginContractError,
    UnknownNameError,
)
from fedcore.hooks.checks import create_plugin
from fedcore.hooks.plugins import PluginSet
from tests.hooks.refusals import create, refused
from tests.sentences import raises
from tests.support import lines, name_of


def test_an_unknown_frozen_model():
    refused(type("Reader", (Plugin,), {"reads": ("global", "teacher")}), "reads", "teacher", "previous")


def test_a_property_is_not_evaluated():
    class Lazy(Plugin):
        @property
        def expensive(self):
            raise AssertionError("evaluated")

    assert [plugin.name for plugin in PluginSet.create({name_of(Lazy): {}})] == ["lazy"]


def test_self_is_read_only_after_init(go):
    class Careless(Plugin):
        def __init__(self, options):
            super().__init__(options)
            self.allowed = 1

        @hookimpl
        def begin_round(self, server):
            self.count = 1

    with raises(PluginContractError, "'careless'", "1", "self.count"):
        go(Careless)
    plugin = create(Careless)
    assert plugin.allowed == 1
    with raises(PluginContractError, "self.allowed"):
        plugin.allowed = 2


def test_declarations_may_depend_on_options():
    class Choice(PluginOptions):
        part: str = "classifier"

    class Chooser(Plugin):
        Options = Choice

        def __init__(self, options):
            super().__init__(options)
            self.owns = (f"{options.part}.*",)

    assert create(Chooser, part="encoder").owns == ("encoder.*",)


def test_unknown_options_and_values():
    with raises(UnknownNameError, "'temprature'", "'temperature'"):
        create_plugin("moon", {"temprature": 1.0})
    with raises(ConfigError, "'fedprox'", "-1"):
        create_plugin("fedprox", {"mu": -1})


@pytest.mark.parametrize(
    ("name", "package"), [("scaffold", "fedcore-scaffold"), ("uscc", "fedcore-fedeccr"), ("feddyn", "fedcore-feddyn")]
)
def test_an_unknown_plugin_names_its_package(monkeypatch, name, package):
    installed = {"fedavg": None, "moon": None}
    monkeypatch.setattr("fedcore.base.registry.available", lambda kind: installed)
    with raises(UnknownNameError, package):
        create_plugin(name, {})


def test_an_unknown_plugin_names_the_nearest():
    with raises(UnknownNameError, "'fedprox'"):
        create_plugin("fedprx", {})


@pytest.mark.parametrize("name", ["module:tests.nowhere.X", "module:tests.toy.Nothing", "module:x"])
def test_a_module_name_that_leads_nowhere(name):
    with raises(ConfigError):
        create_plugin(name, {})


@pytest.mark.parametrize("epochs", [{0}, {2}, {1, 5}])
def test_breaks_outside_the_local_epochs(go, epochs):
    class Paused(Plugin):
        exchanges = Exchange(("*",), lambda _: epochs)

    with raises(PluginContractError, "'paused'"):
        go(Paused, local_epochs=2)


@pytest.mark.parametrize("epoch", [1.5, 1.0, True, "1", np.float32(1), torch.tensor(1.0)], ids=repr)
def test_breaks_that_are_no_whole_numbers(go, epoch):
    class Paused(Plugin):
        exchanges = Exchange(("*",), lambda _: {epoch})

    with raises(PluginContractError, "'paused'", "exchanges", repr(epoch)):
        go(Paused, local_epochs=3)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda epochs: iter([*epochs, *epochs])])
def test_breaks_of_other_kinds(go, kind):
    called = []

    class Paused(Plugin):
        exchanges = Exchange(("*",), lambda _: kind([2, 1]))

        @hookimpl
        def mid_local_epoch(self, epoch):
            called.append(epoch)

    go(Paused, local_epochs=3, rounds=1)
    assert called == [1, 2]


@pytest.mark.parametrize(
    "patterns", [[1], {"classifier.*": 1}, (name for name in ["classifier.*"])], ids=["numbers", "mapping", "generator"]
)
def test_patterns_of_another_type(go, patterns):
    class Keeps(Plugin):
        @hookimpl
        def personal_parameters(self, model):
            return patterns

    with raises(PluginContractError, "'keeps'"):
        go(Keeps)


def test_configure_model_returns_something_else(go):
    class Wrong(Plugin):
        @hookimpl
        def configure_model(self, model):
            return torch.nn.Linear(2, 2)

    with raises(PluginContractError, "'wrong'"):
        go(Wrong)


# --- in the run ------------------------------------------------------------------------------------------


CLIENT_HOOKS = ["begin_local", "task_loss", "local_loss", "observe", "end_local", "pre_upload", "question"]
SERVER_HOOKS = ["select_clients", "begin_round", "broadcast", "server_step", "end_round"]
UPDATE_HOOKS = ["pre_aggregate", "weight", "accumulate"]


def raising(hook):
    """Return a plugin that raises in round 1, at client 2 where the hook has one."""

    def check(where, client=None):
        if where.round == 1 and client in (2, None):
            raise KeyError("broken on purpose")

    if hook in ("task_loss", "local_loss", "observe"):

        def body(self, step):
            check(step, step.client.id)

    elif hook == "pre_upload":

        def body(self, client, update):
            check(client, client.id)

    elif hook in CLIENT_HOOKS:

        def body(self, client):
            check(client, client.id)

    elif hook in UPDATE_HOOKS:

        def body(self, server, update):
            check(server, update.client)

    else:

        def body(self, server):
            check(server)

    if hook == "question":
        return type("Breaker", (Plugin,), {"asked": question(body), "begin_round": hookimpl(_ask_all)})
    return type("Breaker", (Plugin,), {hook: hookimpl(body)})


def _ask_all(self, server):
    list(server.ask("all", self.asked))


@pytest.mark.parametrize("hook", SERVER_HOOKS)
def test_an_exception_on_the_server_names_plugin_hook_and_round(go, hook):
    with raises(PluginCallError, "'breaker'", hook, "round 2", "KeyError: 'broken on purpose'") as caught:
        go(raising(hook), rounds=2)
    assert isinstance(caught.value.__cause__, KeyError)
    assert (caught.value.plugin, caught.value.hook) == ("breaker", hook)


@pytest.mark.parametrize("hook", UPDATE_HOOKS)
def test_an_update_that_makes_a_hook_raise_is_rejected_and_names_plugin_hook_round_and_client(go, hook):
    first, second = lines(go(raising(hook), rounds=2))
    assert first["failures"] == []
    (failure,) = second["failures"]
    assert (failure["client"], failure["kind"], second["accepted"]) == (2, "rejected", 3)
    assert f"'breaker' hook {hook} (round 2, client 2) raised KeyError" in failure["message"]


@pytest.mark.parametrize("hook", CLIENT_HOOKS)
def test_an_exception_on_a_client_is_its_failure_and_names_plugin_hook_round_and_client(go, hook):
    first, second = lines(go(raising(hook), rounds=2))
    assert first["failures"] == []
    (failure,) = second["failures"]
    assert (failure["client"], failure["kind"]) == (2, "raised")
    what = "question asked" if hook == "question" else f"hook {hook}"
    message = f"plugin 'breaker' {what} (round 2, client 2) raised KeyError: 'broken on purpose'"
    assert message in failure["message"]
    assert second["accepted"] == (4 if hook == "question" else 3)


@pytest.mark.parametrize(("hook", "kind"), [("end_local", "raised"), ("pre_aggregate", "rejected")])
def test_a_hook_that_ends_the_program_fails_as_one_that_raises(go, hook, kind):
    """``sys.exit()`` ended the command with exit code 0 in the middle of the run, without a word."""
    leaves = type("Leaves", (Plugin,), {hook: hookimpl(_leaves_at_2 if hook == "end_local" else _leaves_for_2)})
    (record,) = lines(go(leaves))
    (failure,) = record["failures"]
    assert (failure["client"], failure["kind"], record["accepted"]) == (2, kind, 3)
    assert f"'leaves' hook {hook} (round 1, client 2) raised SystemExit" in failure["message"]


def _leaves_at_2(self, client):
    if client.id == 2:
        sys.exit()


def _leaves_for_2(self, server, update):
    if update.client == 2:
        sys.exit()


@pytest.mark.parametrize("shape", ["(B,)", "float", "list"])
def test_a_local_loss_of_wrong_shape_gets_a_hint(go, shape):
    class Wrong(Plugin):
        @hookimpl
        def local_loss(self, step):
            value = step.features.sum(dim=1)
            return {"(B,)": Loss(value), "float": Loss(1.0), "list": [Loss(value.mean()), Loss(value)]}[shape]

    with raises(PluginContractError, "'wrong'", "1", "0"):
        go(Wrong)


def test_a_local_loss_that_is_a_tensor_gets_a_hint(go):
    class Wrong(Plugin):
        @hookimpl
        def local_loss(self, step):
            return step.features.mean()

    with raises(PluginContractError, "'wrong'"):
        go(Wrong)


def test_a_task_loss_of_wrong_shape_gets_a_hint(go):
    class Wrong(Plugin):
        @hookimpl
        def task_loss(self, step):
            return torch.nn.functional.cross_entropy(step.logits, step.y, reduction="none")

    with raises(FedcoreError, "'wrong'"):
        go(Wrong)


def test_task_scale_without_its_declaration(go):
    class Scaler(Plugin):
        @hookimpl
        def local_loss(self, step):
            return Loss(step.features.mean(), task_scale=0.5)

    with raises(PluginContractError, "'scaler'"):
        go(Scaler)

    go(type("Declared", (Scaler,), {"scales_task": True}))


class PeeksGlobal(Plugin):
    @hookimpl
    def local_loss(self, step):
        step.frozen("global")


class PeeksPrevious(Plugin):
    @hookimpl
    def local_loss(self, step):
        step.frozen("previous")


class PeeksModule(Plugin):
    @hookimpl
    def local_loss(self, step):
        return step.global_model is None


PEEKERS = {PeeksGlobal: "global", PeeksPrevious: "previous", PeeksModule: "global"}


@pytest.mark.parametrize("peeker", PEEKERS)
def test_frozen_without_reads(go, peeker):
    with raises(PluginContractError, f"'{peeker.__name__.lower()}'", "local_loss", f"'{PEEKERS[peeker]}'"):
        go(peeker)


@pytest.mark.parametrize("peeker", PEEKERS)
def test_frozen_without_reads_beside_a_plugin_that_declares_it(go, peeker):
    with raises(PluginContractError, f"'{peeker.__name__.lower()}'", "local_loss", f"'{PEEKERS[peeker]}'"):
        go(("moon", {"projection": False}), peeker)


class EndsWithNumber(Plugin):
    @hookimpl
    def end_local(self, client):
        return {"n": 3.0}


class BroadcastsNumber(Plugin):
    @hookimpl
    def broadcast(self, server):
        return {"n": 3.0}


class AnswersNumber(Plugin):
    @hookimpl
    def begin_round(self, server):
        list(server.ask("all", self.n))

    @question
    def n(self, client):
        return {"n": 3.0}


class WeighsText(Plugin):
    @hookimpl
    def weight(self):
        return "heavy"


class StepsList(Plugin):
    @hookimpl
    def server_step(self, mean):
        return list(mean)


class UpdatesNothing(Plugin):
    @hookimpl
    def pre_aggregate(self, update):
        return update.model


@pytest.mark.parametrize(
    ("cls", "hook"),
    [
        (EndsWithNumber, "end_local"),
        (BroadcastsNumber, "broadcast"),
        (AnswersNumber, "question n"),
        (WeighsText, "weight"),
        (StepsList, "server_step"),
        (UpdatesNothing, "pre_aggregate"),
    ],
)
def test_a_result_of_wrong_type_names_plugin_and_hook(go, cls, hook):
    try:
        told = str(lines(go(cls)))
    except FedcoreError as error:
        told = str(error)
    what = hook if hook.startswith("question") else f"hook {hook}"
    assert f"'{cls.__name__.lower()}' {what}" in told.replace("\\", "")


@pytest.mark.parametrize("cohort", [[], [0, 0], [4], [-1]], ids=str)
def test_a_cohort_that_is_none(go, cohort):
    class Chooser(Plugin):
        @hookimpl
        def select_clients(self, server):
            return cohort

    with raises(PluginContractError, "'chooser'"):
        go(Chooser)


@pytest.mark.parametrize(
    ("cohort", "bad"),
    [
        ([0.9, 1.7], "0.9"),
        ([0, 1.0], "1.0"),
        ([True], "True"),
        (["3"], "'3'"),
        ({1.5: 1}, "1.5"),
        (np.array([0.0, 2.0]), "0.0"),
        (torch.tensor([0.9]), "tensor(0.9000)"),
    ],
    ids=str,
)
def test_a_cohort_of_fractions_is_not_cut_to_whole_numbers(go, cohort, bad):
    class Chooser(Plugin):
        @hookimpl
        def select_clients(self, server):
            return cohort

    with raises(PluginContractError, "'chooser'", "select_clients", bad):
        go(Chooser)


KINDS = [
    lambda ids: iter(ids),
    np.array,
    torch.tensor,
    lambda ids: [np.uint8(i) for i in ids],
    lambda ids: {torch.tensor(i): 1 for i in ids},
]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_of_other_kinds_are_a_cohort(go, kind):
    class Chooser(Plugin):
        @hookimpl
        def select_clients(self, server):
            return kind([2, 0])

    assert lines(go(Chooser, rounds=1))[0]["cohort"] == [0, 2]


@pytest.mark.parametrize("method", ["add_parameters", "freeze"])
def test_what_works_in_begin_local_only(go, method):
    class Late(Plugin):
        @hookimpl
        def end_local(self, client):
            if method == "freeze":
                client.freeze(["*"])
            else:
                client.add_parameters({"a": torch.zeros(1)})

    with raises(PluginContractError, "'late'", "end_local", f"client.{method}", "begin_local") as refused:
        go(Late)
    assert str(refused.value).count("'late'") == 1


def test_a_parameter_that_is_added_twice_would_train_without_a_name(go):
    class Twice(Plugin):
        @hookimpl
        def begin_local(self, client):
            client.add_parameters({"a": torch.zeros(1)})
            client.add_parameters({"b": torch.zeros(1), "a": torch.ones(1)})

    with raises(PluginContractError, "1", "'a'"):
        go(Twice)


def test_a_text_is_no_list_of_patterns_to_freeze(go):
    class Forgot(Plugin):
        @hookimpl
        def begin_local(self, client):
            client.freeze("classifier.*")

    with raises(PluginContractError, "client.freeze"):
        go(Forgot)


def test_the_entry_that_is_no_tensor_is_named(go):
    class Counts(Plugin):
        @hookimpl
        def end_local(self, client):
            return {"a": torch.zeros(1), "n": 3}

    with raises(PluginContractError, "'n'"):
        go(Counts)


def test_ask_outside_its_hooks(go):
    class Curious(Plugin):
        @hookimpl
        def server_step(self, server):
            list(server.ask("all", self.implements))

    with raises(PluginContractError, "'curious'"):
        go(Curious)


def test_update_model_outside_post_train(go):
    class Meddler(Plugin):
        @hookimpl
        def begin_round(self, server):
            server.update_model(dict(server.model))

    with raises(PluginContractError, "'meddler'"):
        go(Meddler)


def test_update_model_beyond_corrects(go):
    class Meddler(Plugin):
        corrects = ("classifier.*",)

        @hookimpl
        def post_train(self, server):
            server.update_model({"encoder.base.fc1.bias": server.model["encoder.base.fc1.bias"]})

    with raises(PluginContractError, "'meddler'", "'encoder.base.fc1.bias'"):
        go(Meddler)


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.nn.ReLU()], ids=["object", "set", "module"])
def test_state_holds_tensors_and_json_only(go, value):
    class Hoarder(Plugin):
        @hookimpl
        def begin_round(self, server):
            server.state["x"] = value

    with raises(PluginContractError, "'x'"):
        go(Hoarder)


def test_state_is_read_only_in_a_question(go):
    class Writer(Plugin):
        @hookimpl
        def begin_round(self, server):
            list(server.ask([1], self.x))

        @question
        def x(self, client):
            client.state["x"] = 1

    with raises(PluginContractError):
        go(Writer)


def test_names_that_do_not_exist_in_results(go):
    class Owner(Plugin):
        owns = ("classifier.*",)

        @hookimpl
        def aggregate(self, server):
            return {"encoder.base.fc1.bias": server.model["encoder.base.fc1.bias"]}

    with raises(PluginContractError, "'owner'", "'encoder.base.fc1.bias'"):
        go(Owner)


def test_a_buffer_from_server_step(go):
    class Stepper(Plugin):
        @hookimpl
        def server_step(self, server):
            name = "encoder.base.2.running_mean"
            return {name: server.model[name]}

    with raises(PluginContractError, "'stepper'"):
        go(Stepper, model="module:tests.toy.batch_norm_mlp")


@pytest.mark.parametrize("fault", ["nan", "shape", "dtype"])
def test_a_broken_result_of_server_step(go, fault):
    class Stepper(Plugin):
        @hookimpl
        def server_step(self, mean):
            name, tensor = next(iter(mean.items()))
            bad = {"nan": tensor * torch.nan, "shape": tensor[:1], "dtype": tensor.double()}[fault]
            return {name: bad}

    with raises(PluginContractError, "'stepper'", "server_step"):
        go(Stepper)
