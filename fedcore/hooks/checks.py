"""What hooks return, checked where they return it, so that a mistake names its plugin and hook."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from fedcore.base.types import ClientUpdate


def problem_with(hook: str, value: Any) -> str:
    """Return what is wrong with a hook's result, with what was expected; empty where nothing is."""
    if value is None or hook not in _EXPECTED:
        return ""
    fits, expected = _EXPECTED[hook]
    return "" if fits(value) else f"returned {_describe(value)}, expected {expected} or None"


def _tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(t, Tensor) for k, t in value.items())


def _patches(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, int) and _tensors(patch) for k, patch in value.items())


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _update(value: Any) -> bool:
    return isinstance(value, ClientUpdate)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def _module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return isinstance(value, Mapping)


_TENSORS = (_tensors, "a mapping of names to tensors")
_UPDATE = (_update, "a ClientUpdate (dataclasses.replace of the one given)")
_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "broadcast": _TENSORS,
    "end_local": _TENSORS,
    "answer": _TENSORS,
    "aggregate": _TENSORS,
    "server_step": _TENSORS,
    "mid_local_epoch": (_patches, "a mapping of client ids to mappings of names to tensors"),
    "weight": (_number, "a number"),
    "pre_aggregate": _UPDATE,
    "pre_upload": _UPDATE,
    "select_clients": (_whole_numbers, "a sequence of client ids"),
    "local_epoch_breaks": (_whole_numbers, "a set of epochs"),
    "personal_parameters": (_whole_numbers, "a sequence of patterns"),
    "personal_model": (_module, "a module"),
    "report": (_json, "a mapping of names to JSON values"),
}


def _describe(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        key, inner = next(iter(value.items()))
        return f"a {type(value).__name__} with {key!r}: {type(inner).__name__}"
    return f"{type(value).__name__}"
