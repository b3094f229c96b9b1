"""The workloads' networks in plain PyTorch, for environments without fedcore."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def build(weights: Mapping[str, Tensor]) -> nn.Sequential:
    """Return a workload's network, images (B, C, H, W) to logits (B, 10), holding copies of exported weights.

    :param weights: by fedcore's names, in the order of the layers, which with their shapes say what to build: fdcl-cnn,
        simple-cnn and mlp, or, with 3x3 convolutions, the network of pfl-research's CIFAR-10 benchmark.
    """
    kernels = {tuple(weight.shape[2:]) for weight in weights.values() if weight.ndim == 4}
    layers = _pfl_cnn(list(weights.values())) if kernels == {(3, 3)} else _layers(weights)
    model = nn.Sequential(*layers)
    model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))
    return model


def _layers(weights: Mapping[str, Tensor]) -> list[nn.Module]:
    """Return 5x5 convolutions, each with ReLU and 2x2 maximum, then linear layers with ReLU but for z and the logits.

    z is the projection's output.
    """
    layers: list[nn.Module] = []
    for name, weight in weights.items():
        if not name.endswith(".weight"):
            continue
        if weight.ndim == 4:
            out, entering, *kernel = weight.shape
            layers += [nn.Conv2d(entering, out, tuple(kernel)), nn.ReLU(), nn.MaxPool2d(2)]
            continue
        if not layers or isinstance(layers[-1], nn.MaxPool2d):
            layers.append(nn.Flatten())
        layers.append(nn.Linear(weight.shape[1], weight.shape[0]))
        if name not in ("encoder.projection.l2.weight", "classifier.weight"):
            layers.append(nn.ReLU())
    return layers


def _pfl_cnn(weights: list[Tensor]) -> list[nn.Module]:
    """Return pfl-research's layers: two 3x3 convolutions, dropout, one hidden layer."""
    first, _, second, _, hidden, _, last, _ = (tuple(weight.shape) for weight in weights)
    return [
        nn.Conv2d(first[1], first[0], 3), nn.ReLU(),
        nn.Conv2d(second[1], second[0], 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(hidden[1], hidden[0]), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(last[1], last[0]),
    ]  # fmt: skip
