"""The workloads' networks in plain PyTorch, for environments without fedcore."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def build(weights: Mapping[str, Tensor]) -> nn.Sequential:
    """Return fdcl-cnn or simple-cnn, images (B, C, H, W) to logits (B, 10), holding copies of exported weights.

    :param weights: by fedcore's names, in the order of the layers, which with their shapes say what to build: 5x5
        convolutions, each with ReLU and 2x2 maximum, then linear layers with ReLU between them, but for z, the
        projection's output.
    """
    layers: list[nn.Module] = []
    for name, weight in weights.items():
        if not name.endswith(".weight"):
            continue
        if weight.ndim == 4:
            out, entering, *kernel = weight.shape
            layers += [nn.Conv2d(entering, out, tuple(kernel)), nn.ReLU(), nn.MaxPool2d(2)]
            continue
        if isinstance(layers[-1], nn.MaxPool2d):
            layers.append(nn.Flatten())
        layers.append(nn.Linear(weight.shape[1], weight.shape[0]))
        if name not in ("encoder.projection.l2.weight", "classifier.weight"):
            layers.append(nn.ReLU())
    model = nn.Sequential(*layers)
    model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))
    return model
