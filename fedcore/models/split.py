"""The structure of every model: encoder and classifier."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcore.base.errors import PluginConflictError
from fedcore.base.seeding import derive_seed, random_stream

PROJECTION_WIDTH = 256


class Outputs(NamedTuple):
    """What a model returns: ``features`` (B, d) = encoder(x) and ``logits`` (B, C) = classifier(features)."""

    features: Tensor
    logits: Tensor


class SplitModel(nn.Module):
    """An encoder and a classifier; all methods read features and logits through this split.

    ``encoder`` is a Sequential: ``base``, then ``projection`` once :meth:`ModelTask.ensure_projection` added
    it. ``classifier`` starts as one linear layer; a plugin may replace it, or move layers between the two (it
    then sets ``feature_dim``). Override :meth:`make_classifier` for a model with another head.

    :param base: maps a batch of inputs to features of shape (B, feature_dim).
    :param feature_dim: d, the width of the features, which the classifier takes.
    :param num_classes: C, the width that it returns.
    """

    encoder: nn.Sequential
    classifier: nn.Module

    def __init__(self, base: nn.Module, feature_dim: int, num_classes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(OrderedDict(base=base))
        self.num_classes = num_classes
        self.projection_width: int | None = None
        self.renew_classifier(feature_dim)

    def forward(self, x: Any) -> Outputs:
        """Return features and logits of a batch: images (B, channels, height, width) or what base takes."""
        features = self.encoder(x)  # (B, d)
        return Outputs(features, self.classifier(features))

    def make_classifier(self, feature_dim: int) -> nn.Module:
        """Return a freshly initialised head, (B, feature_dim) -> (B, num_classes)."""
        return nn.Linear(feature_dim, self.num_classes)

    def renew_classifier(self, feature_dim: int) -> None:
        """Put a fresh head on features of the given width."""
        self.feature_dim = feature_dim
        self.classifier = self.make_classifier(feature_dim)
        # In a tuple it is no second submodule, yet deepcopy keeps the two references to one object.
        self._made = (self.classifier,)

    @property
    def has_own_classifier(self) -> bool:
        """Whether the classifier is still the original one, so that renewing it discards nothing."""
        return self.classifier is self._made[0]


@dataclass(frozen=True, slots=True)
class ModelTask:
    """What ``configure_model(model, task)`` receives: the task, and the tools for building modules.

    :param num_classes: C.
    :param input_shape: shape of one input, without the batch; other kinds of data define their own.
    :param seed: the run's seed.
    """

    num_classes: int
    input_shape: tuple[int, ...]
    seed: int
    _reshaped: list[str] = field(default_factory=list, init=False)

    def reshape_classifier(self, plugin: str) -> None:
        """Note that a plugin gives the classifier another form; two plugins of a run cannot.

        :raises PluginConflictError: names both.
        """
        if self._reshaped:
            raise PluginConflictError.of(self._reshaped[0], plugin, "both reshape the classifier")
        self._reshaped.append(plugin)

    def random(self, purpose: str) -> AbstractContextManager[None]:
        """Return a context in which weights are drawn from (seed, purpose), independent of earlier draws.

        The purpose names the part of the model, not the plugin: two plugins that build the same part start from the
        same weights, and a run without them has the same base.
        """
        return random_stream(derive_seed(self.seed, purpose))

    def ensure_projection(self, model: SplitModel, width: int = PROJECTION_WIDTH) -> None:
        """Append the projection head unless the model has it, and renew the classifier on top of it.

        Linear(d, d), ReLU, Linear(d, width), without a final ReLU: the features are then z, (B, width).

        :raises PluginConflictError: the model already has a head of another width, or a plugin has replaced
            the classifier, which would be discarded.
        :source: MOON (Li, He, Song, CVPR 2021, arXiv 2103.16257), ``l1`` and ``l2`` of its code.
        """
        if model.projection_width == width:
            return
        if model.projection_width is not None:
            raise PluginConflictError(
                f"a projection head of width {width} is requested, but the model already has one of width "
                f"{model.projection_width}. Hint: give every plugin that projects the same width."
            )
        if not model.has_own_classifier:
            raise PluginConflictError(
                f"a projection head of width {width} is requested, but a plugin has already replaced the "
                f"classifier by a {type(model.classifier).__name__}. "
                "Hint: list the plugin that projects first, or use --projection."
            )
        d = model.feature_dim
        with self.random("projection"):
            layers = OrderedDict(l1=nn.Linear(d, d), relu=nn.ReLU(), l2=nn.Linear(d, width))
        model.encoder.add_module("projection", nn.Sequential(layers))
        model.projection_width = width
        with self.random("classifier"):
            model.renew_classifier(width)


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether any module is a BatchNorm: of 1 to 3 dimensions, synchronised or lazy."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())
