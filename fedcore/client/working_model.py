"""The model that the clients of one runtime train in turn, its frozen copies, and passes over a client's samples.

Each pass takes the samples in fixed chunks of the given order, so that the bits do not depend on who asks first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcore.base.seeding import global_generators
from fedcore.base.tensors import clone, copy_into, numbers
from fedcore.base.types import Tensors
from fedcore.client.setup import Setup
from fedcore.data.client_data import ClientData
from fedcore.models import Outputs
from fedcore.models.placement import forward_chunk
from fedcore.models.split import PlainAttributes, SplitModel, copied, evaluating

MeanLoss = Callable[[Outputs, Tensor], Tensor]
"""Takes a model's outputs and the labels (B,); returns the mean loss, of shape ()."""


def _order(data: ClientData, positions: Tensor | None) -> Tensor:
    """Return the positions of a pass; default all of the client's samples."""
    return (torch.arange(len(data)) if positions is None else positions).to(data.labels.device)


def all_outputs(model: SplitModel, data: ClientData, positions: Tensor | None = None) -> Outputs:
    """Return a model's outputs on a client's samples (default all), in the given order."""
    order = _order(data, positions)
    with torch.no_grad():
        outputs = [model(data.inputs(chunk)) for chunk in order.split(forward_chunk(order.device))]
    return Outputs(torch.cat([each.features for each in outputs]), torch.cat([each.logits for each in outputs]))


def mean_gradients(
    model: SplitModel, data: ClientData, names: Collection[str], positions: Tensor | None, loss: MeanLoss
) -> Tensors:
    """Return the gradient of a mean loss over a client's samples (default all), in the given order.

    :param names: the names of the parameters. A parameter that the loss does not depend on has gradient 0.
    """
    order = _order(data, positions)
    parameters = {name: p.detach().requires_grad_() for name, p in model.named_parameters() if name in names}
    total = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
    with evaluating(model), torch.enable_grad():
        for chunk in order.split(max(100, forward_chunk(order.device) // 8)):
            outputs = Outputs(*functional_call(model, parameters, (data.inputs(chunk),)))
            value = loss(outputs, data.labels[chunk]) * (len(chunk) / len(order))
            gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients):
                if gradient is not None:
                    total[name].add_(gradient)
    return total


class FrozenModel:
    """A copy of the model in eval mode without parameter gradients, reused from client to client.

    Without augmentation a sample's outputs do not change within a round. They are then computed once per sample.
    """

    def __init__(self, template: SplitModel) -> None:
        self.module = copied(template).requires_grad_(False).eval()
        self._state, self._plain = self.module.state_dict(), PlainAttributes(self.module)
        self._cache: Outputs | None = None
        self.present = False

    def load(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Load the weights for another client or round.

        :param tensors: the weights; None if there is no previous model.
        """
        self._cache = None
        self.present = tensors is not None
        self._plain.restore()
        copy_into(self._state, tensors or {})

    def outputs(self, x: Any) -> Outputs:
        """Return features and logits of a batch."""
        with torch.no_grad():
            return Outputs(*self.module(x))

    def cached_outputs(self, positions: Tensor, data: ClientData) -> Outputs:
        """Return features and logits of a client's samples.

        :param positions: the samples' positions; an index on the device.
        """
        if self._cache is None:
            self._cache = all_outputs(self.module, data)
        return Outputs(self._cache.features[positions], self._cache.logits[positions])


class Memory:
    """Tensors that the clients of a working model use in turn."""

    def __init__(self) -> None:
        self.optimizer: dict[int, dict[str, Tensor]] = {}
        """The optimizer's state by a parameter's id; it is zeroed for each client."""

    def losses(self) -> dict[str, Tensor]:
        """Return the sums of losses so far, by name. New sums may be added."""
        return {}

    def reference(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values of parameters at the start of a round, which steps read."""
        return list(values.values())

    def random_state(self, device: torch.device) -> Tensor | None:
        """Return the state of a device's global generator; None where it cannot be read in a step."""
        return global_generators(device)[-1].get_state()


class WorkingModel:
    """One model on the device, reused from client to client, so that its memory and hooks are set up once.

    :param memory: tensors for the training of each client, unless it needs its own.
    """

    def __init__(self, setup: Setup, memory: Memory | None = None) -> None:
        self.setup, self.layout, self.device = setup, setup.layout, setup.placement.device
        self.module = setup.placement.model(setup.model)
        self._submodules = list(self.module.modules())
        own = (type(each).train is not nn.Module.train or "training" not in vars(each) for each in self._submodules)
        self._overrides_train = any(own)  # a scripted module keeps its mode elsewhere
        self.state = self.module.state_dict()
        """All tensors of the model by name (views, not copies)."""
        self.parameters = dict(self.module.named_parameters())
        """The parameters by name."""
        self.memory = memory or Memory()
        self.trained: dict[str, nn.Parameter] = {}
        """The parameters that are trained now, by name."""
        self.shared: dict[str, nn.Parameter] = {}
        """The trained parameters that travel, by name."""
        self.frozen = {name: FrozenModel(self.module) for name in ("global", "previous") if setup.plugins.reads(name)}
        """The frozen copies that the run's plugins read."""
        self.first_personal = self.personal()
        """The initial values of the parameters and buffers that stay on the clients."""
        fixed_buffers = self.layout.fixed & self.layout.buffers
        self._fixed_buffers = clone({name: self.state[name] for name in fixed_buffers})
        every = dict(self.module.named_parameters(remove_duplicate=False))  # frozen ones may be tied
        self._fixed_parameters = {name: every[name] for name in sorted(self.layout.fixed - self.layout.buffers)}
        self._fixed_sums = self._sums_of_fixed()
        self.plain = PlainAttributes(self.module)
        """What ``state`` lacks: each client starts with its first values."""
        buffers = [(m, name, buffer) for m in self._submodules for name, buffer in m.named_buffers(recurse=False)]
        self._saved = [(m, name, buffer) for m, name, buffer in buffers if name not in m._non_persistent_buffers_set]
        """The buffers in ``state``."""
        self.set_trainable(())  # a copy of another working model has its client's frozen parameters
        self.smallest_batch = setup.smallest_batch

    def load(self, tensors: Mapping[str, Tensor], excluded: Collection[str] = ()) -> None:
        """Load weights, and return to the condition before training: eval mode, no gradients.

        :param excluded: the parameters that are not trained.
        """
        copy_into(self.state, self._fixed_buffers)
        copy_into(self.state, tensors)
        self.plain.restore()
        if self.module.training:
            self.switch(training=False)
        self.set_trainable(excluded)

    def switch(self, *, training: bool) -> None:
        """Switch to training or eval mode as ``module.train`` does, which takes as long as a step of a small model."""
        if self._overrides_train:
            self.module.train(training)
        else:
            for module in self._submodules:
                vars(module)["training"] = training

    def set_trainable(self, excluded: Collection[str]) -> None:
        """Enable gradients of the trainable parameters that are not excluded, and drop all present gradients."""
        trainable = self.layout.trainable.difference(excluded)
        for name, parameter in self.parameters.items():
            if parameter.requires_grad != (name in trainable):
                parameter.requires_grad_(name in trainable)
            parameter.grad = None
        if trainable != self.trained.keys():
            self.trained = {name: p for name, p in self.parameters.items() if name in trainable}
            self.shared = {name: p for name, p in self.trained.items() if name not in self.layout.personal}

    def load_frozen(self, start: Tensors, previous: Tensors) -> None:
        """Load the frozen copies: the model from which the round starts, and the client's previous model, if any."""
        for name, tensors in (("global", start), ("previous", previous or None)):
            if name in self.frozen:
                self.frozen[name].load(tensors)

    def assigned_buffer(self) -> str:
        """Return a buffer of ``state`` that the model replaced by another tensor; empty if there is none."""
        replaced = ((module, name) for module, name, buffer in self._saved if getattr(module, name) is not buffer)
        return next((f"{type(module).__name__}.{name}" for module, name in replaced), "")

    def changed_parameter(self) -> str:
        """Return a fixed parameter that a forward pass changed, as momentum encoders do, or unfroze; else nothing."""
        before, fixed, now = self._fixed_sums, self._fixed_parameters, self._sums_of_fixed()
        return next((name for name in fixed if fixed[name].requires_grad or now[name] != before[name]), "")

    def _sums_of_fixed(self) -> dict[str, float]:
        # Edits through .data, which such code uses, leave torch's count of edits as it is.
        return numbers({name: p.detach().sum(dtype=torch.float64) for name, p in self._fixed_parameters.items()})

    def snapshot(self) -> Tensors:
        """Return a copy of all parameters and buffers, without the fixed ones."""
        return clone({name: tensor for name, tensor in self.state.items() if name not in self.layout.fixed})

    def personal(self) -> Tensors:
        """Return a copy of the parameters and buffers that stay on the client."""
        return clone({name: self.state[name] for name in sorted(self.layout.personal)})
