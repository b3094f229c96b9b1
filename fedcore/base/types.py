"""The values that hooks exchange: losses, updates, answers, mappings of tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """One additive term of the local objective: total = task_scale * task + sum of weight * value.

    A part of scale exactly 0 is left out, so that 0 * inf never becomes nan.

    :param value: tensor of shape (), differentiable in the local model.
    :param weight: factor on ``value``; a number, or a tensor where it depends on the epoch.
    :param task_scale: factor on the task loss; other than 1 only in a plugin that declares ``scales_task``.
    :param name: name in the records, below the plugin's; default the plugin's own.
    """

    value: Tensor
    weight: float | Tensor = 1.0
    task_scale: float = 1.0
    name: str | None = None


@dataclass(frozen=True)
class ClientUpdate:
    """What one client sends up after its local training.

    In the server's hooks its tensors are on the CPU. In ``pre_upload`` the model is on ``client.device``, the payload
    where ``end_local`` left it.

    :param client: id of the client.
    :param model: the shared parameters and buffers after training, by name (no personal ones).
    :param samples: training samples, n_k.
    :param steps: optimizer steps that were executed, K_k.
    :param lr: local learning rate of this round.
    :param momentum: momentum of local SGD.
    :param payload: extra tensors; a hook sees those of its own plugin only.
    :param metrics: JSON values such as the mean local losses.
    :param frozen: the shared parameters that plugins excluded from this round's training (``client.freeze``).
    :param version: of the client's state after the training; None where it is empty. The core sets it, and the rest.
    :param seconds: how long the client's task took; ``plugin_seconds`` how much of it in each plugin's hooks.
    """

    client: int
    model: Tensors
    samples: int
    steps: int
    lr: float
    momentum: float
    payload: dict[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    version: int | None = None
    seconds: float = 0.0
    plugin_seconds: Mapping[str, float] = field(default_factory=dict)

    def scoped(self, plugin: str) -> ClientUpdate:
        """Return this update as ``plugin`` sees it: ``payload`` is its own namespace, shared for popping."""
        seen = copy.copy(self)  # a tenth of the time of dataclasses.replace
        object.__setattr__(seen, "payload", self.payload.setdefault(plugin, {}))
        return seen

    def merged(self, plugin: str, seen: ClientUpdate) -> ClientUpdate:
        """Return ``seen``, which ``plugin`` returned from its scoped view, with the payloads of all plugins."""
        return replace(seen, payload={**self.payload, plugin: dict(seen.payload)})


class Answer(NamedTuple):
    """One client's reply to ``server.ask``."""

    client: int
    tensors: Tensors
