"""The plugins of one side of a run: created, checked for conflicts and called in the user's order."""

from __future__ import annotations

import fnmatch
import inspect
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import pluggy

from fedcore.base.errors import (
    ConfigError,
    FedcoreError,
    PluginCallError,
    PluginConflictError,
    PluginContractError,
    RejectUpdate,
    place_of,
)
from fedcore.base.types import ClientUpdate
from fedcore.hooks import hookspecs
from fedcore.hooks.checks import HOOKS, QUESTION, create_plugin, problem_with
from fedcore.hooks.declarations import TABLE, refuse_together
from fedcore.hooks.plugin import BUILTIN, Plugin, patterns_of

CALLED: Mapping[str, Mapping[str, Any]] = {name: getattr(spec, "fedcore_called", {}) for name, spec in HOOKS.items()}
"""Hook -> how the core calls it (:func:`fedcore.hooks.hookspecs.called`)."""

REJECTING = tuple(hook for hook, traits in CALLED.items() if traits.get("rejects"))
"""Hooks that can reject an update."""


class _Method(NamedTuple):
    """A method that implements a hook, with the names of its arguments."""

    function: Any
    arguments: tuple[str, ...]
    namespace: str
    """The name of its plugin; ``plugin.Part`` for a method of a part. Payloads of updates stand under it."""


_Methods = dict[str, list[_Method]]
"""A plugin's name -> the methods that implement a hook: those of its parts, then its own. In the order of the calls."""


class _Manager(pluggy.PluginManager):
    """pluggy's manager, which looks at the methods with the name of a hook; by itself it asks each attribute."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """Return the marks of a method that implements a hook."""
        return super().parse_hookimpl_opts(plugin, name) if name in HOOKS else None


class PluginSet:
    """The plugins of one side of one run, in user order, with the built-in FedAvg behind them."""

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self.plugins = tuple(plugins)
        self._by_name = {plugin.name: plugin for plugin in self.plugins}
        self._questions = {plugin.name: plugin.questions for plugin in self.plugins}
        self.namespaces = {namespace(plugin, member): plugin.name for plugin in self for member in plugin.members}
        """The namespaces of payloads -> their plugins."""
        self.seconds = dict.fromkeys((plugin.name for plugin in self), 0.0)
        """Time spent in each of the user's plugins since this set was made."""

    @cached_property
    def _calls(self) -> dict[str, _Methods]:
        """The implementations of each hook, in the order of the calls.

        pluggy checks the methods' signatures and orders them. fedcore makes the calls itself, because each plugin gets
        its own view of the arguments, and because results, times and errors belong to one plugin.
        """
        manager = _Manager("fedcore")
        manager.add_hookspecs(hookspecs)
        owners: dict[int, tuple[str, str]] = {}
        for plugin in reversed(self.plugins):  # pluggy calls the last registered first
            for member in reversed(plugin.members):
                owners[id(member)] = plugin.name, namespace(plugin, member)
                manager.register(member)
        calls: dict[str, _Methods] = {hook: {} for hook in HOOKS}
        for hook, own in calls.items():
            for method in reversed(getattr(manager.hook, hook).get_hookimpls()):
                name, payload_name = owners[id(method.plugin)]
                own.setdefault(name, []).append(_Method(method.function, method.argnames, payload_name))
        return calls

    @classmethod
    def create(cls, choices: Mapping[str, Mapping[str, Any]]) -> PluginSet:
        """Build fresh plugin objects from names and options.

        :raises ConfigError: an unknown plugin or option, a value out of bounds.
        :raises PluginContractError: a plugin that breaks the contract.
        :raises PluginConflictError: two plugins whose declarations conflict, see :mod:`fedcore.hooks.declarations`.
        """
        plugins = [create_plugin(name, options) for name, options in choices.items() if name != BUILTIN]
        names = [plugin.name for plugin in plugins]
        if BUILTIN in names:
            raise ConfigError(f"a plugin cannot be called {BUILTIN!r}: that is the built-in one. Rename its class.")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"plugin {twice[0]!r} is listed twice; list it once")
        plugin_set = cls([*plugins, create_plugin(BUILTIN, choices.get(BUILTIN, {}))])
        for one, other in combinations(plugin_set, 2):
            refuse_together(one, other)
        return plugin_set

    def __iter__(self) -> Iterator[Plugin]:
        """Iterate over the user's plugins, without the built-in plugin."""
        return (plugin for plugin in self.plugins if plugin.name != BUILTIN)

    def __getitem__(self, name: str) -> Plugin:
        """Return the plugin of a name.

        :raises KeyError: the run has no plugin of this name.
        """
        return self._by_name[name]

    def implementers(self, hook: str) -> list[Plugin]:
        """Return the user's plugins that implement a hook, in the order of its calls."""
        return [self[name] for name in self._calls[hook] if name != BUILTIN]

    def implements(self, hook: str) -> bool:
        """Return whether any plugin implements a hook."""
        return bool(self._calls[hook])

    def all_take(self, hook: str, argument: str, *, but: str) -> bool:
        """Return whether a hook is implemented, and all implementations take one argument but not the other."""
        methods = [method for own in self._calls[hook].values() for method in own]
        return bool(methods) and all({argument, but}.intersection(method.arguments) == {argument} for method in methods)

    def each(self, hook: str, **arguments: Any) -> Iterator[tuple[Plugin, Any]]:
        """Call a hook on every plugin in user order; yield (plugin, result), also for a result of None.

        Each plugin gets its own view of an argument that has a method ``scoped``.

        :raises PluginCallError: the hook raised something other than a fedcore error.
        """
        replaced = CALLED[hook].get("replaces")
        for name, methods in self._calls[hook].items():
            result = self._invoke(name, methods, hook, arguments)
            yield self._by_name[name], result
            if replaced and result is not None:
                arguments[replaced] = result

    def call_all(self, hook: str, **arguments: Any) -> None:
        """Call a hook that returns nothing on every plugin, as :meth:`each` does."""
        for _ in self.each(hook, **arguments):
            pass

    def first(self, hook: str, **arguments: Any) -> tuple[Plugin, Any]:
        """Return the first result that is not None, with its plugin; the built-in plugin is called last.

        If all results are None, the pair is the built-in plugin and None.
        """
        results = (pair for pair in self.each(hook, **arguments) if pair[1] is not None)
        return next(results, (self.plugins[-1], None))

    def call(self, plugin_name: str, hook: str, **arguments: Any) -> Any:
        """Call a hook on one plugin only; return None if the plugin does not implement it."""
        methods = self._calls[hook].get(plugin_name)
        return None if methods is None else self._invoke(plugin_name, methods, hook, arguments)

    def aggregates_in(self, plugin_name: str) -> str:
        """Return the namespace of a plugin's method ``aggregate``."""
        return self._calls["aggregate"][plugin_name][0].namespace

    def question(self, plugin_name: str, method: Any) -> str:
        """Return the name of a question that a plugin asks.

        :raises PluginContractError: ``method`` is not a method of the plugin that is marked as a question.
        """
        for name, marked in self._questions[plugin_name].items():
            if method == marked:
                return name
        raise PluginContractError.of(
            plugin_name, f"asks {method!r}", expected="a method of the plugin that is marked with @question"
        )

    def answer(self, plugin_name: str, question: str, **arguments: Any) -> Any:
        """Return a plugin's answer to a question of its server side.

        :raises PluginContractError: the plugin marks no method of this name as a question.
        """
        if (function := self._questions[plugin_name].get(question)) is None:
            raise PluginContractError.of(plugin_name, f"is asked {question!r}, which it does not mark as a question")
        method = _Method(function, tuple(inspect.signature(function).parameters), plugin_name)
        return self._invoke_one(plugin_name, method, f"{QUESTION} {question}", arguments)

    def _invoke(self, name: str, methods: list[_Method], hook: str, arguments: Mapping[str, Any]) -> Any:
        """Call a plugin's implementation of a hook, and join the results of its parts."""
        result: Any = None
        for method in methods:
            returned = self._invoke_one(name, method, hook, arguments)
            if returned is None:
                continue
            if replaced := CALLED[hook].get("replaces"):
                if isinstance(returned, ClientUpdate):
                    returned = arguments[replaced].merged(method.namespace, returned)
                arguments, result = {**arguments, replaced: returned}, returned
            else:
                returned = {method.namespace: returned} if CALLED[hook].get("apart") else returned
                result = returned if result is None else _joined(result, returned, name, hook)
        return result

    def _invoke_one(self, name: str, method: _Method, hook: str, arguments: Mapping[str, Any]) -> Any:
        """Call one method of the plugin of a name, or of its part."""
        values, traits = [], CALLED.get(hook, {})
        for argument in method.arguments:
            value = arguments[argument]
            whole = name == BUILTIN or argument == traits.get("whole")
            view = method.namespace if argument in ("update", "updates") else name
            values.append(value if whole or not hasattr(value, "scoped") else value.scoped(view))
        began = time.perf_counter()
        try:
            result = method.function(*values)
        except RejectUpdate as error:
            if traits.get("rejects"):
                raise
            fault = f"raised RejectUpdate, which only {', '.join(REJECTING)} can: {error}"
            raise PluginContractError.of(name, fault, hook=hook, **_where(arguments)) from error
        except (Exception, SystemExit) as error:
            # An object that the hook used, such as its state, does not know the hook: its error is named here.
            if isinstance(error, PluginContractError) and error.plugin == name and error.hook is None:
                fault = str(error).removeprefix(f"plugin {name!r} ")
                raise PluginContractError.of(name, fault, hook=hook, **_where(arguments)) from error
            # An error of fedcore is raised as it is. In a hook that can leave an update out, only a broken contract is.
            if isinstance(error, PluginContractError if traits.get("rejects") else FedcoreError):
                raise
            fault = f"raised {type(error).__name__}: {error}{place_of(error, method.function.__module__)}"
            raise PluginCallError.of(name, fault, hook=hook, **_where(arguments)) from error
        if name in self.seconds:
            self.seconds[name] += time.perf_counter() - began
        if result is not None and (problem := problem_with(hook, result)):
            raise PluginContractError.of(name, problem, hook=hook, **_where(arguments))
        return result

    def check_names(self, names: Sequence[str], kept: Mapping[str, Collection[str]]) -> None:
        """Resolve every declared pattern over the model's names and refuse overlaps.

        :param kept: plugin -> the names that it keeps on the clients.
        :raises PluginContractError: a pattern that matches nothing.
        :raises PluginConflictError: an overlap, naming both plugins and the reason.
        """
        for declaration in (declaration for declaration in TABLE.values() if declaration.patterns):
            claimed: dict[str, Plugin] = {}
            for plugin in self:
                for name in match(patterns_of(plugin, declaration.name), names, plugin, declaration.name):
                    other = claimed.setdefault(name, plugin)
                    if other is not plugin:
                        reason = f"both declare {declaration.name} = {name!r}"
                        raise PluginConflictError.of(other.name, plugin.name, reason)
                    keepers = [keeper for keeper, staying in kept.items() if name in staying and keeper != plugin.name]
                    if declaration.shared and keepers and patterns_of(plugin, declaration.name) != ("*",):
                        claim = f"{plugin.name!r} {declaration.name} {name!r}"
                        reason = f"{claim}, which {keepers[0]!r} keeps on each client"
                        raise PluginConflictError.of(plugin.name, keepers[0], reason)

    def reads(self, model: str) -> bool:
        """Return whether any plugin declares that it reads the frozen ``model``."""
        return any(model in plugin.reads for plugin in self)

    def require_unfrozen_steps(self, plugin_name: str) -> None:
        """Refuse methods that count steps next to a plugin that freezes parameters in some local epochs.

        :raises PluginConflictError: names both.
        """
        for other in self:
            if "sgd" in other.assumes:
                counts = f"{other.name!r} derives gradients from the number of steps (assumes sgd)"
                reason = f"{plugin_name!r} freezes parameters in some local epochs, but {counts}"
                raise PluginConflictError.of(plugin_name, other.name, reason)

    def require_reads(self, model: str, plugin_name: str) -> None:
        """Refuse that a plugin reads a frozen model without declaring it.

        :raises PluginContractError: with the declaration to write.
        """
        if model not in self[plugin_name].reads:
            raise PluginContractError.of(
                plugin_name,
                f"reads the {model!r} model without declaring it",
                hint=f"set reads = ({model!r},) on the class",
            )


def match(patterns: Iterable[str], names: Iterable[str], plugin: Plugin, declaration: str) -> list[str]:
    """Return the names that match any of the patterns, in the model's order.

    :raises PluginContractError: a pattern that matches nothing.
    """
    names = list(names)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            shown = f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            raise PluginContractError.of(
                plugin.name, f"declares {declaration}, but {pattern!r} matches none of the model's names ({shown})"
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def namespace(plugin: Plugin, member: Plugin) -> str:
    """Return the name under which the payload of a plugin or its part is: ``plugin`` or ``plugin.Part``."""
    return plugin.name if member is plugin else f"{plugin.name}.{type(member).__name__}"


def _joined(one: Any, other: Any, plugin: str, hook: str) -> Any:
    """Join the results of two parts of a plugin: mappings name by name, losses, patterns and updates in a row.

    :raises PluginContractError: both mappings have the same name.
    """
    if not isinstance(other, Mapping):
        return [item for result in (one, other) for item in (result if isinstance(result, (list, tuple)) else [result])]
    if twice := sorted(map(str, set(one).intersection(other))):
        raise PluginContractError.of(plugin, f"returns {twice[0]!r} from two of the plugin's parts", hook=hook)
    return {**one, **other}


def _where(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the round and the client of a call, for an error; None if its arguments do not tell."""
    step, server, update = arguments.get("step"), arguments.get("server"), arguments.get("update")
    client = arguments.get("client") if step is None else step.client
    number = client if isinstance(client, int) else getattr(client, "id", getattr(update, "client", None))
    return {"round": getattr(server or client, "round", None), "client": number}
