"""Layers of a model: which are the last ones, how linear ones move into the classifier, which draw random numbers."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedcore import ConfigError, SplitModel

BETWEEN = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity)
"""Layers that may stand between two linear layers of a head."""


NOT_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.PReLU)
"""Modules with parameters that belong to the layer before them: normalisations and activations."""


class _Part(NamedTuple):
    name: str
    """The module's name in the model."""
    module: nn.Module


def check_layers(value: int | list[str]) -> int | list[str]:
    """Refuse an option that names layers neither by a number of at least 0 nor by patterns; for pydantic.

    :raises ValueError: says what to give.
    """
    if value == [] or (isinstance(value, int) and value < 0):
        raise ValueError("give a number of layers >= 0, or at least one pattern")
    return value


def move_split(model: SplitModel, linear_layers: int, *, option: str) -> None:
    """Move layers from the encoder's end into the classifier, until it holds ``linear_layers`` linear layers.

    The model computes the same logits with the same weights; ``features`` are now the input of the first moved layer.
    A dropout right before that layer moves with it, so that the features are complete. For ``configure_model``; the
    plugin calls ``task.reshape_classifier``.

    :param option: the plugin's option, such as ``fdcl.head_layers``, for error messages.
    :raises ConfigError: the model does not end with enough linear layers, or the encoder would have no trainable
        layer.
    """
    if linear_layers == 1:
        return
    if not isinstance(model.classifier, nn.Linear):
        raise ConfigError(
            f"{option} is {linear_layers}, but another plugin replaced the classifier by a "
            f"{type(model.classifier).__name__}; use {option}=1 with it"
        )
    parts = _parts("encoder", model.encoder)
    linear = _linear_layers_at_end(parts)
    if len(linear) < linear_layers - 1:
        layers = "1 linear layer" if not linear else f"{len(linear) + 1} linear layers"
        raise ConfigError(
            f"{option} is {linear_layers}, but this model ends with only {layers}; "
            f"give at most {len(linear) + 1}, or a --model with more of them"
        )
    first = linear[linear_layers - 2]
    layer = parts[first].module
    assert isinstance(layer, nn.Linear)
    while first and isinstance(dropout := parts[first - 1].module, nn.Dropout) and not dropout.inplace:
        first -= 1
    if not any(True for part in parts[:first] for _ in part.module.parameters()):
        raise ConfigError(
            f"{option} is {linear_layers}, which leaves the encoder of this model without a trainable layer; "
            f"give at most {linear_layers - 1}"
        )
    moved = parts[first:]
    for part in moved:
        parent, _, name = part.name.rpartition(".")
        delattr(model.get_submodule(parent), name)
    model.classifier = nn.Sequential(*(part.module for part in moved), model.classifier)
    model.feature_dim = layer.in_features


def _parts(name: str, module: nn.Module) -> list[_Part]:
    """Return the parts of nested Sequentials in the order in which they are called; one may be called twice."""
    if not isinstance(module, nn.Sequential):
        return [_Part(name, module)]
    named = [(child, inner) for child, inner in module._modules.items() if inner is not None]
    return [part for child, inner in named for part in _parts(f"{name}.{child}", inner)]


def _linear_layers_at_end(parts: list[_Part]) -> list[int]:
    """Return the positions of the linear layers behind which only activations and linear layers come, last first."""
    positions = []
    for position in reversed(range(len(parts))):
        if isinstance(parts[position].module, nn.Linear):
            positions.append(position)
        elif not isinstance(parts[position].module, BETWEEN):
            break
    return positions


def names_of_last_layers(model: SplitModel, count: int, *, option: str) -> list[str]:
    """Return the names of the parameters and buffers of the last ``count`` layers, in the model's order.

    A layer is a module with parameters within the nested Sequentials of encoder and classifier (a linear layer, a
    convolution, a whole residual block), with the normalisation that follows it. All layers are the whole model.

    :param option: the plugin's option, such as ``fedper.personal``, for error messages.
    :raises ConfigError: the model has fewer layers.
    """
    parts = [*_parts("encoder", model.encoder), *_parts("classifier", model.classifier)]
    starts = [i for i, part in enumerate(parts) if _is_layer(part.module)]
    if count > len(starts):
        raise ConfigError(f"{option} is {count}, but this model has {len(starts)} layers; give at most {len(starts)}")
    names = list(model.state_dict())
    if count in (0, len(starts)):
        return names if count else []
    prefixes = tuple(f"{part.name}." for part in parts[starts[-count] :])
    return [name for name in names if name.startswith(prefixes)]


def _is_layer(module: nn.Module) -> bool:
    return not isinstance(module, NOT_LAYERS) and any(True for _ in module.parameters())


KNOWN = ("torch.nn.modules.", "fedcore.", "fedcore_functional.", "fedcore_zoo.")
"""How the modules begin whose networks draw random numbers by :data:`DRAWING` alone."""

DRAWING = (
    nn.modules.dropout._DropoutNd,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RReLU,
)
"""torch's modules that draw random numbers in training mode, or do so with some option."""


def may_draw(model: nn.Module) -> bool:
    """Say whether a forward pass of a model in training mode may draw random numbers, such as dropout's.

    A second pass on the same batch then belongs inside ``with step.random(purpose):``, which is neither captured nor
    stacked. Of modules that are neither torch's nor fedcore's nothing is known: they may.
    """
    return any(
        isinstance(module, DRAWING) or not type(module).__module__.startswith(KNOWN) for module in model.modules()
    )
