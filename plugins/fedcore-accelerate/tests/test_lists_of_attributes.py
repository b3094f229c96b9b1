"""Each attribute of a step and of its client has its place in the lists of captured and of stacked steps.

One that is in no list would be baked into a CUDA graph, or would be the first client's for a whole stack, in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import pytest
from typing_extensions import get_protocol_members

from fedcore import ClientContext, Step
from fedcore_accelerate import captured_steps, stacked_step
from fedcore_accelerate.stacked_step import AnyClient, NotStackable, StackedClient, StackedStep
from tests.sentences import raises

BEGIN_LOCAL = {"add_parameters", "freeze"}  # which work nowhere else

# A graph reads these from the same tensors for each batch, or is captured anew where they change (``Kind``).
# ``WatchedStep`` overrides gradients_at.
STAYS_IN_A_GRAPH = {"x", "y", "indices", "features", "logits", "model", "reference", "parameters", "global_model"}
STAYS_IN_A_GRAPH |= {"rounds", "task", "gradients_at"}

# What stays the same in a client's session: a step that reads its client is captured for this session alone.
# Notes of ``scratch`` and ``state`` are compared before and after (``held``).
STAYS_IN_A_SESSION = {"config", "id", "n", "round", "rounds", "num_classes", "task", "device", "model", "lr"}
STAYS_IN_A_SESSION |= {
    "received",
    "momentum",
    "added",
    "public",
    "class_counts",
    "parameters",
    "start",
    "previous_model",
}
STAYS_IN_A_SESSION |= {"generator", "network", "scratch", "state"}

NOTES = {"scratch", "state"}
NOT_STACKED = {"id", "public", "steps", "previous_model", "generator", "forward", "gradients", "network", *BEGIN_LOCAL}

DIFFERS = {"id", "n", "class_counts", "state", "steps", "previous_model", "generator", "forward", "gradients"}

STACKED = {"x", "y", "indices", "features", "logits", "client", "added", "parameters", "reference"}
STACKED |= {"frozen", "global_model", "previous_model", "model"}
SAME_IN_A_STACK = {"round", "rounds", "progress", "epoch", "task"}
REFUSED_IN_A_STACK = {"random", "gradients_at"}

LISTS = {
    "a captured step": (Step, captured_steps.OF_STEP, STAYS_IN_A_GRAPH),
    "a captured step's client": (ClientContext, captured_steps.OF_CLIENT, STAYS_IN_A_SESSION, BEGIN_LOCAL),
    "a stacked step": (Step, STACKED, SAME_IN_A_STACK, REFUSED_IN_A_STACK),
    "a stacked step's client": (ClientContext, stacked_step.OF_RUN, stacked_step.OF_CLIENT, NOTES, NOT_STACKED),
    "a client that stands for a stack": (ClientContext, stacked_step.OF_BEGINNING, stacked_step.REQUESTS, DIFFERS),
}


def misplaced(protocol: type, *lists: Iterable[str]) -> set[str]:
    """Return the attributes that are in no list or in several, and what a list has beyond the protocol."""
    times = Counter(name for names in lists for name in names)
    return {name for name in get_protocol_members(protocol) | times.keys() if times[name] != 1} | (
        times.keys() - get_protocol_members(protocol)
    )


@pytest.mark.parametrize("name", LISTS)
def test_each_attribute_is_in_exactly_one_list(name):
    assert misplaced(*LISTS[name]) == set()


@pytest.mark.parametrize("name", LISTS)
def test_an_attribute_that_is_added_to_a_protocol_is_missed(name):
    protocol, *lists = LISTS[name]

    class Longer(protocol, Protocol):
        mood: str

    assert misplaced(Longer, *lists) == {"mood"}
    assert misplaced(protocol, *lists, ["model"]) == {"model"}


@pytest.mark.parametrize("name", sorted(NOT_STACKED))
def test_what_cannot_be_stacked_is_refused(name):
    with raises(NotStackable, "'mine'", f"client.{name} "):
        getattr(StackedClient(None, "mine", None), name)


@pytest.mark.parametrize("name", sorted(DIFFERS))
def test_what_differs_between_clients_is_not_read_of_one_for_all(name):
    with raises(NotStackable, "'mine'", f"client.{name} "):
        getattr(AnyClient(None, "mine"), name)


def test_a_stacked_step_has_each_value_of_all_clients():
    """Of its own, or given to it: what it inherits would be the first client's."""
    given = {"x", "y", "indices", "features", "logits", "model"}
    assert vars(StackedStep).keys() >= STACKED - given | {"random"}
