"""The models that the core keeps for a client between its participations, beside the plugins' states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcore.base.types import Tensors

CORE = "fedcore"
"""Namespace of the core in a client's state, beside those of the plugins."""

_PREVIOUS, _PERSONAL = "previous.", "personal."


@dataclass(frozen=True)
class KeptModels:
    """Tensors by name in the model; empty where there are none.

    :param previous: the client's model after its last committed participation, where a plugin reads it.
    :param personal: the parameters that stay on the client.
    """

    previous: Tensors = field(default_factory=dict)
    personal: Tensors = field(default_factory=dict)

    def pack(self) -> Tensors:
        """Return both as one set of named tensors, the core's namespace of the client's state."""
        return {
            **{f"{_PREVIOUS}{name}": tensor for name, tensor in self.previous.items()},
            **{f"{_PERSONAL}{name}": tensor for name, tensor in self.personal.items()},
        }

    @classmethod
    def unpack(cls, tensors: Mapping[str, Any]) -> KeptModels:
        """Return what :meth:`pack` joined."""
        return cls(_under(_PREVIOUS, tensors), _under(_PERSONAL, tensors))


def _under(prefix: str, tensors: Mapping[str, Any]) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
