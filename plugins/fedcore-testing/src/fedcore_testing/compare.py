"""Comparisons of two runs: models, records and the states of server and clients, bit by bit or up to rounding."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedcore import RunResult
from fedcore.tools import RunDirectory
from fedcore_testing.federation import committed, records, weights
from fedcore_testing.fingerprint import fingerprint

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""What counts as rounding."""

States = dict[str, dict[str, Any]]
"""A place, as messages name it -> plugin -> what the plugin keeps there."""


def require_same(one: RunResult, other: RunResult, how: str) -> None:
    """Compare models, records and states, bit by bit.

    :raises AssertionError: begins with ``how`` and names the first difference.
    """
    a, b = weights(one), weights(other)
    differ = sorted(name for name in {*a, *b} if fingerprint(a.get(name)) != fingerprint(b.get(name)))
    assert not differ, f"{how}, the global model differs in {differ[0]!r}"
    for mine, theirs in zip(records(one), records(other), strict=True):
        keys = sorted(key for key in {*mine, *theirs} if fingerprint(mine.get(key)) != fingerprint(theirs.get(key)))
        assert not keys, f"{how}, the records of round {mine.get('round', 'post_train')} differ in {keys[0]!r}"
    require_same_states(one, other, how)


def require_same_states(one: RunResult, other: RunResult, how: str, *, but: Collection[str] = ()) -> None:
    """Compare the states of server and clients, bit by bit.

    :param but: plugins whose states are left out.
    """
    mine, theirs = states_of(one, but), states_of(other, but)
    for where in {**mine, **theirs}:
        assert fingerprint(mine.get(where)) == fingerprint(theirs.get(where)), f"{how}, {where} differs"


def require_close_states(one: RunResult, other: RunResult, how: str) -> None:
    """Compare the states of server and clients up to rounding."""
    mine, theirs = states_of(one), states_of(other)
    for where in {**mine, **theirs}:
        difference = next(_differences(mine.get(where, {}), theirs.get(where, {})), None)
        assert difference is None, f"{how}, {where}{difference} differs"


def states_of(result: RunResult, but: Collection[str] = ()) -> States:
    """Return the committed states of a run by place, the server's first."""
    state, clients = committed(result), RunDirectory(result.directory).clients
    places = {"server.state": state.plugins}
    for client, version in state.manifest.items():
        places[f"the state of client {client}"] = clients.read(client, version)
    return {
        where: {plugin: values for plugin, values in kept.items() if plugin not in but}
        for where, kept in places.items()
    }


def _differences(one: Any, other: Any) -> Iterator[str]:
    """Yield the places, as indices, in which two values differ by more than rounding."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            if (key in one) != (key in other):
                yield f"[{key!r}]"
            else:
                yield from (f"[{key!r}]{place}" for place in _differences(one[key], other[key]))
    elif not close(one, other):
        yield ""


def close(one: Any, other: Any) -> bool:
    """Return whether two values are equal, tensors and numbers up to rounding."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point():
            return torch.equal(one, other)
        return torch.allclose(one.double(), other.double(), rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or (math.isnan(one) and math.isnan(other))
    return bool(type(one) is type(other) and one == other)
