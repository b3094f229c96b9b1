"""What a plugin is, and every hole that pluggy leaves in that contract closed with a clear error."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from fedcore import hookspecs, registry
from fedcore.config import describe
from fedcore.errors import ConfigError, PluginContractError, UnknownNameError, suggestion

HOOKS = {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "fedcore_spec")}
EXCLUSIVE = {name for name, spec in HOOKS.items() if spec.fedcore_spec["firstresult"]}
BUILTIN = "fedavg"


class PluginOptions(BaseModel):
    """Base of every plugin's options: unknown names are refused, values are fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


PLACE: Any = {"place": True}
"""As ``json_schema_extra`` of an option: its value says where a tracker writes, or what an engine connects to. That of
a Path says so by itself."""


def places(options: type[PluginOptions]) -> list[str]:
    """Return the options that say where something is written, or what is connected to; see :data:`PLACE`."""
    return [
        name
        for name, field in options.model_fields.items()
        if field.annotation in (Path, Path | None) or (field.json_schema_extra or {}) == PLACE
    ]


class Configurable(Protocol):
    """A class whose objects are built from options: a plugin's, a tracker's."""

    Options: ClassVar[type[PluginOptions]]


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
    guards_uploads: bool = False
    """Whether ``pre_upload`` comes after everybody else's and may change all that goes up, others' payloads too."""

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
    hidden = sorted(set(vars(plugin)) & set(HOOKS))
    if hidden:
        raise PluginContractError(
            f"plugin {short!r} sets self.{hidden[0]} in __init__, which hides its hook {hidden[0]}; "
            "use another name for the attribute",
            plugin=short,
            hook=hidden[0],
        )
    plugin._sealed = True
    return plugin


def parse_options(
    name: str, cls: type[Configurable], options: Mapping[str, Any], *, kind: str = "plugin"
) -> PluginOptions:
    """Validate the options of a plugin, or of another ``kind`` of part.

    :raises UnknownNameError: an option that does not exist.
    :raises ConfigError: a value that its option does not take.
    """
    known = option_names(cls)
    for option in options:
        if option not in known:
            raise UnknownNameError(f"{name} option", option, known)
    try:
        return cls.Options.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigError(describe(error, f"{kind} {name!r}: ", flags=False)) from None


def option_names(cls: type[Configurable]) -> dict[str, str]:
    """Return what users call its options (an alias such as ``lambda``) -> the field's name."""
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
    awkward = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if awkward:
        raise PluginContractError(
            f"plugin {name!r} hook {hook}: takes {awkward[0]!r} as a keyword-only or variable argument, which pluggy "
            f"never passes; take any of ({', '.join(expected)}) as plain arguments",
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
