"""A network that predicts a class for each pixel."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedcore import SplitModel


class PixelModel(SplitModel):
    """Features (B, d, H, W), and a classifier of one pixel, which is a convolution of 1 x 1."""

    def make_classifier(self, feature_dim: int) -> nn.Module:
        """Return a freshly initialised head, (B, feature_dim, H, W) -> (B, num_classes, H, W)."""
        return nn.Conv2d(feature_dim, self.num_classes, kernel_size=1)


def small_fcn(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Three convolutions of 3 x 3 with 16, 32 and 32 channels and ReLU, at the images' resolution."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    before = input_shape[0]
    for number, channels in enumerate((16, 32, 32), 1):
        layers[f"conv{number}"] = nn.Conv2d(before, channels, kernel_size=3, padding=1)
        layers[f"relu{number}"] = nn.ReLU()
        before = channels
    return PixelModel(nn.Sequential(layers), before, num_classes)
