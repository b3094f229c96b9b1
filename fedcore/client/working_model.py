"""The model that the clients of one runtime train in turn, its frozen copies, and the tensors kept for each client."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedcore.base.tensors import clone, copy_into
from fedcore.base.types import Tensors
from fedcore.client.passes import FrozenModel
from fedcore.client.setup import Setup
from fedcore.models import has_batch_norm
from fedcore.models.placement import Placement

CORE = "fedcore"
"""The core's namespace in a client's state, next to the plugins' namespaces."""


class FixedTensors:
    """Memory that outlives a client's session, so that steps captured in one session run in another."""

    def __init__(self) -> None:
        self.losses: dict[str, Tensor] = {}
        """The sums of losses, by name."""
        self._tensors: dict[str, Tensor] = {}

    def fixed(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor with this value. Its memory is the same at every call with this name."""
        held = self._tensors.get(name)
        if held is None or held.shape != value.shape:
            held = self._tensors[name] = torch.empty_like(value)
        return held.copy_(value)


class WorkingModel:
    """One model on the device, reused from client to client, so that its memory and hooks are set up once.

    :param captured: whether training steps are captured. Captured steps need tensors at fixed addresses.
    """

    def __init__(self, setup: Setup, placement: Placement, *, captured: bool) -> None:
        self.layout, self.num_classes, self.device = setup.layout, setup.task.num_classes, placement.device
        self.module = placement.model(setup.model)
        self.state = self.module.state_dict()
        """All tensors of the model by name (views, not copies)."""
        self.parameters = dict(self.module.named_parameters())
        """The parameters by name."""
        self.optimizer_state: dict[int, dict[str, Tensor]] = {}
        """The memory of the optimizer's state by a parameter's id; it is zeroed for each client."""
        self.fixed = FixedTensors() if captured else None
        self.frozen = {name: FrozenModel(self.module) for name in ("global", "previous") if setup.plugins.reads(name)}
        """The frozen copies that the run's plugins read."""
        self.first_personal = self.personal()
        """The initial values of the parameters and buffers that stay on the clients."""
        fixed_buffers = self.layout.fixed & self.layout.buffers
        self._fixed_buffers = clone({name: self.state[name] for name in fixed_buffers})
        self.smallest_batch = 2 if has_batch_norm(self.module) else 1
        """The number of samples that a training batch needs. BatchNorm needs two: one sample has no variance."""

    def load(self, tensors: Mapping[str, Tensor], excluded: Collection[str] = ()) -> None:
        """Load weights, and return to the condition before training: eval mode, no gradients.

        :param excluded: the parameters that are not trained.
        """
        copy_into(self.state, self._fixed_buffers)
        copy_into(self.state, tensors)
        self.module.eval()
        self.set_trainable(excluded)

    def set_trainable(self, excluded: Collection[str]) -> None:
        """Enable gradients of the trainable parameters that are not excluded, and drop all present gradients."""
        trainable = self.layout.trainable.difference(excluded)
        for name, parameter in self.parameters.items():
            if parameter.requires_grad != (name in trainable):
                parameter.requires_grad_(name in trainable)
            parameter.grad = None

    def load_frozen(self, start: Tensors, previous: Tensors) -> None:
        """Load the frozen copies: the model from which the round starts, and the client's previous model, if any."""
        for name, tensors in (("global", start), ("previous", previous or None)):
            if name in self.frozen:
                self.frozen[name].load(tensors)

    def excluded_modules(self, excluded: Collection[str]) -> list[nn.Module]:
        """Return the modules whose parameters are all excluded from training, in this round or always."""
        found: list[nn.Module] = []
        excluded = self.layout.fixed.union(excluded)
        if not excluded:  # nearly every run; the loop below takes time in each epoch
            return found
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            names = {f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()}
            if names and names.issubset(excluded):
                found.append(module)
        return found

    def snapshot(self) -> Tensors:
        """Return a copy of all parameters and buffers, without the fixed ones."""
        return clone({name: tensor for name, tensor in self.state.items() if name not in self.layout.fixed})

    def personal(self) -> Tensors:
        """Return a copy of the parameters and buffers that stay on the client."""
        return clone({name: self.state[name] for name in sorted(self.layout.personal)})


@dataclass(frozen=True)
class KeptModels:
    """The tensors of the model that are kept for a client, by name."""

    previous: Tensors = field(default_factory=dict)
    """The client's model after its last committed participation; empty if no plugin reads it."""
    personal: Tensors = field(default_factory=dict)
    """The parameters and buffers that stay on the client."""

    def pack(self) -> Tensors:
        """Return both as one mapping of named tensors, for the core's namespace of the client's state."""
        return {f"{kind}.{name}": tensor for kind, kept in vars(self).items() for name, tensor in kept.items()}

    @classmethod
    def unpack(cls, tensors: Mapping[str, Any]) -> KeptModels:
        """Split a mapping that :meth:`pack` made."""
        kept: dict[str, Tensors] = {"previous": {}, "personal": {}}
        for joined, tensor in tensors.items():
            kind, _, name = joined.partition(".")
            kept[kind][name] = tensor
        return cls(**kept)
