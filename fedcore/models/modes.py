"""Training and evaluation mode of a model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a block; afterwards every module has the mode it had, frozen parts too."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:  # a module's own switch may reach its children, which come after it
            if module.training == training:
                continue
            if _has_own_switch(module):
                module.train(training)
            else:
                module.training = training


class Modes:
    """Switches one model, whose modules stay the same, as ``model.train`` does."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        modules = list(model.modules())
        self._attributes = [vars(module) for module in modules]
        # A module may do more than set its flag: LoRA's layers merge their weights.
        self._plain = not any(_has_own_switch(module) for module in modules)

    def switch(self, *, training: bool) -> None:
        """Set the mode of all modules."""
        if self._plain:
            for attributes in self._attributes:
                attributes["training"] = training  # past nn.Module.__setattr__, which takes ten times as long
        else:
            self._model.train(training)


def _has_own_switch(module: nn.Module) -> bool:
    kind = type(module)
    replaced = kind.train is not nn.Module.train or kind.eval is not nn.Module.eval
    return replaced or not {"train", "eval"}.isdisjoint(vars(module))
