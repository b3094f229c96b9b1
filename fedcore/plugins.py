"""Plugins: the base class, a fresh set per run, and every hole that pluggy leaves closed with a clear error."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any, ClassVar, NamedTuple

import pluggy
from pydantic import BaseModel, ConfigDict, ValidationError

from fedcore import hookspecs, registry
from fedcore.config import describe
from fedcore.errors import (
    ConfigError,
    FedcoreError,
    PluginCallError,
    PluginConflictError,
    PluginContractError,
    UnknownNameError,
    suggestion,
)

HOOKS = {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "fedcore_spec")}
EXCLUSIVE = {name for name, spec in HOOKS.items() if spec.fedcore_spec["firstresult"]}
BUILTIN = "fedavg"


class PluginOptions(BaseModel):
    """Base of every plugin's options: unknown names are refused, values are fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Plugin:
    """Base of every method: options in, hooks out, nothing kept on ``self`` after ``__init__``.

    The attributes below are declarations; a subclass sets them on the class or, where they depend on
    options, in ``__init__``. Patterns are over the model's names after all ``configure_model`` calls.
    """

    Options: ClassVar[type[PluginOptions]] = PluginOptions
    neutral: Mapping[str, Any] | None = None
    """Options under which the method is FedAvg, bit by bit; None where there are none."""
    owns: tuple[str, ...] = ()
    """Parameters that ``aggregate`` returns."""
    exchanges: tuple[str, ...] = ()
    """Parameters that ``mid_local_epoch`` sees and patches."""
    corrects: tuple[str, ...] = ()
    """Parameters that ``post_train`` changes."""
    reshapes: tuple[str, ...] = ()
    """Parameters whose shape ``configure_model`` changes."""
    reads: tuple[str, ...] = ()
    """Frozen models that the local terms use: ``"global"``, ``"previous"``."""
    scales_task: bool = False
    """Whether a ``Loss`` of this plugin scales the task loss."""
    server_optimizer: bool = False
    """Whether ``server_step`` replaces the mean as a whole (FedAvgM, FedDyn)."""
    uses_displacement: bool = False
    """Whether state is derived from w_t - y_k, which an exchange of parameters makes meaningless."""

    name: str
    _sealed = False

    def __init__(self, options: Any) -> None:
        self.options = options

    def __setattr__(self, attribute: str, value: object) -> None:
        if self._sealed:
            raise PluginContractError(
                f"plugin {self.name!r} sets self.{attribute} after __init__. Plugin objects are read-only: "
                "keep what lasts in client.state or server.state, and what lasts one round in client.scratch.",
                plugin=self.name,
            )
        super().__setattr__(attribute, value)


class _Call(NamedTuple):
    plugin: Plugin
    function: Any
    arguments: tuple[str, ...]


class PluginSet:
    """The plugins of one side of one run, in user order, with the built-in FedAvg behind them."""

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self.plugins = tuple(plugins)
        manager = pluggy.PluginManager("fedcore")
        manager.add_hookspecs(hookspecs)
        for plugin in reversed(self.plugins):  # pluggy calls the last registered first
            manager.register(_Hooks(plugin), plugin.name)
        self._calls = {name: _calls(manager, name, self.plugins) for name in HOOKS}

    @classmethod
    def create(cls, choices: Mapping[str, Mapping[str, Any]]) -> PluginSet:
        """Build fresh plugin objects from names and options.

        :raises ConfigError: an unknown plugin or option, a value out of bounds.
        :raises PluginContractError: a plugin that breaks the contract.
        :raises PluginConflictError: two plugins with the same exclusive hook.
        """
        plugins = [create_plugin(name, options) for name, options in choices.items() if name != BUILTIN]
        if choices.get(BUILTIN):
            raise ConfigError(f"plugin {BUILTIN!r} has no options; it got {dict(choices[BUILTIN])}")
        names = [plugin.name for plugin in plugins]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"plugin {name!r} is listed twice; list it once")
        made = cls([*plugins, create_plugin(BUILTIN, {})])
        made.check_exclusive()
        return made

    def __iter__(self) -> Iterator[Plugin]:
        """Iterate over the user's plugins, without the built-in one."""
        return (plugin for plugin in self.plugins if plugin.name != BUILTIN)

    def implementers(self, hook: str) -> list[Plugin]:
        """Return the user's plugins that implement a hook, in user order."""
        return [call.plugin for call in self._calls[hook] if call.plugin.name != BUILTIN]

    def each(self, hook: str, **arguments: Any) -> Iterator[tuple[Plugin, Any]]:
        """Call a hook on every plugin in user order; yields (plugin, result), a None result included.

        An argument with a ``scoped`` method reaches each plugin as its own view.
        :raises PluginCallError: the hook raised something that is not a fedcore error.
        """
        for call in self._calls[hook]:
            yield call.plugin, _invoke(call, hook, arguments)

    def first(self, hook: str, **arguments: Any) -> Any:
        """Return the first result that is not None, the built-in plugin asked last."""
        for _, result in self.each(hook, **arguments):
            if result is not None:
                return result
        return None

    def call(self, plugin_name: str, hook: str, **arguments: Any) -> Any:
        """Call a hook on one plugin only; None where it does not implement it."""
        for call in self._calls[hook]:
            if call.plugin.name == plugin_name:
                return _invoke(call, hook, arguments)
        return None

    def check_exclusive(self) -> None:
        """Refuse two plugins that implement the same exclusive hook or declare what only one can have."""
        for hook in sorted(EXCLUSIVE):
            _refuse_two(self.implementers(hook), f"both implement {hook}, which only one plugin can")
        _refuse_two([p for p in self if p.scales_task], "both scale the task loss (scales_task)")
        _refuse_two([p for p in self if p.server_optimizer], "both are server optimizers (server_optimizer)")
        for one, other in combinations(self, 2):
            for first, second in ((one, other), (other, one)):
                if first.server_optimizer and second.owns:
                    raise PluginConflictError(
                        f"plugins {first.name!r} and {second.name!r} cannot be combined: {first.name!r} steps the "
                        f"whole model on the server, but {second.name!r} owns the aggregation of {second.owns}"
                    )
                if first.uses_displacement and second.exchanges:
                    raise PluginConflictError(
                        f"plugins {first.name!r} and {second.name!r} cannot be combined: {first.name!r} derives its "
                        f"state from how far a client's model moved, but {second.name!r} exchanges {second.exchanges} "
                        "between clients in mid-epoch"
                    )

    def check_names(self, names: Iterable[str], personal: Iterable[str]) -> None:
        """Resolve every declared pattern over the model's names and refuse overlaps.

        :param personal: names that stay on the clients.
        :raises PluginContractError: a pattern that matches nothing.
        :raises PluginConflictError: an overlap, naming both plugins and the reason.
        """
        names, personal = list(names), set(personal)
        keeper = next(iter(self.implementers("personal_parameters")), None)
        for declaration in ("owns", "exchanges", "corrects", "reshapes"):
            claimed: dict[str, Plugin] = {}
            for plugin in self:
                for name in match(getattr(plugin, declaration), names, plugin, declaration):
                    other = claimed.setdefault(name, plugin)
                    if other is not plugin:
                        raise PluginConflictError(
                            f"plugins {other.name!r} and {plugin.name!r} cannot be combined: "
                            f"both declare {declaration} = {name!r}"
                        )
                    if name in personal and declaration != "reshapes" and keeper not in (plugin, None):
                        assert keeper is not None
                        raise PluginConflictError(
                            f"plugins {plugin.name!r} and {keeper.name!r} cannot be combined: {plugin.name!r} "
                            f"{declaration} {name!r}, which {keeper.name!r} keeps on each client"
                        )

    def reads(self, model: str) -> bool:
        """Return whether any plugin declares that it reads the frozen ``model``."""
        return any(model in plugin.reads for plugin in self)


def match(patterns: Iterable[str], names: Iterable[str], plugin: Plugin, declaration: str) -> list[str]:
    """Return the names that match any of the patterns, in the model's order.

    :raises PluginContractError: a pattern that matches nothing.
    """
    names = list(names)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise PluginContractError(
                f"plugin {plugin.name!r}: {declaration} pattern {pattern!r} matches none of the model's names "
                f"({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})",
                plugin=plugin.name,
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def create_plugin(name: str, options: Mapping[str, Any]) -> Plugin:
    """Build one plugin object from its name and options, with every part of the contract checked."""
    cls = registry.resolve("plugin", name)
    short = getattr(cls, "__name__", str(cls)).lower() if name.startswith("module:") else name
    check_class(short, cls)
    plugin: Plugin = cls(parse_options(short, cls, options))
    plugin.name = short
    unknown = set(plugin.reads) - {"global", "previous"}
    if unknown:
        raise PluginContractError(
            f"plugin {short!r} reads {sorted(unknown)}; a plugin can read 'global' and 'previous'",
            plugin=short,
        )
    plugin._sealed = True
    return plugin


def parse_options(name: str, cls: type[Plugin], options: Mapping[str, Any]) -> PluginOptions:
    """Validate a plugin's options.

    :raises UnknownNameError: an option that does not exist.
    :raises ConfigError: a value that its option does not take.
    """
    known = option_names(cls)
    for option in options:
        if option not in known:
            raise UnknownNameError(f"option of plugin {name!r}", option, known)
    try:
        return cls.Options.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigError(describe(error, f"plugin {name!r}: ", flags=False)) from None


def option_names(cls: type[Plugin]) -> dict[str, str]:
    """Return what users call a plugin's options (an alias such as ``lambda``) -> the field's name."""
    return {field.alias or name: name for name, field in cls.Options.model_fields.items()}


def check_class(name: str, cls: Any) -> None:
    """Refuse a class that pluggy would accept in silence and then not call, or call wrongly.

    :raises PluginContractError: with the hook, what was found, what was expected and a hint.
    """
    if not (inspect.isclass(cls) and issubclass(cls, Plugin)):
        raise PluginContractError(
            f"plugin {name!r}: its entry point gives {cls!r}, expected a subclass of fedcore.Plugin",
            plugin=name,
        )
    if not (inspect.isclass(cls.Options) and issubclass(cls.Options, PluginOptions)):
        raise PluginContractError(
            f"plugin {name!r}: Options is {cls.Options!r}, expected a subclass of fedcore.PluginOptions",
            plugin=name,
        )
    for attribute in dir(cls):
        member = inspect.getattr_static(cls, attribute)
        marked = getattr(member, "fedcore_impl", None)
        if marked is None:
            if attribute in HOOKS:
                raise PluginContractError(
                    f"plugin {name!r}: method {attribute!r} has the name of a hook but not its marker, so it would "
                    "never be called. Put @hookimpl above it, or give it another name.",
                    plugin=name,
                    hook=attribute,
                )
            continue
        if attribute not in HOOKS:
            raise PluginContractError(
                f"plugin {name!r}: there is no hook {attribute!r}.{suggestion(attribute, HOOKS)}",
                plugin=name,
                hook=attribute,
            )
        _check_signature(name, attribute, member)
        ordering = [key for key in ("tryfirst", "trylast", "wrapper", "hookwrapper") if marked.get(key)]
        if ordering and not cls.__module__.startswith("fedcore.builtin"):
            raise PluginContractError(
                f"plugin {name!r} marks {attribute} with {ordering[0]}; the user's order decides, so plugins "
                "cannot reorder or wrap hooks. Remove the mark.",
                plugin=name,
                hook=attribute,
            )


def _check_signature(name: str, hook: str, function: Any) -> None:
    expected = list(inspect.signature(HOOKS[hook]).parameters)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    defaulted = [p.name for p in parameters if p.default is not p.empty]
    if defaulted:
        raise PluginContractError(
            f"plugin {name!r} hook {hook}: argument {defaulted[0]!r} has a default value, which pluggy would always "
            "use. Make it an option of the plugin.",
            plugin=name,
            hook=hook,
        )
    extra = [p.name for p in parameters if p.name not in expected]
    if extra:
        raise PluginContractError(
            f"plugin {name!r} hook {hook}: takes {extra[0]!r}, which the hook does not have; "
            f"its arguments are ({', '.join(expected)})",
            plugin=name,
            hook=hook,
        )


def _refuse_two(plugins: list[Plugin], reason: str) -> None:
    if len(plugins) > 1:
        raise PluginConflictError(f"plugins {plugins[0].name!r} and {plugins[1].name!r} cannot be combined: {reason}")


class _Hooks:
    """A plugin's hook methods and nothing else: pluggy evaluates every attribute of what it is given."""

    def __init__(self, plugin: Plugin) -> None:
        self.__dict__.update({name: getattr(plugin, name) for name in HOOKS if hasattr(type(plugin), name)})


def _calls(manager: pluggy.PluginManager, hook: str, plugins: tuple[Plugin, ...]) -> tuple[_Call, ...]:
    by_name = {plugin.name: plugin for plugin in plugins}
    implementations = getattr(manager.hook, hook).get_hookimpls()
    return tuple(_Call(by_name[impl.plugin_name], impl.function, impl.argnames) for impl in reversed(implementations))


def _invoke(call: _Call, hook: str, arguments: Mapping[str, Any]) -> Any:
    name = call.plugin.name
    given = []
    for argument in call.arguments:
        value = arguments[argument]
        given.append(value.scoped(name) if hasattr(value, "scoped") else value)
    try:
        return call.function(*given)
    except FedcoreError:
        raise
    except Exception as error:
        raise PluginCallError(
            f"plugin {name!r} hook {hook}{_where(arguments)} raised {type(error).__name__}: {error}",
            plugin=name,
            hook=hook,
        ) from error


def _where(arguments: Mapping[str, Any]) -> str:
    """Return `` (round 3, client 7)`` as far as the arguments tell."""
    step, server, update = arguments.get("step"), arguments.get("server"), arguments.get("update")
    client = step.client if step is not None else arguments.get("client")
    round_ = getattr(client or server, "round", None)
    number = getattr(client, "id", None) if client is not None else getattr(update, "client", None)
    parts = [f"{what} {value}" for what, value in (("round", round_), ("client", number)) if value is not None]
    return f" ({', '.join(parts)})" if parts else ""
