"""The model that the clients of one runtime train in turn, and its frozen copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from fedcore.base.tensors import clone
from fedcore.base.types import Tensors
from fedcore.client.frozen import FrozenModel, load_state
from fedcore.hooks.setup import Setup
from fedcore.models import has_batch_norm
from fedcore.models.placement import Placement


class WorkingModel:
    """One model on the device, reused from client to client, so that its memory and hooks are set up once.

    :ivar module: the model; ``state`` its tensors by name, in the same memory.
    :ivar frozen: the frozen copies that the run's plugins read, by name: ``global``, ``previous``.
    :ivar first_personal: the initial values of the parameters that stay on the clients.
    :ivar smallest_batch: samples that a training batch needs; 2 with BatchNorm, as one sample has no variance.
    """

    def __init__(self, setup: Setup, placement: Placement) -> None:
        self.layout, self.num_classes, self.device = setup.layout, setup.task.num_classes, placement.device
        self.module = placement.model(setup.model)
        self.state = self.module.state_dict()
        self.frozen = {name: FrozenModel(self.module) for name in ("global", "previous") if setup.plugins.reads(name)}
        self.first_personal = self.personal()
        self.smallest_batch = 2 if has_batch_norm(self.module) else 1

    def load(self, tensors: Mapping[str, Tensor], excluded: Collection[str] = ()) -> None:
        """Take weights, and return to the condition before training: eval mode, no gradients.

        :param excluded: parameters that are not trained.
        """
        load_state(self.state, tensors)
        self.module.eval()
        self.set_trainable(excluded)

    def set_trainable(self, excluded: Collection[str]) -> None:
        """Enable gradients of the trainable parameters that are not excluded, and drop the gradients of before."""
        trainable = self.layout.trainable.difference(excluded)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in trainable)
            parameter.grad = None

    def load_frozen(self, start: Tensors, previous: Tensors) -> None:
        """Load the frozen copies: the model that the round starts from, and the client's previous one if there is."""
        for name, tensors in (("global", start), ("previous", previous or None)):
            if name in self.frozen:
                self.frozen[name].load(tensors)

    def excluded_modules(self, excluded: Collection[str]) -> list[nn.Module]:
        """Return the modules all of whose parameters are excluded from training."""
        found: list[nn.Module] = []
        if not excluded:  # as for nearly every run
            return found
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            names = {f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()}
            if names and names.issubset(excluded):
                found.append(module)
        return found

    def snapshot(self) -> Tensors:
        """Return a copy of all parameters and buffers."""
        return clone(self.state)

    def shared(self) -> Tensors:
        """Return a copy of the parameters and buffers that travel."""
        return clone({name: self.state[name] for name in self.layout.shared})

    def personal(self) -> Tensors:
        """Return a copy of those that stay on the client."""
        return clone({name: self.state[name] for name in sorted(self.layout.personal)})
