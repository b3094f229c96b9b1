"""The classifiers of torchvision and timm by name: ``torchvision:resnet18``, ``timm:convnext_atto``.

Weights are drawn anew; ``--weights`` starts from those in a file. The last linear layer is the classifier. Images of
other than three channels get a first convolution of that many.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from fedcore import ConfigError, UnknownNameError
from fedcore_zoo.networks import image_shape
from fedcore_zoo.vision import load_torchvision

Factory = Callable[[int, tuple[int, ...]], nn.Module]


def torchvision(name: str) -> Factory:
    """Return torchvision's classifier of this name (https://docs.pytorch.org/vision/stable/models.html).

    :raises UnknownNameError: torchvision has no such classifier.
    """
    models = load_torchvision().models
    known = models.list_models(module=models)
    if name not in known:
        raise UnknownNameError("model of torchvision", name, known)

    def factory(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
        channels, height, width = image_shape(f"torchvision:{name}", input_shape)
        options: dict[str, Any] = {}
        if name in ("googlenet", "inception_v3"):  # they have further heads, for their own training
            options = {"aux_logits": False, "init_weights": True}
        if name.startswith("vit_"):  # an embedding for each place of the image
            patch = int(name.rpartition("_")[2])
            if height != width or height % patch:
                raise ConfigError(
                    f"model 'torchvision:{name}' takes square images whose side is a multiple of {patch}, but those of "
                    f"this data set are {width}x{height}"
                )
            options = {"image_size": height}
        network: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
        if channels != 3:
            _set_channels(network, channels, f"torchvision:{name}")
        return network

    return factory


def timm(name: str) -> Factory:
    """Return timm's classifier of this name (https://huggingface.co/docs/timm); needs the package timm.

    :raises ConfigError: timm is not installed.
    :raises UnknownNameError: timm has no such classifier.
    """
    load_torchvision()  # timm imports torchvision, which may need help
    try:
        library = importlib.import_module("timm")
    except ImportError as error:
        raise ConfigError(f"model 'timm:{name}' needs the package timm: pip install timm ({error})") from error
    if not library.is_model(name):
        raise UnknownNameError("model of timm", name, library.list_models())

    def factory(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
        channels, height, width = image_shape(f"timm:{name}", input_shape)
        config = library.get_pretrained_cfg(name)
        # Those with an embedding for each place of the image are built for its size.
        sized = {"img_size": (height, width)} if config is not None and config.fixed_input_size else {}
        network: nn.Module = library.create_model(
            name, pretrained=False, num_classes=num_classes, in_chans=channels, **sized
        )
        return network

    return factory


def _set_channels(network: nn.Module, channels: int, name: str) -> None:
    """Put a fresh first convolution for this many channels in the place of the first one.

    :raises ConfigError: the first convolution does not take three channels, or has groups.
    """
    path, first = next(((p, m) for p, m in network.named_modules() if isinstance(m, nn.Conv2d)), ("", None))
    if first is None or first.in_channels != 3 or first.groups != 1:
        raise ConfigError(f"model {name!r} takes images of 3 channels, those of this data set have {channels}")
    convolution = nn.Conv2d(
        channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]
        stride=first.stride,  # type: ignore[arg-type]
        padding=first.padding,  # type: ignore[arg-type]
        dilation=first.dilation,  # type: ignore[arg-type]
        bias=first.bias is not None,
        padding_mode=first.padding_mode,
    )
    parent, _, attribute = path.rpartition(".")
    setattr(network.get_submodule(parent), attribute, convolution)
