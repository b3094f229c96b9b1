"""The papers' networks: ``factory(num_classes, input_shape) -> SplitModel``.

All but ``embedding_bag`` take images: ``input_shape`` = (channels, height, width), of any number of
channels. An image with a side shorter than the network needs is zero-padded around its centre. Weights are PyTorch's
defaults unless its docstring names others. None of them has a projection head: ``ModelTask.ensure_projection`` adds it.

ReLUs at which a plugin may split the network are not in-place: they would overwrite its features. Where a paper has a
max-pool after a ReLU, the pool comes first here: max(relu(x)) = relu(max(x)) with bit-identical values and gradients,
and the ReLU processes a quarter of the values.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcore import ConfigError, SplitModel
from fedcore_zoo.sequences import SequenceBatch


class PadTo(nn.Module):
    """Zero-pad images (B, channels, height, width) around their centre to at least ``side`` by ``side``.

    Where the difference is odd, the extra line goes to the bottom or right. Larger images pass unchanged.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """Return the padded images."""
        rows, columns = (max(self.side - size, 0) for size in x.shape[-2:])
        if rows == columns == 0:
            return x
        return F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows between the brackets."""
        return str(self.side)


class MaxPool2x2(nn.MaxPool2d):
    """Largest of each 2x2 window, (B, channels, height, width) -> half the height and width, rounded down.

    Without gradients the index of the maximum is not needed: two maxima of slices give the same values in a fraction of
    the time of torch's kernel on a CPU.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the maxima."""
        if x.is_cuda or (x.requires_grad and torch.is_grad_enabled()) or min(x.shape[-2:]) < 2:
            pooled: Tensor = super().forward(x)
            return pooled
        rows, columns = (size // 2 * 2 for size in x.shape[-2:])
        x = torch.maximum(x[..., 0:rows:2, :columns], x[..., 1:rows:2, :columns])
        return torch.maximum(x[..., 0::2], x[..., 1::2])


def simple_cnn(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """MOON's and NIID-Bench's CNN: 5x5 convolutions 6 and 16, Linear 120 and 84; features (B, 84).

    On 3x32x32 with 10 classes it has 62,006 parameters, with the projection head 92,626. Images from 16x16.

    :source: MOON (Li, He, Song, CVPR 2021, arXiv 2103.16257), ``SimpleCNN_header`` of its code.
    """
    return SplitModel(two_convolutions("simple-cnn", input_shape, (6, 16), (120, 84)), 84, num_classes)


def fdcl_cnn(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """FDCL's CNN: 5x5 convolutions 32 and 64, Linear 512; features (B, 512).

    On 1x28x28 with 10 classes it has 582,026 parameters. Images from 16x16. The paper names no padding: there
    is none (FLGo, on which it ran, pads its own CNN of these layers for MNIST by 2).

    :source: FDCL, section "Models".
    """
    return SplitModel(two_convolutions("fdcl-cnn", input_shape, (32, 64), (512,)), 512, num_classes)


def fedcme_cnn(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """FedCME's CNN for Fashion-MNIST: 5x5 convolutions 16 and 32, Linear 128; features (B, 128).

    The paper says only "two convolutional layers and two linear layers"; the sizes are ours: small, for
    50 to 80 clients with few samples each. On 1x28x28 with 10 classes it has 80,202 parameters. Images from
    16x16.

    :source: FedCME, "Network Architecture".
    """
    return SplitModel(two_convolutions("fedcme-cnn", input_shape, (16, 32), (128,)), 128, num_classes)


def alexnet(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """torchvision's AlexNet with stem and last pooling adapted to small images; features (B, 4096).

    From 128x128 the stem is torchvision's (11x11, stride 4, padding 2), so that on 3x224x224 with 1000
    classes this is its network with 61,100,840 parameters. Smaller images take the stem at padding 5 and
    stride 2 (from 64x64) or 1, so that the last convolutions have input. The average pool gives
    6x6, or the input's size if that is less: 3x3 on 32x32. Images from 15x15.

    :source: Krizhevsky, "One weird trick for parallelizing CNNs" (2014), in torchvision's form; FedCME uses
        AlexNet on CIFAR-10.
    """
    channels, height, width = image_shape("alexnet", input_shape)
    least = 15  # three 3x3 poolings of stride 2: 15 -> 7 -> 3 -> 1
    height, width = max(height, least), max(width, least)
    smallest = min(height, width)
    stride, padding = (4, 2) if smallest >= 128 else (2, 5) if smallest >= 64 else (1, 5)

    def side_after(side: int) -> int:
        side = (side + 2 * padding - 11) // stride + 1
        for _ in range(3):  # the poolings; the other convolutions keep the side
            side = (side - 3) // 2 + 1
        return min(side, 6)

    rows, columns = side_after(height), side_after(width)
    base = nn.Sequential(
        OrderedDict(
            pad=PadTo(least),
            conv1=nn.Conv2d(channels, 64, 11, stride=stride, padding=padding),
            pool1=nn.MaxPool2d(3, 2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(64, 192, 5, padding=2),
            pool2=nn.MaxPool2d(3, 2),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(192, 384, 3, padding=1),
            relu3=nn.ReLU(),
            conv4=nn.Conv2d(384, 256, 3, padding=1),
            relu4=nn.ReLU(),
            conv5=nn.Conv2d(256, 256, 3, padding=1),
            pool5=nn.MaxPool2d(3, 2),
            relu5=nn.ReLU(),
            average=nn.AdaptiveAvgPool2d((rows, columns)),
            flatten=nn.Flatten(),  # (B, 256, rows, columns) -> (B, 256 * rows * columns)
            dropout1=nn.Dropout(0.5),
            fc1=nn.Linear(256 * rows * columns, 4096),
            relu6=nn.ReLU(),
            dropout2=nn.Dropout(0.5),
            fc2=nn.Linear(4096, 4096),
            relu7=nn.ReLU(),
        )
    )
    return SplitModel(base, 4096, num_classes)


def resnet50(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """ResNet-50 with the stem for small images, as MOON uses it; features (B, 2048). Images of any size.

    Stem 3x3, stride 1, no max-pool; bottlenecks 3, 4, 6, 3 with strides 1, 2, 2, 2, the stride in the 3x3
    convolution. Convolutions: Kaiming normal, fan out, no bias; BatchNorm: gamma 1, beta 0. On 3x32x32 with
    10 classes it has 23,520,842 parameters. In training mode images up to 8x8 need batches of at least two.

    :source: He et al. (CVPR 2016, arXiv 1512.03385); MOON's code, ``ResNet50_cifar10``.
    """
    channels, _, _ = image_shape("resnet50", input_shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 64, 3, padding=1, bias=False), bn1=nn.BatchNorm2d(64), relu=nn.ReLU()
    )
    entering = 64
    for stage, (blocks, width, stride) in enumerate([(3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)], 1):
        first = _Bottleneck(entering, width, stride)
        entering = width * _Bottleneck.expansion
        rest = [_Bottleneck(entering, width, 1) for _ in range(blocks - 1)]
        layers[f"layer{stage}"] = nn.Sequential(first, *rest)
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()  # (B, 2048, 1, 1) -> (B, 2048), also for B = 1
    base = nn.Sequential(layers)
    for module in base.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return SplitModel(base, entering, num_classes)


def embedding_bag(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Mean of 64-wide token embeddings, Linear 64, ReLU; features (B, 64). For token sequences.

    :param input_shape: (vocabulary,), the number of different tokens.
    """
    layers = OrderedDict(bag=_TokenBag(input_shape[0], 64), fc1=nn.Linear(64, 64), relu1=nn.ReLU())
    return SplitModel(nn.Sequential(layers), 64, num_classes)


embedding_bag.takes = ("sequences",)  # type: ignore[attr-defined]


class _TokenBag(nn.EmbeddingBag):
    """The mean of the embeddings of each sequence of a batch; zeros for one without a token."""

    def forward(self, batch: SequenceBatch) -> Tensor:  # type: ignore[override]
        """Return (B, width) of token sequences."""
        return super().forward(batch.values, batch.offsets[:-1])


def two_convolutions(
    name: str, input_shape: tuple[int, ...], filters: tuple[int, int], widths: tuple[int, ...]
) -> nn.Sequential:
    """Return twice (5x5 convolution without padding, ReLU, 2x2 max-pool), then linear layers with ReLUs."""
    channels, height, width = image_shape(name, input_shape)
    least = 16  # 16 -> 12 -> 6 -> 2 -> 1

    def side_after(side: int) -> int:
        return ((max(side, least) - 4) // 2 - 4) // 2

    flat = filters[1] * side_after(height) * side_after(width)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        pad=PadTo(least),
        conv1=nn.Conv2d(channels, filters[0], 5),
        pool1=MaxPool2x2(),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(filters[0], filters[1], 5),
        pool2=MaxPool2x2(),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),  # (B, filters, rows, columns) -> (B, flat)
    )
    for index, (entering, leaving) in enumerate(pairwise((flat, *widths)), 1):
        layers[f"fc{index}"] = nn.Linear(entering, leaving)
        layers[f"relu{index + 2}"] = nn.ReLU()
    return nn.Sequential(layers)


class _Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1 convolutions with BatchNorm around a shortcut."""

    expansion = 4

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        leaving = width * self.expansion
        self.conv1 = nn.Conv2d(entering, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, leaving, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(leaving)
        self.relu = nn.ReLU(inplace=True)  # activations of BatchNorm, which no other module holds
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or entering != leaving:
            self.shortcut = nn.Sequential(
                nn.Conv2d(entering, leaving, 1, stride=stride, bias=False), nn.BatchNorm2d(leaving)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        total: Tensor = self.relu(self.bn3(self.conv3(out)) + self.shortcut(x))
        return total


def image_shape(name: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (channels, height, width) of the images that the model ``name`` is built for.

    :raises ConfigError: the inputs are not images.
    """
    if len(input_shape) != 3:
        raise ConfigError(
            f"model {name!r} takes images (channels, height, width), but this data set's inputs have shape "
            f"{tuple(input_shape)}. Hint: --model mlp takes any shape."
        )
    channels, height, width = input_shape
    return channels, height, width
