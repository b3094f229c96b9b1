"""A model from a name and a seed."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fedcore.base.errors import ConfigError, PluginContractError
from fedcore.base.registry import available, call, needed, resolve
from fedcore.data.task import CLASSIFICATION, Task
from fedcore.models.split import ModelTask, SplitModel

_BUILT = WeakSet[nn.Module]()
"""The networks that factories of models have returned to this process."""
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
    kind: Task = CLASSIFICATION,
) -> tuple[SplitModel, ModelTask]:
    """Build a model by name, and the task with which plugins configure it.

    ``name`` is an entry point of ``fedcore.models`` or ``module:package.factory``; it names a
    ``factory(num_classes, input_shape) -> SplitModel``, or a function or class that gives another module. The package
    fedcore-zoo makes the last linear layer of such a network the classifier. The base is drawn from (seed, "model"), a
    projection head from (seed, "projection"). The classifier is drawn from (seed, "classifier"), except that without
    ``projection`` a network keeps its last layer, and a SplitModel the classifier that its factory replaced, changed,
    froze or hooked. The base's weights therefore do not depend on the other parts.
    torch's global generator is not changed.

    :param sample: a batch with one sample; default zeros of ``input_shape``. Other networks than a SplitModel get it.
    :param kind: what the model learns to predict.
    :raises UnknownNameError: no installed package provides the name.
    :raises PluginContractError: the name is not a factory's, or the factory returns no network.
    :raises ConfigError: the network cannot be split, or the package fedcore-zoo, which splits it, is not installed.
    """
    factory = resolve("model", name)
    if isinstance(factory, nn.Module) or not callable(factory):
        expected = "a class of networks or a factory(num_classes, input_shape)"
        raise PluginContractError.of(name, f"is of type {type(factory).__name__}", kind="model", expected=expected)
    task = ModelTask(num_classes, tuple(input_shape), seed, kind)
    with task.random("model"):
        positional, named = _arguments(name, factory, num_classes, task.input_shape)
        try:
            model = call("model", name, factory, *positional, **named)
        except PluginContractError as error:
            if not positional:
                raise
            arguments = f"the number of classes and the shape of a sample, {positional[0]} and {positional[1]}"
            hint = "name its parameters num_classes and input_shape, or one of these"
            raise PluginContractError(f"{error}. It was called with {arguments}. Hint: {hint}", plugin=name) from error
    if not isinstance(model, nn.Module):
        expected, fault = "a SplitModel, or another module that ends with a linear layer", type(model).__name__
        raise PluginContractError.of(name, f"returned {fault}", kind="model", expected=expected, hint=HINT)
    if model in _BUILT:  # its weights are those that a run has trained
        hint = "make one in each call, or give the network itself, which is copied: fedcore.run(model=network)"
        raise PluginContractError.of(name, "returned a network for the second time", kind="model", hint=hint)
    _BUILT.add(model)
    if not isinstance(model, SplitModel):
        with task.random("lazy"):
            sample = torch.zeros(1, *input_shape) if sample is None else sample
            split = needed("feature", "split_network", "a network that is no SplitModel")
            model = split(model, name, num_classes, task.input_shape, sample)
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
    arguments = {"num_classes": num_classes, "input_shape": input_shape}
    signature = inspect.signature(factory)
    named = {name: value for name, value in arguments.items() if name in signature.parameters}
    in_order: list[tuple[tuple[Any, ...], dict[str, Any]]] = [] if named else [(tuple(arguments.values()), {})]
    problem = ""
    for positional, keywords in [((), named), *in_order]:
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
