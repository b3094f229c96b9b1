"""A model from a name and a seed: its factory, and a network's split."""

from __future__ import annotations

import copy
import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcore.base.errors import ConfigError, PluginContractError
from fedcore.base.registry import available, call, resolve
from fedcore.models.split import ModelTask, SplitModel, tried

_BASE, _HEAD = "encoder.base.", "classifier."
HINT = "return fedcore.SplitModel(base, feature_dim, num_classes), base without the last layer"


def require_takes(name: str, kind: str, dataset: str) -> None:
    """Refuse a model that does not take batches of a kind.

    The attribute ``takes = ("graphs", ...)`` of a factory lists the kinds that its models take; the default is tensors.

    :raises ConfigError: names the installed models that do.
    """
    taken = _takes(resolve("model", name))
    if kind in taken:
        return
    suited = []
    for other in available("model"):
        with suppress(PluginContractError):  # a broken package does not hide the others
            if kind in _takes(resolve("model", other)):
                suited.append(other)
    hint = f"models for it: --model {', --model '.join(suited)}" if suited else "no installed model takes these"
    raise ConfigError(
        f"model {name!r} takes batches of kind {' or '.join(taken)}, but the batches of data set "
        f"{dataset!r} are {kind}; {hint}. A class or function of yours needs the attribute takes = ({kind!r},)"
    )


def _takes(factory: Any) -> tuple[str, ...]:
    return tuple(getattr(factory, "takes", ("tensor",)))


def build_model(
    name: str,
    *,
    num_classes: int,
    input_shape: tuple[int, ...],
    seed: int,
    projection: bool,
    sample: Any = None,
) -> tuple[SplitModel, ModelTask]:
    """Build a model by name, and the task with which plugins configure it.

    ``name`` is an entry point of ``fedcore.models`` or ``module:package.factory``; it names a
    ``factory(num_classes, input_shape) -> SplitModel``, or a function or class that gives another module: its last
    linear layer becomes the classifier, see :func:`split_network`. The base is drawn from (seed, "model"), a projection
    head from (seed, "projection"). The classifier is drawn from (seed, "classifier"), except that without
    ``projection`` a network keeps its last layer, and a SplitModel the classifier that its factory replaced, changed or
    froze. The base's weights therefore do not depend on the other parts.
    torch's global generator is not changed.

    :param sample: a batch with one sample; default zeros of ``input_shape``. Other networks than a SplitModel get it.
    :raises UnknownNameError: no installed package provides the name.
    :raises PluginContractError: the name is not a factory's, or the factory returns no network.
    :raises ConfigError: the network cannot be split.
    """
    factory = resolve("model", name)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise PluginContractError.of(
            name,
            f"is of type {type(factory).__name__}",
            kind="model",
            expected="a class of networks or a factory(num_classes, input_shape)",
        )
    task = ModelTask(num_classes, tuple(input_shape), seed)
    with task.random("model"):
        positional, named = _arguments(name, factory, num_classes, task.input_shape)
        try:
            model = call("model", name, factory, *positional, **named)
        except PluginContractError as error:
            if not positional:
                raise
            given = f"the number of classes and the shape of a sample, {positional[0]} and {positional[1]}"
            hint = "name its parameters num_classes and input_shape, or one of these"
            raise PluginContractError(f"{error}. It was called with {given}. Hint: {hint}", plugin=name) from error
    if isinstance(model, nn.Module) and not isinstance(model, SplitModel):
        with task.random("lazy"):
            sample = torch.zeros(1, *input_shape) if sample is None else sample
            model = split_network(model, name, num_classes, task.input_shape, sample)
    if not isinstance(model, SplitModel):
        raise PluginContractError.of(
            name,
            f"returned {type(model).__name__}",
            kind="model",
            expected="a SplitModel, or another module that ends with a linear layer",
            hint=HINT,
        )
    if extra := next((key for key in model.state_dict() if key.endswith("_extra_state")), None):
        raise ConfigError(
            f"model {name!r} has {extra!r} (get_extra_state), which is neither averaged nor reset; keep it in a "
            "buffer, or as an attribute that stays the same"
        )
    if projection:
        task.ensure_projection(model)
    elif model.has_fresh_classifier:
        with task.random("classifier"):
            model.renew_classifier(model.feature_dim)
    return model, task


def _arguments(
    name: str, factory: Any, num_classes: int, input_shape: tuple[int, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments for a factory.

    A factory that has parameters of these names gets them by name. Any other gets both in order, or nothing if it
    requires no argument.

    :raises PluginContractError: the factory cannot be called in this way.
    """
    given = {"num_classes": num_classes, "input_shape": input_shape}
    signature = inspect.signature(factory)
    named = {name: value for name, value in given.items() if name in signature.parameters}
    tried: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), named)]
    if not named:
        tried.append((tuple(given.values()), {}))
    problem = ""
    for positional, keywords in tried:
        try:
            signature.bind(*positional, **keywords)
            return positional, keywords
        except TypeError as error:
            problem = str(error)
    raise PluginContractError.of(
        name,
        f"cannot be called with the number of classes and the shape of a sample: {problem}",
        kind="model",
        hint="name its parameters num_classes and input_shape, or one of these, and give defaults to the others",
    )


class SplitNetwork(SplitModel):
    """A network whose last linear layer is the classifier, with a bias where that layer had one.

    :param base: the network with the identity in the place of that layer.
    :param layer: that layer, which keeps its weights: they may be trained.
    :param last: its name in the network.
    """

    def __init__(self, base: nn.Module, layer: nn.Linear, *, last: str) -> None:
        self._last, self._bias = last, layer.bias is not None
        super().__init__(base, layer.in_features, layer.out_features)
        self.classifier, self._made = layer, (layer,)

    def make_classifier(self, feature_dim: int) -> nn.Module:
        """Return a linear layer, (B, feature_dim) -> (B, num_classes)."""
        return nn.Linear(feature_dim, self.num_classes, bias=self._bias)

    def network(self) -> nn.Module:
        """Return a copy of the network with the present weights; see :meth:`SplitModel.network`."""
        if not self._is_whole:
            raise ConfigError(
                f"the model has other layers than the {type(self.encoder.base).__name__} that it was made of: a plugin "
                "or --projection changed them; result.model is the whole model"
            )
        copied = copy.deepcopy(self)
        network = copied.encoder.base
        assert isinstance(network, nn.Module)
        _replace(network, self._last, copied.classifier)
        return network

    def file_names(self) -> dict[str, str]:
        """Return the names of the tensors in the network's own class; see :meth:`SplitModel.file_names`."""
        if not self._is_whole:
            return super().file_names()
        return {
            name: name.removeprefix(_BASE) if name.startswith(_BASE) else f"{self._last}.{name.removeprefix(_HEAD)}"
            for name in self.state_dict()
        }

    @property
    def _is_whole(self) -> bool:
        """Whether all layers are those of the network."""
        return self.has_own_classifier and self.projection_width is None and len(self.encoder) == 1


def split_network(
    network: nn.Module, name: str, num_classes: int, input_shape: tuple[int, ...], sample: Any
) -> SplitModel:
    """Return a network with logits as encoder and classifier; the last linear layer is replaced by the identity.

    :param name: for error messages.
    :param sample: a batch with one sample.
    :raises ConfigError: the output does not come from the last linear layer, its width is not ``num_classes``, or it is
        frozen or more than a linear layer, which the fresh one behind a projection head would not be.
    """
    linear = [(path, module) for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    layer = _last(network, [module for _, module in linear], name, input_shape, sample)
    if layer.out_features != num_classes:
        raise ConfigError(
            f"model {name!r} gives {layer.out_features} logits, but the data set has {num_classes} classes; take "
            "num_classes as an argument of the class or factory"
        )
    paths = [path for path, module in linear if module is layer]
    if paths[0] == "":
        raise ConfigError(f"model {name!r} is a single layer; put it into a Sequential behind nn.Flatten()")
    frozen = any(not parameter.requires_grad for parameter in layer.parameters())
    if frozen or not _is_plain(layer):
        raise ConfigError(
            f"model {name!r}: its last layer {paths[0]!r}, a {type(layer).__name__}, "
            f"{'is frozen' if frozen else 'computes more than a linear layer'}, but the classifier of a network "
            f"is a linear layer that is trained. Hint: {'unfreeze it, or ' if frozen else ''}return a SplitModel "
            f"with it: model = fedcore.SplitModel(base, {layer.in_features}, {num_classes}); model.classifier = layer"
        )
    _replace(network, paths[0], nn.Identity())
    if other := next((path for path, module in network.named_modules() if module is layer), ""):
        raise ConfigError(f"model {name!r}: {paths[0]!r} and {other!r} are one layer; register it under one name")
    return SplitNetwork(network, layer, last=paths[0])


def _is_plain(layer: nn.Linear) -> bool:
    """Return whether a layer has a weight and a bias only, and computes what nn.Linear computes. Subclasses may."""
    x = layer.weight.new_ones(1, layer.in_features)
    with torch.no_grad():
        same = torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    return same and layer.state_dict().keys() <= {"weight", "bias"}


def _replace(network: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, attribute = path.rpartition(".")
    setattr(network.get_submodule(parent), attribute, module)


def _last(
    network: nn.Module, layers: list[nn.Linear], name: str, input_shape: tuple[int, ...], sample: Any
) -> nn.Linear:
    """Return the layer whose output is the network's, found by one forward pass."""
    outputs: list[tuple[nn.Linear, Any]] = []

    def keep(module: nn.Module, _: Any, output: Any) -> None:
        assert isinstance(module, nn.Linear)
        outputs.append((module, output))

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        with tried(network):
            found: Tensor | Any = network(sample)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        hint = dtype_hint(network, sample)
        if len(input_shape) == 3 and not hint:
            hint = ". A network of many layers may need larger images"
            if input_shape[0] == 1 and input_shape[1] != input_shape[2]:
                hint = ". Arrays (n, H, W) are read as grey images; for series give a pair of torch's data sets"
        if "more than 1 value per channel" in str(error):  # in eval mode
            hint = ". BatchNorm without running statistics cannot take a single sample: set track_running_stats=True"
        raise ConfigError(f"model {name!r} does not take samples of shape {input_shape}: {error}{hint}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not outputs or outputs[-1][1] is not found:
        changed = bool(outputs) and isinstance(found, Tensor) and outputs[-1][1].shape == found.shape
        hint = "leave out softmax or log_softmax, which the loss contains, or " if changed else ""
        raise ConfigError(f"model {name!r} does not end with a linear layer that gives the logits; {hint}{HINT}")
    return outputs[-1][0]


def dtype_hint(network: nn.Module, sample: Any) -> str:
    """Return the remedy if a model fails that is not float32, or on a tensor that is not; else an empty text."""
    if not isinstance(sample, Tensor):
        return ""
    kinds = {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
    if other := kinds - {torch.float32, sample.dtype}:
        return f". Its weights are {str(other.pop()).removeprefix('torch.')}: convert it by network.float()"
    if sample.dtype == torch.float32:
        return ""
    dtype = str(sample.dtype).removeprefix("torch.")
    if sample.is_floating_point():
        return f". The samples are {dtype}: convert x by x.float(), or give a model that takes {dtype}"
    return (
        f". The samples are {dtype}, for whole numbers in rows are taken for token ids: convert x by "
        f"x.astype('float32'), or give a model that takes {dtype}"
    )
