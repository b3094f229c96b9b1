"""Models as a run builds them, and what holds for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedcore import ModelTask, SplitModel
from fedcore.models import Outputs, build_model
from fedcore_testing import same_tensors

FEATURE_DIMS = {"simple-cnn": 84, "fdcl-cnn": 512, "fedcme-cnn": 128, "fedlab-cnn": 512, "mlp": 64}
"""Small models of the zoo and the width of their features."""


def build(name: str = "mlp", **options: Any) -> tuple[SplitModel, ModelTask]:
    """Build a model for ten classes of digits; ``options`` are arguments of build_model."""
    defaults: dict[str, Any] = {"num_classes": 10, "input_shape": (1, 8, 8), "seed": 0, "projection": False}
    return build_model(name, **(defaults | options))


def equal_states(a: nn.Module, b: nn.Module) -> bool:
    return same_tensors(a.state_dict(), b.state_dict())


def check_outputs(model: SplitModel, x: Tensor, feature_dim: int, num_classes: int) -> None:
    """Check the shapes of features and logits, and that they are those of encoder and classifier."""
    model.eval()
    with torch.no_grad():
        outputs = model(x)
        assert isinstance(outputs, Outputs)
        features, logits = outputs
        assert features.shape == (len(x), feature_dim)
        assert logits.shape == (len(x), num_classes)
        assert model.feature_dim == feature_dim
        assert torch.equal(features, model.encoder(x))
        assert torch.equal(logits, model.classifier(features))
