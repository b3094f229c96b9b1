"""The values that hooks exchange: losses, updates, answers, mappings of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

Tensors = dict[str, Tensor]


class Steps(int):
    """A number of optimizer steps, for ``select_clients`` to give to a client as its work in a round."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One additive term of the local objective: total = task_scale * task + sum of weight * value.

    A part whose factor is exactly 0 is left out, so that 0 * inf never becomes nan. If ``value`` is a function, it is
    called at once, but not with a weight of 0: such a term is not computed.
    """

    value: Any
    """Tensor of shape (), differentiable in the local model, or a function that returns it; None is no such term."""
    weight: float | Tensor = 1.0
    """Factor on ``value``: a number, or a tensor if it depends on the epoch."""
    task_scale: float = 1.0
    """Factor on the task loss. Only a plugin that declares ``scales_task`` may set it to another value than 1."""
    name: str | None = None
    """Name in the records, below the plugin's name. The default is the plugin's name."""

    def __post_init__(self) -> None:
        if callable(self.value):
            computed = isinstance(self.weight, Tensor) or self.weight != 0
            object.__setattr__(self, "value", self.value() if computed else None)


@dataclass(frozen=True)
class ClientUpdate:
    """The update that one client uploads after its local training.

    In the server's hooks its tensors are on the CPU. In ``pre_upload`` the model is on ``client.device``, and the
    payload is on the device where ``end_local`` left it.
    """

    client: int
    """Id of the client."""
    model: Tensors
    """The shared parameters and buffers after training, by name, without personal ones."""
    samples: int
    """Number of training samples, n_k."""
    steps: int
    """Number of optimizer steps taken, K_k."""
    lr: float
    """Local learning rate of this round."""
    momentum: float
    """Momentum of local SGD."""
    payload: dict[str, Any] = field(default_factory=dict)
    """Extra tensors by name. A hook sees its own plugin's only, ``all_updates`` and ``guard_upload`` all plugins'."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """JSON values such as the mean local losses."""
    frozen: frozenset[str] = frozenset()
    """Names of the shared parameters that plugins excluded from this round's training with ``client.freeze``."""
    version: int | None = None
    """Version of the client's state after the training; None for an empty state. Set by the core."""
    seconds: float = 0.0
    """Seconds that the client's task took. Set by the core."""
    plugin_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the task in each plugin's hooks. Set by the core."""

    def scoped(self, plugin: str) -> ClientUpdate:
        """Return this update as ``plugin`` sees it. ``payload`` is its own namespace; a hook may pop from it."""
        return replace(self, payload=self.payload.setdefault(plugin, {}))

    def merged(self, plugin: str, replacement: ClientUpdate) -> ClientUpdate:
        """Return an update that ``plugin`` made from its scoped view, with the payloads of all plugins."""
        return replace(replacement, payload={**self.payload, plugin: dict(replacement.payload)})


class Updates(list[ClientUpdate]):
    """Updates that arrived together, in dispatch order."""

    def scoped(self, plugin: str) -> Updates:
        """Return these updates as ``plugin`` sees them."""
        return Updates(update.scoped(plugin) for update in self)


class Answer(NamedTuple):
    """One client's reply to ``server.ask``."""

    client: int
    tensors: Tensors
