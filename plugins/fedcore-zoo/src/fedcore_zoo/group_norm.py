"""GroupNorm (Wu and He, ECCV 2018) in the place of BatchNorm: the option ``--norm group``."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcore import ConfigError

GROUPS = 32
"""The paper's number of groups. A layer of few channels has fewer: each group has at least two of them."""

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def with_group_norm(model: nn.Module) -> None:
    """Replace every BatchNorm of a network, in place. Weights, biases and eps stay; statistics go.

    :raises ConfigError: a layer does more than BatchNorm does, as timm's with an activation.
    """
    for path, module in [*model.named_modules()]:
        if not isinstance(module, _BatchNorm):
            continue
        if type(module) not in _PLAIN:
            raise ConfigError(
                f"--norm group: {path!r} is a {type(module).__name__}, which does more than BatchNorm; take a network "
                "of torchvision, or build it with GroupNorm"
            )
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, _group_norm_like(module))


def _group_norm_like(module: _BatchNorm) -> nn.GroupNorm:
    channels = module.num_features
    norm = nn.GroupNorm(math.gcd(GROUPS, channels, max(1, channels // 2)), channels, module.eps, module.affine)
    if module.affine:
        with torch.no_grad():
            norm.weight.copy_(module.weight)
            norm.bias.copy_(module.bias)
    return norm.train(module.training)


def has_group_norm(model: nn.Module) -> bool:
    """Return whether a network has a GroupNorm."""
    return any(isinstance(module, nn.GroupNorm) for module in model.modules())
