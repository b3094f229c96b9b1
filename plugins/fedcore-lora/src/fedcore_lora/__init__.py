"""LoRA as a fedcore plugin: low-rank adapters on a frozen encoder."""

from __future__ import annotations

import fnmatch
import math

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from fedcore import ConfigError, ModelTask, Plugin, PluginOptions, SplitModel, hookimpl

__all__ = ["LoRA", "LoRAOptions", "LowRank"]


class LowRank(nn.Module):
    """W -> W + (alpha / r) B A: an adapter of rank r on a weight (out, ...), flattened to (out, in).

    A (r, in) starts as in nn.Linear, B (out, r) at 0, so that the adapted weight is W at first.

    :source: Hu et al., arXiv 2106.09685, Eq. 3 and Section 4.1.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        out, width = weight.shape[0], weight[0].numel()
        self.scale = alpha / rank
        self.A = nn.Parameter(torch.empty(rank, width, dtype=weight.dtype))
        self.B = nn.Parameter(torch.zeros(out, rank, dtype=weight.dtype))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the adapted weight, in the weight's shape."""
        return weight + self.scale * (self.B @ self.A).view_as(weight)


class LoRAOptions(PluginOptions):
    """Options of LoRA."""

    rank: int = Field(default=8, ge=1, le=4096, description="r: rank of the adapters.")
    alpha: float = Field(
        default=8.0, ge=0, description="alpha: an adapter's product counts alpha / r; 0 trains the head only."
    )
    layers: list[str] = Field(
        default=["*"], description="Patterns over the encoder's linear and convolutional layers that get an adapter."
    )


class LoRA(Plugin[LoRAOptions]):
    """LoRA (Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, ICLR 2022, arXiv 2106.09685), in a federation.

    The encoder's base is frozen: it neither travels nor is kept per client. Clients train and average the adapters'
    A and B (Eq. 3) and the classifier.
    """

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Freeze the encoder's base and put an adapter on each of its layers that a pattern names.

        Layers behind the base, such as a projection head, are new: they are trained as they are.
        """
        base = model.encoder.get_submodule("base").requires_grad_(False)
        named = base.named_modules(prefix="base")
        layers = {name: module for name, module in named if isinstance(module, (nn.Linear, nn.Conv2d))}
        for pattern in self.options.layers:
            if not fnmatch.filter(layers, pattern):
                raise ConfigError(f"{self.name}.layers: {pattern!r} matches none of the layers {', '.join(layers)}")
        for name, layer in layers.items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.options.layers):
                with task.random(f"lora/{name}"):
                    adapter = LowRank(layer.weight, self.options.rank, self.options.alpha)
                register_parametrization(layer, "weight", adapter)
