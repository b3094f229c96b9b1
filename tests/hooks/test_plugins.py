"""The plugins of a run: their order, and what cannot be combined."""

from __future__ import annotations

from itertools import permutations

import pytest

import fedcore
from fedcore import Exchange, Plugin, RunConfig, hookimpl
from fedcore.base.errors import (
    ConfigError,
    FedcoreError,
    PluginConflictError,
    PluginContractError,
)
from fedcore.hooks.plugins import PluginSet
from tests.hooks.refusals import refused
from tests.sentences import raises
from tests.support import config, name_of


def marked(title, **marks):
    return type(title, (Plugin,), {"report": hookimpl(**marks)(lambda self: {"by": self.name})})


def test_plugins_can_be_first_and_last():
    classes = [marked("Last", trylast=True), marked("Plain"), marked("First", tryfirst=True)]
    plugins = PluginSet.create({name_of(cls): {} for cls in classes})
    assert [plugin.name for plugin in plugins] == ["last", "plain", "first"]
    assert [plugin.name for plugin, _ in plugins.each("report")] == ["first", "plain", "last"]


@pytest.mark.parametrize("mark", ["wrapper", "hookwrapper"])
def test_wrappers_are_refused(mark):
    class Pushy(Plugin):
        @hookimpl(**{mark: True})
        def observe(self, step):
            yield

    assert refused(Pushy, "a wrapper", "observe").hook == "observe"


def declaring(title, declaration, *patterns):
    value = Exchange(patterns, lambda epochs: ()) if declaration == "exchanges" else patterns
    return type(title, (Plugin,), {declaration: value})


@pytest.mark.parametrize("declaration", ["owns", "exchanges", "corrects", "encodes"])
def test_overlaps(declaration):
    names = ["encoder.w", "classifier.weight", "classifier.bias"]
    one = declaring("One", declaration, "classifier.*")
    other = declaring("Other", declaration, "*.bias")
    apart = declaring("Apart", declaration, "encoder.*")
    plugins = PluginSet.create({name_of(one): {}, name_of(other): {}})
    with raises(PluginConflictError, "'one'", "'other'", declaration, "classifier.bias"):
        plugins.check_names(names, {})
    PluginSet.create({name_of(one): {}, name_of(apart): {}}).check_names(names, {})


@pytest.mark.parametrize("declaration", ["owns", "exchanges", "corrects"])
def test_overlap_with_anothers_personal_parameters(go, declaration):
    class Other(Plugin):
        @hookimpl
        def personal_parameters(self, model):
            return ["classifier.*"]

    one = declaring("One", declaration, "classifier.weight")
    for pair in ((one, Other), (Other, one)):
        with raises(PluginConflictError, "'one'", "'other'", declaration, "classifier.weight"):
            go(*pair)


@pytest.mark.parametrize("declaration", ["owns", "exchanges", "corrects", "encodes"])
def test_a_pattern_that_matches_nothing(go, declaration):
    cls = declaring("Lost", declaration, "clasifier.*")
    with raises(PluginContractError, "'lost'", declaration, "'clasifier.*'"):
        go(cls)


def keeping(title: str, *patterns: str) -> type[Plugin]:
    """Return a plugin class that keeps parameters on the clients."""
    return type(title, (Plugin,), {"personal_parameters": hookimpl(lambda self, model: patterns)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("classifier.*", "classifier.bias"),
        ("*", "classifier.bias"),
        ("*.bias", "*.bias"),
        ("encoder.*", "classifier.*"),
    ],
)
def test_two_plugins_that_keep_parameters_each_add_some_and_leave_some(go, one, other):
    for pair in ((keeping("One", one), keeping("Other", other)), (keeping("Other", other), keeping("One", one))):
        with raises(PluginConflictError, "'one'", "'other'"):
            go(*pair)


def started(title: str, pattern: str, *kept: str) -> type[Plugin]:
    """Return a plugin class that chooses where clients start, and keeps parameters on them."""
    hooks = {"begin_local": hookimpl(lambda self, client: None), "starts": (pattern,)}
    return type(title, (keeping("Keeping", *kept),), hooks)


def test_a_conflict_names_the_plugin_that_keeps_the_parameters(go):
    weights, biases = keeping("Weights", "classifier.weight"), keeping("Biases", "*.bias")
    for order in permutations((weights, biases, declaring("One", "exchanges", "*.bias"))):
        with raises(PluginConflictError, "'one'", "'biases'"):
            go(*order)
    for order in permutations((keeping("Nothing"), keeping("Everything", "*"), Moves)):
        with raises(PluginConflictError, "'everything'"):
            go(*order)


def test_a_plugin_may_start_what_it_keeps_unless_another_keeps_it_too(go):
    own = started("Own", "classifier.*", "classifier.*")
    for order in permutations((own, keeping("Base", "encoder.base.fc1.*"))):
        go(*order, client_test_fraction=0.2)
    for order in permutations((own, keeping("Biases", "*.bias"))):
        with raises(PluginConflictError, "'own'", "'classifier.bias'", "'biases'"):
            go(*order)


class Moves(Plugin):
    assumes = ("displacement",)


def test_a_personal_pattern_that_matches_nothing(go):
    class Lost(Plugin):
        @hookimpl
        def personal_parameters(self, model):
            return ["head.*"]

    with raises(PluginContractError, "'lost'", "'head.*'"):
        go(Lost)


def test_a_refused_run_writes_nothing(tmp_path):
    class Lost(Plugin):
        owns = ("nothing",)

    with pytest.raises(PluginContractError):
        fedcore.run(config(tmp_path, Lost, out=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_duplicate(tmp_path):
    with raises(ConfigError, "'fedprox'"):
        PluginSet.create({"fedprox": {}, "module:fedcore_fedprox.FedProx": {}})
    with raises(ConfigError, "'moon'", "2"):
        RunConfig.create({"plugins": ["moon", "moon"]})


def test_a_plugin_with_the_name_of_the_builtin_one():
    class FedAvg(Plugin):
        pass

    with raises(FedcoreError):
        PluginSet.create({name_of(FedAvg): {}})
