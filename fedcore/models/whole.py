"""Networks that are not written as encoder and classifier: their last linear layer becomes the classifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedcore.base.errors import ConfigError
from fedcore.models.modes import evaluating
from fedcore.models.split import SplitModel

HINT = "return fedcore.SplitModel(base, feature_dim, num_classes), base without the last layer"


class SplitNetwork(SplitModel):
    """A network whose last linear layer is the classifier, with a bias where that layer had one."""

    def __init__(self, base: nn.Module, feature_dim: int, num_classes: int, *, bias: bool) -> None:
        self._bias = bias
        super().__init__(base, feature_dim, num_classes)

    def make_classifier(self, feature_dim: int) -> nn.Module:
        """Return a linear layer, (B, feature_dim) -> (B, num_classes)."""
        return nn.Linear(feature_dim, self.num_classes, bias=self._bias)


def split_network(network: nn.Module, name: str, num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return a network with logits as encoder and classifier; the last linear layer is replaced by the identity.

    :param name: for error messages.
    :raises ConfigError: its output is not that of its last linear layer, or has another width than ``num_classes``.
    """
    linear = [(path, module) for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    layer = _last(network, [module for _, module in linear], name, input_shape)
    if layer.out_features != num_classes:
        raise ConfigError(
            f"model {name!r} gives {layer.out_features} logits, but the data set has {num_classes} classes; take "
            "num_classes as an argument of the class or factory"
        )
    paths = [path for path, module in linear if module is layer]
    if len(paths) != 1 or paths[0] == "":
        raise ConfigError(f"model {name!r} is a single layer; put it into a Sequential behind nn.Flatten()")
    parent, _, attribute = paths[0].rpartition(".")
    setattr(network.get_submodule(parent), attribute, nn.Identity())
    return SplitNetwork(network, layer.in_features, num_classes, bias=layer.bias is not None)


def _last(network: nn.Module, layers: list[nn.Linear], name: str, input_shape: tuple[int, ...]) -> nn.Linear:
    """Return the layer whose output is the network's, found by one forward pass."""
    outputs: list[tuple[nn.Linear, Any]] = []

    def keep(module: nn.Module, _: Any, output: Any) -> None:
        assert isinstance(module, nn.Linear)
        outputs.append((module, output))

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        with torch.no_grad(), evaluating(network):
            found: Tensor | Any = network(torch.zeros(1, *input_shape))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"model {name!r} does not take samples of shape {input_shape}: {error}. A network for other than "
            f"floating-point tensors has to be split: {HINT}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if not outputs or outputs[-1][1] is not found:
        raise ConfigError(f"model {name!r} does not end with a linear layer that gives the logits; {HINT}")
    return outputs[-1][0]
