"""The model that the clients of one runtime train in turn, its frozen copies, and the part kept for each client."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fedcore.base.tensors import clone, copy_into
from fedcore.base.types import Tensors
from fedcore.client.frozen import FrozenModel
from fedcore.client.setup import Setup
from fedcore.models import has_batch_norm
from fedcore.models.modes import Modes
from fedcore.models.placement import Placement

CORE = "fedcore"
"""Namespace of the core in a client's state, beside those of the plugins."""

_PREVIOUS, _PERSONAL = "previous.", "personal."


class WorkingModel:
    """One model on the device, reused from client to client, so that its memory and hooks are set up once.

    :ivar module: the model; ``state`` its tensors by name, in the same memory; ``parameters`` those that are such.
    :ivar optimizer_state: the memory of the optimizer's state by a parameter's id, which is zeroed for each client.
    :ivar modes: switches the model between training and evaluation.
    :ivar frozen: the frozen copies that the run's plugins read, by name: ``global``, ``previous``.
    :ivar first_personal: the initial values of the parameters that stay on the clients.
    :ivar smallest_batch: samples that a training batch needs; 2 with BatchNorm, as one sample has no variance.
    """

    def __init__(self, setup: Setup, placement: Placement) -> None:
        self.layout, self.num_classes, self.device = setup.layout, setup.task.num_classes, placement.device
        self.module = placement.model(setup.model)
        self.state = self.module.state_dict()
        self.parameters = dict(self.module.named_parameters())
        self.modes = Modes(self.module)
        self.optimizer_state: dict[int, dict[str, Tensor]] = {}
        self.frozen = {name: FrozenModel(self.module) for name in ("global", "previous") if setup.plugins.reads(name)}
        self.first_personal = self.personal()
        fixed_buffers = self.layout.fixed & self.layout.buffers
        self._fixed_buffers = clone({name: self.state[name] for name in fixed_buffers})
        self.smallest_batch = 2 if has_batch_norm(self.module) else 1

    def load(self, tensors: Mapping[str, Tensor], excluded: Collection[str] = ()) -> None:
        """Take weights, and return to the condition before training: eval mode, no gradients.

        :param excluded: parameters that are not trained.
        """
        copy_into(self.state, self._fixed_buffers)
        copy_into(self.state, tensors)
        self.modes.switch(training=False)
        self.set_trainable(excluded)

    def set_trainable(self, excluded: Collection[str]) -> None:
        """Enable gradients of the trainable parameters that are not excluded, and drop the gradients of before."""
        trainable = self.layout.trainable.difference(excluded)
        for name, parameter in self.parameters.items():
            if parameter.requires_grad != (name in trainable):
                parameter.requires_grad_(name in trainable)
            parameter.grad = None

    def load_frozen(self, start: Tensors, previous: Tensors) -> None:
        """Load the frozen copies: the model that the round starts from, and the client's previous one, if any."""
        for name, tensors in (("global", start), ("previous", previous or None)):
            if name in self.frozen:
                self.frozen[name].load(tensors)

    def excluded_modules(self, excluded: Collection[str]) -> list[nn.Module]:
        """Return the modules all of whose parameters are excluded from training, in this round or always."""
        found: list[nn.Module] = []
        excluded = self.layout.fixed.union(excluded)
        if not excluded:  # as for nearly every run
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
        """Return a copy of those that stay on the client."""
        return clone({name: self.state[name] for name in sorted(self.layout.personal)})


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
