"""Networks with logits as encoder and classifier: their last linear layer becomes the classifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcore import ConfigError, SplitModel
from fedcore.client import Setup, random_stream
from fedcore.data import Dataset
from fedcore.models import HINT, copied, dtype_hint, training_copy, tried

_BASE, _HEAD = "encoder.base.", "classifier."


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
        own = copied(self)
        network = own.encoder.base
        assert isinstance(network, nn.Module)
        _replace(network, self._last, own.classifier)
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
        """Whether the layers are all of the network's layers."""
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
    _require_same_in_training(network, name, torch.cat([sample, sample]) if isinstance(sample, Tensor) else sample)
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
        with tried(network), torch.enable_grad():
            logits: Tensor | Any = network(sample)
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
    _require_own(network, name, logits)
    if not isinstance(logits, Tensor):
        fault = f"returns {type(logits).__name__}, no tensor of logits"
        raise ConfigError(f"model {name!r} {fault}; let forward return that alone, or {HINT}")
    if not outputs or outputs[-1][1] is not logits:
        changed = bool(outputs) and outputs[-1][1].shape == logits.shape
        hint = "leave out softmax or log_softmax, which the loss contains, or " if changed else ""
        if isinstance(network, torch.jit.ScriptModule):
            hint = "give the network before torch.jit.script or trace, or "
        raise ConfigError(f"model {name!r} does not end with a linear layer that gives the logits; {hint}{HINT}")
    return outputs[-1][0]


def check_split_model(setup: Setup, dataset: Dataset) -> None:
    """Refuse a SplitModel that cannot be trained as it is evaluated, as :func:`split_network` does other networks.

    :raises ConfigError: it gives no tensor in training mode, or its copy computes with parameters of others.
    """
    if not isinstance(setup.model, SplitNetwork):
        pair = dataset.train.gather(torch.zeros(2, dtype=torch.int64)).to(torch.device("cpu"))
        _require_same_in_training(setup.model, setup.config.model, pair)


def _require_own(network: nn.Module, name: str, logits: Any) -> None:
    """Refuse a network that computes with parameters of others.

    :param logits: its output; other types than tensors are left to the caller.
    :raises ConfigError: a gradient of the output would go to one.
    """
    own = {id(parameter) for parameter in network.parameters()}
    seen, todo = set[Any](), [getattr(logits, "grad_fn", None)]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            raise ConfigError(
                f"model {name!r} computes with a parameter of shape {tuple(leaf.shape)} that is none of its own, so "
                "that it would not be trained: a function takes a layer from a global variable or a cache, or a plain "
                "list holds it. Let functions take layers from self, make lists nn.ModuleList, and call a network that "
                "only helps under torch.no_grad()"
            )


def _require_same_in_training(network: nn.Module, name: str, pair: Any) -> None:
    """Refuse a network that gives no tensor in training mode, or whose copy computes with the network's parameters.

    :param pair: a batch with two samples, as BatchNorm needs.
    :raises ConfigError: it does.
    """
    try:
        with torch.enable_grad(), random_stream(0):
            twin = training_copy(network)
            first: Any = twin.encoder(pair) if isinstance(twin, SplitModel) else twin(pair)
            last = twin.classifier(first) if isinstance(twin, SplitModel) and isinstance(first, Tensor) else first
    except Exception:  # the first round tells at which client
        return
    if not isinstance(first, Tensor):
        raise ConfigError(
            f"model {name!r} returns {type(first).__name__} in training mode, but logits in evaluation, as a network "
            "with auxiliary outputs; let it return logits alone (aux_logits=False), or return a SplitModel"
        )
    for outputs in (first, last):  # a classifier may do without features
        _require_own(twin, name, outputs)
