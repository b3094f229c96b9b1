"""Fingerprints for comparisons before and after a call: values, global random state, global settings."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from types import FunctionType, ModuleType
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn

from fedcore import Tensors

_DEPTH = 6


def fingerprint(value: Any, depth: int = _DEPTH) -> Any:
    """Return a value that is equal for equal contents of tensors, generators, containers and plain objects."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), str(value.dtype), _digest(value.detach().cpu().contiguous()))
    if isinstance(value, np.ndarray):
        return ("array", value.shape, str(value.dtype), value.tobytes())
    if isinstance(value, torch.Generator):
        return _digest(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return (type(value).__name__, repr(value))
    if depth == 0 or isinstance(value, (type, FunctionType, ModuleType)):
        return id(value)
    if isinstance(value, Mapping):
        return tuple((fingerprint(k, depth - 1), fingerprint(v, depth - 1)) for k, v in list(value.items()))
    if isinstance(value, Set):
        return sorted(str(fingerprint(item, depth - 1)) for item in list(value))
    if isinstance(value, (list, tuple, deque)):
        return tuple(fingerprint(item, depth - 1) for item in list(value))
    return (id(value), fingerprint(getattr(value, "__dict__", None), depth - 1))


def tensor_in(value: Any, depth: int = 4) -> Tensor | nn.Module | None:
    """Return a tensor or module that a value is, or holds."""
    if isinstance(value, (Tensor, nn.Module)) or depth == 0:
        return value if isinstance(value, (Tensor, nn.Module)) else None
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    return next((held for item in inner if (held := tensor_in(item, depth - 1)) is not None), None)


def random_states() -> dict[str, Any]:
    """Return the state of every global random generator by library."""
    return {
        "torch": _digest(torch.get_rng_state()),
        "NumPy": fingerprint(np.random.get_state(legacy=False)),
        "Python": random.getstate(),
    }


def global_settings() -> dict[str, Any]:
    """Return the global settings that a plugin could change in the process."""
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch's anomaly detection": torch.is_anomaly_enabled(),
    }


def shared_places(cls: type) -> dict[str, Any]:
    """Return the fingerprints, by name, of what outlives a plugin's objects: its classes, modules and closures.

    A cached method counts its calls. Cached functions of a module are left out: they hold constants.
    """
    places: dict[str, Any] = {}
    for owner in cls.__mro__:
        if owner in (object, Generic) or owner.__module__.partition(".")[0] == "fedcore":
            continue
        for name, value in vars(owner).items():
            cached = getattr(getattr(value, "__func__", value), "cache_info", None)
            if cached is not None:
                places[f"the cache of {owner.__name__}.{name}"] = cached()
            elif isinstance(value, FunctionType):
                places.update(_closure(f"{owner.__name__}.{name}", value))
            elif not name.startswith("__"):
                places[f"{owner.__name__}.{name}"] = fingerprint(value)
        for module in _modules(owner.__module__):
            for name, value in list(vars(module).items()):
                if not name.startswith("__") and not isinstance(value, (type, FunctionType, ModuleType)):
                    places[f"{module.__name__}.{name}"] = fingerprint(value)
    return places


def _closure(where: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name} in the closure of {where}", fingerprint(cell.cell_contents)
        except ValueError:  # an empty cell
            continue


def _modules(name: str) -> list[ModuleType]:
    """Return a module and the imported modules of the same package."""
    root = name.rpartition(".")[0] or name
    names = [other for other in list(sys.modules) if other in (name, root) or other.startswith(f"{root}.")]
    return [sys.modules[each] for each in names]


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def by_path(payload: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
    """Return the tensors of all plugins by ``plugin/name``."""
    return {f"{plugin}/{name}": tensor for plugin, tensors in payload.items() for name, tensor in tensors.items()}


def clone(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return copies that own their memory."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
