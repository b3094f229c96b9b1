"""The table of declarations: complete, and the same for the checks and for ``plugins show``."""

from __future__ import annotations

import inspect
import pydoc
import re
from itertools import product

import pytest

from fedcore import Exchange, Plugin, hookimpl
from fedcore.base.errors import PluginConflictError
from fedcore.hooks.checks import EXCLUSIVE
from fedcore.hooks.declarations import TABLE, refuse_together
from fedcore.hooks.plugin import ATTRIBUTES
from fedcore.hooks.plugins import PluginSet
from fedcore_testing.card import excluded_by, meanings
from tests.sentences import raises
from tests.support import name_of


def test_the_table_holds_every_attribute_with_its_text_and_every_exclusive_hook():
    assert set(meanings()) == {row.name for row in ATTRIBUTES}
    assert meanings()["owns"] == "Parameters and buffers that ``aggregate`` returns."
    assert meanings()["exchanges"].endswith("in the middle of their training.")
    assert set(TABLE) == EXCLUSIVE | {row.name for row in ATTRIBUTES}
    assert len(meanings()) == 10


def test_help_on_plugin_says_what_each_declaration_means():
    shown = pydoc.plain(pydoc.render_doc(Plugin))
    described = {name: text for name, text in re.findall(r":ivar (\w+): (.+)", shown) if len(text.split()) > 3}
    assert set(described) == {row.name for row in ATTRIBUTES}


def test_without_docstrings_there_are_no_texts(monkeypatch):
    monkeypatch.setattr(inspect, "getdoc", lambda _: None)
    assert set(meanings()) == {row.name for row in ATTRIBUTES}
    assert set(meanings().values()) == {""}


@hookimpl
def _returns_none(self):
    return None


def declaring(title: str, name: str) -> type[Plugin]:
    """Return a plugin class with one declaration of the table."""
    row = TABLE[name]
    if row.name in EXCLUSIVE:
        return type(title, (Plugin,), {name: _returns_none})
    value = (row.value,) if row.value else ("*",) if row.patterns else True
    value = Exchange(("*",), lambda epochs: ()) if name == "exchanges" else value
    return type(title, (Plugin,), {row.name: value})


CONFLICTS = [
    *((name, name) for name, row in TABLE.items() if row.alone),
    *((name, other) for name, row in TABLE.items() for other in row.excludes),
]


def test_what_excludes_what():
    hooks = {"task_loss", "gradients", "weight", "select_clients", "personal_model"}
    assert hooks | {"guard_upload"} == EXCLUSIVE
    assert {name for name, other in CONFLICTS if name == other} - EXCLUSIVE == {"scales_task", "server_optimizer"}
    assert {pair for pair in CONFLICTS if pair[0] != pair[1]} == {
        ("server_optimizer", "owns"),
        ("assumes", "exchanges"),
        ("encodes", "guard_upload"),
    }


@pytest.mark.parametrize(("name", "other"), CONFLICTS)
def test_what_is_refused_stands_on_both_cards(name, other):
    one, two = declaring("One", name), declaring("Two", other)
    for cls in (one, two):
        PluginSet.create({name_of(cls): {}})
    said = name if name == other else other.partition("_")[0].removesuffix("s")
    for pair in ((one, two), (two, one)):
        with raises(PluginConflictError, "'one'", "'two'", said):
            PluginSet.create({name_of(cls): {} for cls in pair})
    article = "another" if name == other else "a"
    assert f"{article} {TABLE[other].plugin}" in excluded_by(one)
    assert f"{article} {TABLE[name].plugin}" in excluded_by(two)


def test_every_two_declarations_go_together_that_do_not_exclude_each_other():
    refused = set()
    for name, other in product(TABLE, TABLE):
        pair = declaring("One", name)(), declaring("Two", other)()
        for plugin in pair:
            plugin.name = type(plugin).__name__.lower()
        try:
            refuse_together(*pair)
        except PluginConflictError:
            refused.add((name, other))
    assert refused == {*CONFLICTS, *((other, name) for name, other in CONFLICTS)}


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.patterns])
def test_patterns_stand_on_the_card(name):
    lines = excluded_by(declaring("One", name))
    assert f"another plugin that {name} any of *" in lines
    assert ("a plugin that keeps any of * on the clients" in lines) is TABLE[name].shared


def test_what_the_set_up_refuses_by_names_stands_on_the_cards():
    unless = "unless what is started stays on the clients"
    assert f"a {TABLE['starts'].plugin}, {unless}" in excluded_by(declaring("One", "assumes"))
    assert f"a {TABLE['assumes'].plugin}, {unless}" in excluded_by(declaring("One", "starts"))
    follows = type("One", (Plugin,), {"assumes": ("cross-entropy",)})
    assert f"a {TABLE['task_loss'].plugin}" in excluded_by(follows)
    assert any("assumes cross-entropy" in line for line in excluded_by(declaring("One", "task_loss")))
    keeps = type("One", (Plugin,), {"personal_parameters": _returns_none})
    assert excluded_by(keeps) == [
        "a plugin that keeps the same parameters on the clients",
        "a plugin that owns, exchanges or corrects any of the parameters that stay on the clients",
    ]


def test_a_plugin_without_declarations_excludes_nothing():
    assert excluded_by(Plugin) == []
