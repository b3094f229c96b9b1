"""Networks of the framework FedLab, for papers that ran on it; the interface of :mod:`fedcore_zoo.networks`."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedcore import SplitModel
from fedcore_zoo.networks import MaxPool2x2, PadTo, image_shape, two_convolutions


def fedlab_cnn(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """FedLab's CNN for MNIST: 5x5 convolutions 32 and 64, Linear 512; features (B, 512).

    The sizes of ``fdcl-cnn``, but no ReLU follows the convolutions: their only nonlinearity is the 2x2 max-pool. On
    1x28x28 with 10 classes it has 582,026 parameters. Images from 16x16.

    :source: FedLab (Zeng et al., JMLR 24(100), 2023), ``CNN_MNIST``; FedCME cites FedLab.
    """
    base = two_convolutions("fedlab-cnn", input_shape, (32, 64), (512,))
    del base.relu1, base.relu2
    return SplitModel(base, 512, num_classes)


def fedlab_alexnet(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """FedLab's AlexNet for CIFAR-10: stem 3x3 of stride 2, 2x2 max-pools, no dropout; features (B, 4096).

    Behind the stem the convolutions are AlexNet's (192, 384, 256, 256), all 3x3; two linear layers of 4096 follow. On
    3x32x32 with 10 classes it has 23,272,266 parameters. Images from 16x16.

    :source: FedLab (Zeng et al., JMLR 24(100), 2023), ``AlexNet_CIFAR10``; FedCME cites FedLab.
    """
    channels, height, width = image_shape("fedlab-alexnet", input_shape)
    least = 16  # the stem halves it, rounded up, and three 2x2 pools follow: 16 -> 8 -> 4 -> 2 -> 1

    def side_after(side: int) -> int:
        return (max(side, least) + 1) // 2 // 8

    base = nn.Sequential(
        OrderedDict(
            pad=PadTo(least),
            conv1=nn.Conv2d(channels, 64, 3, stride=2, padding=1),
            pool1=MaxPool2x2(),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(64, 192, 3, padding=1),
            pool2=MaxPool2x2(),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(192, 384, 3, padding=1),
            relu3=nn.ReLU(),
            conv4=nn.Conv2d(384, 256, 3, padding=1),
            relu4=nn.ReLU(),
            conv5=nn.Conv2d(256, 256, 3, padding=1),
            pool5=MaxPool2x2(),
            relu5=nn.ReLU(),
            flatten=nn.Flatten(),  # (B, 256, rows, columns) -> (B, 256 * rows * columns)
            fc1=nn.Linear(256 * side_after(height) * side_after(width), 4096),
            relu6=nn.ReLU(),
            fc2=nn.Linear(4096, 4096),
            relu7=nn.ReLU(),
        )
    )
    return SplitModel(base, 4096, num_classes)
