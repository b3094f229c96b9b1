"""Which layers are the last K_P ones of a model."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedcore import ConfigError, SplitModel

NOT_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.PReLU)
"""Modules with parameters that belong to the layer before them: normalisations and activations."""


def names_of_last_layers(model: SplitModel, count: int) -> list[str]:
    """Return the names of the parameters and buffers of the last ``count`` layers, in the model's order.

    A layer is a module with parameters within the nested Sequentials of encoder and classifier (a linear layer, a
    convolution, a whole residual block), with the normalisation that follows it. All layers are the whole model.

    :raises ConfigError: the model has fewer layers.
    """
    units = [*_units("encoder", model.encoder), *_units("classifier", model.classifier)]
    starts = [i for i, (_, module) in enumerate(units) if _is_layer(module)]
    if count > len(starts):
        raise ConfigError(
            f"fedper.personal is {count}, but this model has {len(starts)} layers; give at most {len(starts)}"
        )
    names = list(model.state_dict())
    if count in (0, len(starts)):
        return names if count else []
    prefixes = tuple(f"{name}." for name, _ in units[starts[-count] :])
    return [name for name in names if name.startswith(prefixes)]


def _units(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the parts of nested Sequentials by name, in the order in which they are called."""
    if not isinstance(module, nn.Sequential):
        return [(name, module)]
    return [unit for child, part in module.named_children() for unit in _units(f"{name}.{child}", part)]


def _is_layer(module: nn.Module) -> bool:
    return not isinstance(module, NOT_LAYERS) and any(True for _ in module.parameters())
