"""LoRA as a fedcore plugin: low-rank adapters on a frozen encoder, and three ways to average them."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from fedcore import (
    ClientContext,
    ClientUpdate,
    ConfigError,
    ModelTask,
    Plugin,
    PluginConflictError,
    PluginOptions,
    RunSetup,
    ServerContext,
    SplitModel,
    Tensors,
    hookimpl,
)

__all__ = ["LoRA", "LoRAOptions", "LowRank", "ProductMean"]

RESIDUAL = "*.parametrizations.weight.0.residual"
"""The residuals of adapters, by their names in the model."""


class LowRank(nn.Module):
    """W -> W + (alpha / r) B A: an adapter of rank r on a weight (out, ...), flattened to (out, in).

    A (r, in) starts as in nn.Linear, B (out, r) at 0, so that the adapted weight is W at first.

    :param transposed: the weight is (in, out), as in the layer Conv1D of transformers' GPT-2.
    :param residual: add R (out, in), too, which starts at 0: W + R + (alpha / r) B A.
    :source: Hu et al., arXiv 2106.09685, Eq. 3 and Section 4.1.
    """

    def __init__(
        self, weight: Tensor, rank: int, alpha: float, *, transposed: bool = False, residual: bool = False
    ) -> None:
        super().__init__()
        rows = (weight.T if transposed else weight).flatten(1)
        out, width = rows.shape
        self.scale, self.transposed = alpha / rank, transposed
        self.A = nn.Parameter(torch.empty(rank, width, dtype=weight.dtype))
        self.B = nn.Parameter(torch.zeros(out, rank, dtype=weight.dtype))
        self.residual = nn.Parameter(torch.zeros(out, width, dtype=weight.dtype)) if residual else None
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the adapted weight, in the weight's shape."""
        added = self.scale * (self.B @ self.A)
        if self.residual is not None:
            added = added + self.residual
        return weight + (added.T if self.transposed else added).view_as(weight)


class LoRAOptions(PluginOptions):
    """Options of LoRA."""

    rank: int = Field(default=8, ge=1, le=4096, description="r: rank of the adapters.")
    alpha: float = Field(
        default=8.0, ge=0, description="alpha: an adapter's product counts alpha / r; 0 trains the head only."
    )
    layers: list[str] = Field(
        default=["*"], description="Patterns over the encoder's linear and convolutional layers that get an adapter."
    )
    mean: Literal["factors", "products", "frozen-a"] = Field(
        default="factors",
        description="factors: A and B are averaged apart (FedIT). products: the mean of the products, exactly, by a "
        "residual that the server sends (FedEx-LoRA). frozen-a: A is never trained (FFA-LoRA).",
    )
    classifier: bool = Field(default=True, description="Train the classifier. A language model's has its weights.")


class ProductMean(Plugin):
    """The mean of the clients' products B_k A_k instead of the product of their means.

    The server adds mean(B_k A_k) - mean(B) mean(A) to the residual R, which it sends; clients do not send it.

    :param scale: the factor alpha / r of a product.
    :source: FedEx-LoRA (Singhal, Ponkshe, Vepakomma, 2024, arXiv 2410.09432): the residual of the aggregation.
    """

    encodes = (RESIDUAL,)
    assumes = ("one-model",)

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse clients that start from other adapters than the server's, and steps in the place of the mean."""
        setup.require_received_start(self.name)
        for other in setup.plugins:
            if other.server_optimizer:
                reason = f"{other.name!r} steps from the mean of A and B, and mean=products restores the mean of B A"
                raise PluginConflictError.of(self.name, other.name, reason)

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Let no client train the residual."""
        client.freeze([RESIDUAL])

    @hookimpl
    def pre_upload(self, client: ClientContext, update: ClientUpdate) -> ClientUpdate:
        """Send no residual: the server knows it."""
        return replace(update, model={n: w for n, w in update.model.items() if not fnmatch.fnmatchcase(n, RESIDUAL)})

    @hookimpl
    def pre_aggregate(self, server: ServerContext, update: ClientUpdate) -> ClientUpdate:
        """Put R + (alpha / r) (B_k A_k - B A) in its place, of which any rule then takes its mean."""
        model, start = dict(update.model), server.model
        for name in self._residuals(server):
            change = self._product(update.model, name) - self._product(start, name)
            model[name] = (start[name].double() + change).to(start[name].dtype)
        return replace(update, model=model)

    @hookimpl(trylast=True)
    def server_step(self, server: ServerContext, mean: Mapping[str, Tensor]) -> Tensors:
        """Return R such that R + (alpha / r) B A is the mean of the clients' products, for the new B and A."""
        residuals = {}
        for name in self._residuals(server):
            change = self._product(server.model, name) - self._product(mean, name)
            residuals[name] = (mean[name].double() + change).to(mean[name].dtype)
        return residuals

    def _product(self, weights: Mapping[str, Tensor], residual: str) -> Tensor:
        """Return (alpha / r) B A of the adapter with this residual, in float64."""
        b, a = (weights[residual.removesuffix("residual") + factor].double() for factor in "BA")
        return self.scale * (b @ a)

    @staticmethod
    def _residuals(server: ServerContext) -> list[str]:
        return fnmatch.filter(server.trainable, RESIDUAL)


class LoRA(Plugin[LoRAOptions]):
    """LoRA (Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, ICLR 2022, arXiv 2106.09685), in a federation.

    The encoder's base is frozen: it neither travels nor is kept per client. Clients train and average the adapters'
    A and B (Eq. 3) and the classifier.
    """

    def __init__(self, options: LoRAOptions | None = None) -> None:
        super().__init__(options)
        if self.options.mean == "products":
            self.parts = (ProductMean(self.options.alpha / self.options.rank),)

    @hookimpl
    def configure_model(self, model: SplitModel, task: ModelTask) -> None:
        """Freeze the encoder's base and put an adapter on each of its layers that a pattern names.

        Layers behind the base, such as a projection head, are new: they are trained as they are.
        """
        if not hasattr(model.encoder, "base"):
            hint = "name the part to adapt: nn.Sequential(OrderedDict(base=...))"
            raise ConfigError(f"{self.name} adapts the encoder's base, but this model's encoder has no 'base'; {hint}")
        base = model.encoder.get_submodule("base").requires_grad_(False)
        named = base.named_modules(prefix="base")
        layers = {name: m for name, m in named if isinstance(m, (nn.Linear, nn.Conv2d)) or _is_transposed(m)}
        for pattern in self.options.layers:
            if not fnmatch.filter(layers, pattern):
                raise ConfigError(f"{self.name}.layers: {pattern!r} matches none of the layers {', '.join(layers)}")
        options, residual = self.options, self.options.mean == "products"
        for name, layer in layers.items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in options.layers):
                if "weight" not in layer._parameters:
                    fault = f"{name!r} computes its weight, as by pruning, weight or spectral normalisation"
                    raise ConfigError(f"{self.name}.layers: {fault}; name the other layers, or make the weight plain")
                turned = {"transposed": _is_transposed(layer), "residual": residual}
                with task.random(f"lora/{name}"):
                    adapter = LowRank(layer.get_parameter("weight"), options.rank, options.alpha, **turned)
                adapter.A.requires_grad_(options.mean != "frozen-a")
                register_parametrization(layer, "weight", adapter)
        if not options.classifier:
            model.classifier.requires_grad_(False)


def _is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' Conv1D, a linear layer whose weight is (in, out)."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"
