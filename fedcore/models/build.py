"""A model from a name and a seed."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from torch import nn

from fedcore.base.errors import ConfigError, PluginContractError
from fedcore.base.registry import available, call, resolve
from fedcore.models.split import ModelTask, SplitModel
from fedcore.models.weights import load_weights
from fedcore.models.whole import split_network


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
        f"model {name!r} takes batches of kind {' or '.join(taken)}, but those of data set {dataset!r} are {kind}; "
        f"{hint}"
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
    weights: str | None = None,
) -> tuple[SplitModel, ModelTask]:
    """Build a model by name, and the task with which plugins configure it.

    ``name`` is an entry point of ``fedcore.models`` or ``module:package.factory``; it names a
    ``factory(num_classes, input_shape) -> SplitModel``, or a function or class that gives another module: its last
    linear layer becomes the classifier, see :func:`split_network`. Base, projection and classifier are drawn from
    (seed, "model"), (seed, "projection") and (seed, "classifier"), so the base's weights do not depend on the other
    parts. torch's global generator is not changed.

    :param weights: a safetensors file to start from, see :func:`fedcore.models.weights.load_weights`.
    :raises UnknownNameError: no installed package provides the name.
    :raises PluginContractError: the name is not a factory's, or the factory returns no SplitModel.
    """
    factory = resolve("model", name)
    if not callable(factory):
        raise PluginContractError.of(
            name, f"is of type {type(factory).__name__}", kind="model", expected="a factory(num_classes, input_shape)"
        )
    task = ModelTask(num_classes, tuple(input_shape), seed)
    with task.random("model"):
        positional, named = _arguments(name, factory, num_classes, task.input_shape)
        model = call("model", name, factory, *positional, **named)
    if isinstance(model, nn.Module) and not isinstance(model, SplitModel):
        model = split_network(model, name, num_classes, task.input_shape)
    if not isinstance(model, SplitModel):
        raise PluginContractError.of(
            name,
            f"returned {type(model).__name__}",
            kind="model",
            expected="a SplitModel, or another module that ends with a linear layer",
            hint="return fedcore.SplitModel(base, feature_dim, num_classes), base without the last layer",
        )
    if projection:
        task.ensure_projection(model)
    else:
        with task.random("classifier"):
            model.renew_classifier(model.feature_dim)
    if weights is not None:
        load_weights(model, weights)
    return model, task


def _arguments(
    name: str, factory: Any, num_classes: int, input_shape: tuple[int, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a factory is called with: the two by name where it has parameters of these names, else in order.

    A factory that needs no argument and names neither is called with none.

    :raises PluginContractError: it cannot be called so.
    """
    given = {"num_classes": num_classes, "input_shape": input_shape}
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return tuple(given.values()), {}
    parameters = signature.parameters
    named = {name: value for name, value in given.items() if name in parameters}
    in_order = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters.values() if p.kind in in_order and p.default is p.empty]
    several = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    positional = tuple(given.values()) if not named and (required or several) else ()
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        raise PluginContractError.of(
            name,
            f"cannot be called with the number of classes and the shape of a sample: {error}",
            kind="model",
            hint="name its parameters num_classes and input_shape, or one of these, and give defaults to the others",
        ) from None
    return positional, named
