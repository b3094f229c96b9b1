"""Checks of plugin classes and of hooks' results: mistakes that pluggy accepts silently become clear errors."""

from __future__ import annotations

import copy
import inspect
import json
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn

from fedcore.base import registry
from fedcore.base.errors import PluginContractError, suggestion
from fedcore.base.tensors import copy_into
from fedcore.base.types import ClientUpdate
from fedcore.hooks import hookspecs
from fedcore.hooks.plugin import ATTRIBUTES, Declaration, Plugin, PluginOptions, parse_options

HOOKS = {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "fedcore_spec")}
"""Every hook's specification by name, in the order of hookspecs.py."""

QUESTION = "question"
"""The word that errors use for a question where they name a hook."""

ARGUMENTS = {name: list(inspect.signature(spec).parameters) for name, spec in HOOKS.items()} | {
    QUESTION: ["client", "tensors"]
}
"""The names of every hook's arguments, and of a question's."""

RETURNS = {
    name: str(inspect.signature(spec, eval_str=False).return_annotation).removesuffix(" | None")
    for name, spec in HOOKS.items()
} | {QUESTION: "Mapping[str, Tensor]"}
"""The type of every hook's result and of an answer, as written in hookspecs.py, without its None."""

EXCLUSIVE = {name for name, spec in HOOKS.items() if spec.fedcore_spec["firstresult"]}
"""The hooks that only one plugin of a run can implement."""


def create_plugin(name: str, options: Mapping[str, Any]) -> Plugin:
    """Build one plugin object from its name and options, and check its contract.

    :raises UnknownNameError: an unknown plugin or option.
    :raises ConfigError: an option's value is out of bounds.
    :raises PluginContractError: the class or the object breaks the contract.
    """
    cls = registry.resolve("plugin", name)
    short = getattr(cls, "__name__", str(cls)).lower() if name.startswith((registry.CODE, registry.OBJECT)) else name
    check_class(short, cls)
    parsed = parse_options(short, cls, options)
    plugin: Plugin = registry.call("plugin", short, cls, parsed)
    vars(plugin).setdefault("options", parsed)  # an __init__ may lack super().__init__(options)
    return _completed(short, plugin)


def _completed(name: str, plugin: Plugin) -> Plugin:
    """Give a plugin, and copies of its parts, the plugin's name; check what ``__init__`` made of them."""
    plugin.name = name
    for row in ATTRIBUTES:
        _check_declaration(name, row, getattr(plugin, row.name))
    if hidden := sorted(set(vars(plugin)) & set(HOOKS)):
        fault, hint = f"is hidden by self.{hidden[0]}, which __init__ sets", "use another name for the attribute"
        raise PluginContractError.of(name, fault, hook=hidden[0], hint=hint)
    if not (isinstance(plugin.parts, tuple) and all(isinstance(part, Plugin) for part in plugin.parts)):
        expected = "a tuple of plugin objects, such as (Part(options),)"
        raise PluginContractError.of(name, f"has parts = {plugin.parts!r}", expected=expected)
    for part in plugin.parts:
        check_class(name, type(part))
    plugin.parts = tuple(_completed(name, copy.copy(part)) for part in plugin.parts)
    for part in plugin.parts:
        _declare_too(plugin, part)
    for method in (*EXCLUSIVE, *plugin.questions):
        if sum(hasattr(type(member), method) for member in plugin.members) > 1:
            raise PluginContractError.of(name, f"has {method} in two of its parts, but only one can have it")
    plugin._sealed = True
    return plugin


def _declare_too(plugin: Plugin, part: Plugin) -> None:
    """Add the declarations of a part to its plugin, except ``neutral``: the plugin declares it itself."""
    for row in ATTRIBUTES:
        own, of_part = getattr(plugin, row.name), getattr(part, row.name)
        if row.name == "neutral" or not of_part:
            continue
        if own and row.default is None:
            raise PluginContractError.of(plugin.name, f"declares {row.name} twice, by two of its parts")
        setattr(plugin, row.name, tuple(dict.fromkeys((*of_part, *own))) if row.default == () else of_part)


def check_class(name: str, cls: Any) -> None:
    """Refuse a class that pluggy would accept silently, and then not call or call wrongly.

    :raises PluginContractError: with the hook, the mistake, the expectation and a hint.
    """
    if not (inspect.isclass(cls) and issubclass(cls, Plugin)):
        raise PluginContractError.of(name, f"is {cls!r}", expected="a subclass of fedcore.Plugin")
    if not (inspect.isclass(cls.Options) and issubclass(cls.Options, PluginOptions)):
        raise PluginContractError.of(
            name, f"has Options = {cls.Options!r}", expected="a subclass of fedcore.PluginOptions"
        )
    for attribute in dir(cls):
        member = inspect.getattr_static(cls, attribute)
        marks = getattr(member, "fedcore_impl", None)
        if hasattr(member, "fedcore_question"):
            _check_function(name, f"{QUESTION} {attribute}", member, ARGUMENTS[QUESTION])
        elif marks is not None:
            _check_hook(name, attribute, member, marks)
        elif attribute in HOOKS:
            fault = "is a method without the marker of hooks, so it would never be called"
            hint = "put @hookimpl above it, or give it another name"
            raise PluginContractError.of(name, fault, hook=attribute, hint=hint)


def _check_declaration(name: str, row: Declaration, value: Any) -> None:
    """Refuse a declaration of the wrong type. It is a mistake, or an attribute that has this name by chance."""
    kind, expected = row.takes
    fits = value is None or isinstance(value, kind)
    if isinstance(row.default, bool):
        fits, expected = isinstance(value, bool), "True or False"
    elif row.default == ():
        fits = isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value)
        expected = f"a tuple of texts, such as {(row.items or ('classifier.*',))[:1]}"
    if not fits:
        fault = f"has {row.name} = {value!r}, which is a declaration"
        hint = f"an attribute or a method of another purpose cannot be called {row.name!r}: rename it"
        raise PluginContractError.of(name, fault, expected=expected, hint=hint)
    if row.items and (unknown := sorted(set(value).difference(row.items))):
        expected = f"any of {', '.join(map(repr, row.items))}"
        raise PluginContractError.of(name, f"{row.name} {unknown}", expected=expected)


def _check_hook(name: str, hook: str, function: Any, marks: Mapping[str, Any]) -> None:
    """Check one method that is marked with ``@hookimpl``."""
    if hook not in HOOKS:
        raise PluginContractError.of(name, f"does not exist.{suggestion(hook, HOOKS)}", hook=hook)
    if marks["wrapper"] or marks["hookwrapper"]:
        # A wrapper would see the results of all plugins at once, so losses, payloads and times could not be attributed.
        fault, hint = "is a wrapper, but a result belongs to the plugin that returned it", "remove the mark"
        raise PluginContractError.of(name, fault, hook=hook, hint=hint)
    _check_function(name, hook, function, ARGUMENTS[hook])


def _check_function(name: str, hook: str, function: Any, expected: list[str]) -> None:
    """Check the arguments of a hook or a question, and that a call runs its body."""
    if isinstance(function, (staticmethod, classmethod)):
        raise PluginContractError.of(name, f"is a {type(function).__name__}", hook=hook, expected="a method")
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        plain = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
        if not plain or parameter.name not in expected:
            fault = f"takes the argument '{parameter}', which pluggy would never pass"
            passed = f"any of ({', '.join(expected)}), without default values"
            raise PluginContractError.of(name, fault, hook=hook, expected=passed)
    generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if generates or inspect.iscoroutinefunction(function):
        raise PluginContractError.of(
            name, "is a generator or asynchronous, but hooks are plain functions", hook=hook, hint="return the result"
        )


def problem_with(hook: str, value: Any) -> str:
    """Return the fault of a hook's result or an answer, with the expectation; empty for a valid result."""
    returns = RETURNS[hook.partition(" ")[0]]  # an error names "question NAME"; the table has one row for all questions
    if value is None:
        return ""
    if returns == "None":
        return f"returned {_describe(value)}, expected None: nothing would use it"
    if returns not in RESULTS:
        return ""
    kind, expected = RESULTS[returns]
    fits = isinstance(value, kind) if isinstance(kind, type) else kind(value)
    return "" if fits else f"returned {_describe(value)}, expected {expected} or None"


def whole_numbers(values: Iterable[Any], plugin: str, hook: str) -> list[int]:
    """Return numbers that a hook gave as ``int``; numbers of NumPy and torch are accepted, too.

    :raises PluginContractError: a value is not a whole number. ``int`` alone would cut 0.9 to 0.
    """
    numbers = []
    for value in values:
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not isinstance(plain, Integral) or isinstance(plain, bool):
            raise PluginContractError.of(
                plugin, f"gives {reprlib.repr(value)} as a number", hook=hook, expected="whole numbers"
            )
        numbers.append(int(plain))
    return numbers


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], plugin: str, method: str) -> None:
    """Load weights into a network. Refuse those that it does not have, or not in this shape, which would be broadcast.

    :raises PluginContractError: names the plugin, the method that it called, and the tensor.
    """
    state = model.state_dict()
    for name, tensor in weights.items():
        if name not in state:
            raise PluginContractError.of(plugin, f"passes {name!r} to {method}, but the model has no such tensor")
        if tensor.shape != state[name].shape:
            shape = f"of shape {tuple(tensor.shape)}"
            expected = f"{tuple(state[name].shape)}"
            raise PluginContractError.of(plugin, f"passes {name!r} {shape} to {method}", expected=expected)
    copy_into(state, weights)


def _tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(t, Tensor) for k, t in value.items())


def _patches(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, int) and _tensors(patch) for k, patch in value.items())


def _updates(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(update, ClientUpdate) for update in value)


def _samples(value: Any) -> bool:
    return callable(getattr(value, "changed", None))


def _partition(value: Any) -> bool:
    return hasattr(value, "train") and hasattr(value, "is_declared")


def _number(value: Any) -> bool:
    return type(value) in (int, float) or (isinstance(value, Real) and not isinstance(value, bool))


def _patterns(value: Any) -> bool:
    mapping_or_text = isinstance(value, (str, bytes, Mapping))
    return isinstance(value, Collection) and not mapping_or_text and all(isinstance(item, str) for item in value)


def _json(value: Any) -> bool:
    try:
        json.dumps(value)  # accepts nan and inf: the records hold null for them
    except (TypeError, ValueError):
        return False
    return isinstance(value, Mapping)


RESULTS: Mapping[str, tuple[type | Callable[[Any], bool], str]] = {
    "Mapping[str, Tensor]": (_tensors, "a mapping of names to tensors"),
    "Sequence[ClientUpdate]": (_updates, "a sequence of ClientUpdate"),
    "ClientData": (_samples, "samples.changed(inputs=..., labels=...)"),
    "Mapping[int, Mapping[str, Tensor]]": (_patches, "a mapping of client ids to mappings of names to tensors"),
    "Partition": (_partition, "a fedcore.data.Partition"),
    "float": (_number, "a number"),
    "ClientUpdate": (ClientUpdate, "a ClientUpdate (dataclasses.replace of the one given)"),
    "Sequence[int] | Mapping[int, int]": (
        Iterable,
        "a sequence of client ids, or a mapping of client ids to local epochs or fedcore.Steps",
    ),
    "Sequence[str]": (_patterns, "a sequence of patterns"),
    "nn.Module": (nn.Module, "a module"),
    "SplitModel": (lambda model: "SplitModel" in {cls.__name__ for cls in type(model).__mro__}, "a SplitModel"),
    "Mapping[str, Any]": (_json, "a mapping of names to JSON values (tensors and arrays by .item() or .tolist())"),
}
"""Type of a hook's result -> the type or the check of a value, and the expectation in words.

Losses are checked where they are used.
"""


def _describe(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        items = list(value.items())
        key, inner = next((item for item in items if not isinstance(item[1], Tensor)), items[0])
        return f"a {type(value).__name__} with {key!r}: {type(inner).__name__}"
    return f"{type(value).__name__}"
