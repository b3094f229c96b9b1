"""State: copies on reading, sums, and what is undone when an update is rejected."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore.base.errors import PluginContractError
from fedcore.base.plugin_state import State, States
from tests.sentences import raises


def test_reading_gives_a_copy():
    base = {"t": torch.zeros(2), "list": [1, {"a": 2}]}
    state = State(base)
    state["t"].add_(1)
    state["list"][1]["a"] = 3
    assert base["t"].tolist() == [0, 0]
    assert base["list"] == [1, {"a": 2}]
    assert state["t"].tolist() == [1, 1], "an edit in place must reach the next version"
    kept = state.values_to_keep()
    assert kept["t"].tolist() == [1, 1]
    assert kept["list"] == [1, {"a": 3}]


def test_writing_copies_and_detaches():
    tensor = torch.zeros(2, requires_grad=True)
    state = State()
    state["t"] = tensor
    with torch.no_grad():
        tensor.add_(1)
    assert state["t"].tolist() == [0, 0]
    assert not state["t"].requires_grad


def test_mapping():
    state = State({"a": 1, "b": 2})
    state["c"] = 3
    del state["a"]
    assert dict(state) == {"b": 2, "c": 3}
    assert len(state) == 2
    assert "a" not in state
    with pytest.raises(KeyError):
        state["a"]
    with pytest.raises(KeyError):
        del state["a"]
    assert state.pop("b") == 2
    assert state.values_to_keep() == {"c": 3}


def test_read_only():
    base = {"t": torch.zeros(1), "n": 1}
    state = State(base, plugin="moon", read_only="answer")
    with raises(PluginContractError, "'moon'", "'n'"):
        state["n"] = 2
    with raises(PluginContractError):
        del state["n"]
    state["t"].add_(1)
    assert state.values_to_keep()["t"].tolist() == [0]


@pytest.mark.parametrize("value", [object(), {1}, b"x", {"a": torch.zeros(1)}, [torch.zeros(1)]], ids=range(5))
def test_what_is_no_json(value):
    with raises(PluginContractError, "'x'"):
        State()["x"] = value


@pytest.mark.parametrize(("name", "value"), [(3, 1), ("x", {3: 1}), ("x", [{"a": {2: 0}}])])
def test_numbers_are_no_names(name, value):
    """JSON would have them as texts: a count by client would begin anew in each round."""
    with raises(PluginContractError):
        State()[name] = value


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda seen: seen.update({3: 1}), ("3", "'3'")),
        (lambda seen: seen.update(a=[torch.zeros(1)]), ()),
        (lambda seen: seen.update(a=torch.nn.Parameter(torch.zeros(1))), ()),
    ],
)
def test_an_edit_in_place_is_checked_when_the_state_is_kept(edit, named):
    states = States()
    edit(states.of("p").setdefault("seen", {}))
    with raises(PluginContractError, "'p'", "'seen'", *named):
        states.snapshot()


def test_namespaces_and_snapshot():
    states = States({"one": {"n": 1}, "two": {"t": torch.ones(1)}})
    states.of("one")["n"] = 2
    del states.of("two")["t"]
    states.of("three")["x"] = [1]
    assert states.of("one") is states.of("one")
    assert states.snapshot() == {"one": {"n": 2}, "three": {"x": [1]}}


# --- sums and undoing --------------------------------------------------------------------------------------------


def test_a_running_sum_is_float64_and_as_adding_in_place():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(3, 2, generator=generator) for _ in range(4)]
    state, expected = State({"base": torch.ones(3, 2, dtype=torch.float64)}), torch.zeros(3, 2, dtype=torch.float64)
    for number, part in enumerate(parts):
        state.add("sum", part, weight=0.1 * number)
        state.add("base", part)
        expected.add_(part, alpha=0.1 * number)
    assert state["sum"].dtype == torch.float64
    assert torch.equal(state["sum"], expected)
    total = torch.ones(3, 2, dtype=torch.float64)
    for part in parts:
        total.add_(part)
    assert torch.equal(state["base"], total)


def test_a_sum_keeps_no_view_and_leaves_the_committed_one():
    base = {"sum": torch.zeros(2, dtype=torch.float64)}
    state, part = State(base), torch.ones(2, dtype=torch.float64)
    state.add("sum", part)
    state.add("other", part)
    part.fill_(9)
    assert state["sum"].tolist() == state["other"].tolist() == [1, 1]
    assert base["sum"].tolist() == [0, 0]


def test_a_sum_that_does_not_fit():
    state = State({"text": "a", "single": torch.zeros(2)}, plugin="p")
    for name in ("text", "single"):
        with raises(PluginContractError, "'p'", name):
            state.add(name, torch.ones(2))
    state.add("sum", torch.ones(2))
    with raises(ValueError, "2", "3"):
        state.add("sum", torch.ones(3))
    with raises(PluginContractError):
        State(read_only="answer").add("sum", torch.ones(2))


def change(state, kind):
    """Change a state in one of the ways that a hook has."""
    if kind == "set":
        state["own"] = torch.full((2,), 7.0)
    elif kind == "in place":
        state["own"].add_(1)
    elif kind == "base in place":
        state["base"].add_(1)
    elif kind == "list":
        state["list"].append(3)
    elif kind == "delete":
        del state["base"]
    elif kind == "delete unread":
        del state["unread"]
    elif kind == "pop":
        state.pop("own")
    elif kind == "add":
        state.add("sum", torch.ones(2))
    elif kind == "add to base":
        state.add("base sum", torch.ones(2))
    elif kind == "new":
        state.add("new", torch.ones(2))


CHANGES = ["set", "in place", "base in place", "list", "delete", "delete unread", "pop", "add", "add to base", "new"]


@settings(deadline=None, max_examples=60)
@given(kinds=st.lists(st.sampled_from(CHANGES), max_size=6), earlier=st.lists(st.sampled_from(CHANGES), max_size=2))
def test_what_an_update_wrote_is_undone_whatever_it_was(kinds, earlier):
    base = {"base": torch.zeros(2), "base sum": torch.zeros(2, dtype=torch.float64), "list": [1, 2], "unread": [3]}
    states = States({"p": base})
    state = states.of("p")
    state["own"], state["list"] = torch.zeros(2), [1]
    state.add("sum", torch.ones(2))

    def held():
        """Return the values, without the one that nobody reads."""
        read = {name: state[name] for name in state if name != "unread"}
        return {name: value.tolist() if hasattr(value, "tolist") else list(value) for name, value in read.items()}

    def tried(kinds):
        for kind in kinds:
            with suppress(KeyError):  # deleted before
                change(state, kind)

    with states.undone_on_error(["p"]):
        tried(earlier)
    before, order = held(), sorted(state)
    with suppress(ArithmeticError), states.undone_on_error(["p"]):
        tried(kinds)
        raise ArithmeticError
    assert held() == before
    assert sorted(state) == order
    assert {name: value.tolist() if hasattr(value, "tolist") else value for name, value in base.items()} == {
        "base": [0, 0], "base sum": [0, 0], "list": [1, 2], "unread": [3]
    }  # fmt: skip


def test_only_what_an_update_touches_is_copied(monkeypatch):
    copied, clone = [], torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: copied.append(tensor) or clone(tensor))
    states = States({})
    state = states.of("p")
    for client in range(5):
        with states.undone_on_error(["p"]):
            state[f"model.{client}"] = torch.zeros(2)
            state.add("sum", torch.ones(2))
    assert len(copied) == 5  # what is set
    with states.undone_on_error(["p"]):
        state["model.3"].add_(1)
    assert len(copied) == 6
