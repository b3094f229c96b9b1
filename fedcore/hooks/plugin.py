"""The base class of plugins, with their declarations and their options. This module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import TypeVar, get_original_bases

from fedcore.base.errors import ConfigError, PluginContractError, UnknownNameError, describe

BUILTIN = "fedavg"


class PluginOptions(BaseModel):
    """Base of every plugin's options. Unknown names are refused; values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Options that this class had before -> a sentence that says where they are now, for users who name them."""


PLACE: Any = {"place": True}
"""``json_schema_extra`` of an option that says where a tracker writes or where an engine connects.

An option of type Path does not need it.
"""


def places(options: type[PluginOptions]) -> list[str]:
    """Return the names of the options that are paths or addresses (:data:`PLACE`)."""
    return [
        name
        for name, field in options.model_fields.items()
        if field.annotation in (Path, Path | None) or (field.json_schema_extra or {}) == PLACE
    ]


@dataclass(frozen=True)
class Exchange:
    """An exchange of parameters between clients, for ``mid_local_epoch``.

    It is refused with ``--local-steps``, where clients are in different passes over their samples at a time.
    """

    patterns: tuple[str, ...]
    """Patterns over the names of the parameters that ``mid_local_epoch`` sees and patches.

    Parameters that stay on the clients (``personal_parameters``) are not exchanged.
    """
    epochs: Callable[[int], Iterable[int]]
    """Takes the number of local epochs E, returns the epochs at whose start the cohort pauses, from 1 to E - 1.

    None of them, as an empty set, is a run without exchanges: one local epoch has no middle.
    """


@dataclass
class Declaration:
    """A declaration of a plugin: an attribute of :class:`Plugin`, which a subclass sets, or an exclusive hook."""

    default: Any = None
    """The attribute's value on a plugin that does not set it. Its type decides which values a plugin may set."""
    takes: tuple[type, str] = (object, "")
    """The type of a value if the default is None, and the expectation in words."""
    items: tuple[str, ...] = ()
    """The items that the value can contain; empty if they are patterns over the model's names."""
    plugin: str = ""
    """A noun phrase for a plugin with this declaration."""
    value: str = ""
    """The item of the attribute's value that makes the declaration; empty if any value does."""
    alone: str = ""
    """Why only one plugin of a run can have the declaration; empty if several can."""
    patterns: bool = False
    """Whether the value is patterns over the model's names. Two plugins can then declare different names."""
    shared: bool = False
    """Whether the names must be shared: no other plugin can keep them on the clients."""
    hooks: tuple[str, ...] = ()
    """The hooks that a plugin with the declaration implements: they do what it declares."""
    needed: bool = False
    """Whether these hooks are called only for a plugin with the declaration."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Other declaration -> why plugins with the two declarations cannot be combined.

    The reason is a format of ``one`` and ``other``, the plugins' names, and ``value``, the other plugin's patterns.
    """
    name: str = ""
    """The name of the attribute or the hook."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, plugin: object, owner: type) -> Any:
        """Return the default: an attribute of the subclass or of the plugin comes before this object."""
        return self.default

    def made_by(self, plugin: Plugin | type[Plugin]) -> bool:
        """Return whether a plugin has this declaration."""
        if not hasattr(Plugin, self.name):  # a hook
            return plugin.implements(self.name) if isinstance(plugin, Plugin) else hasattr(plugin, self.name)
        declared = getattr(plugin, self.name)
        return self.value in declared if self.value else bool(declared)


def declaration(default: Any, **row: Any) -> Any:
    """Return a :class:`Declaration` as the value of an attribute, whose type is the default's type."""
    return Declaration(default, **row)


def question(method: Method) -> Method:
    """Mark a method of a plugin as a question, which ``server.ask`` can put to clients.

    The method runs on the client. It takes ``client`` and, if it needs them, the ``tensors`` of the question. It
    returns named tensors; None is an empty answer. The client's state is read-only in a question. Its model is the
    global model with the client's personal parameters.
    """
    vars(method)["fedcore_question"] = True
    return method


class Configurable(Protocol):
    """A class whose objects are built from options: a plugin, a tracker, an engine."""

    Options: ClassVar[type[PluginOptions]]


Method = TypeVar("Method", bound=Callable[..., Any])
OptionsT = TypeVar("OptionsT", bound=PluginOptions, covariant=True, default=Any)


class Plugin(Generic[OptionsT]):
    """Base of every plugin: built from its options, implements hooks, keeps nothing on ``self`` after ``__init__``.

    ``Plugin[MyOptions]`` is the base of a plugin with these options. The attributes are declarations. A subclass sets
    them on the class or, if they depend on options, in ``__init__``. Patterns are over the model's names after all
    ``configure_model`` calls. ``("*",)`` stands for all names that the clients share. Another pattern must not match a
    name that another plugin keeps on the clients. :mod:`fedcore.hooks.declarations` lists the declarations of two
    plugins that conflict.

    A plugin can be made of ``parts``: small plugins without a name of their own, which are made with their options or
    other arguments. Their hooks run before the plugin's hooks. State, received tensors and scratch are the plugin's.
    The payload of an update is each part's own. The declarations of the parts are declarations of the plugin.

    :ivar neutral: Options with which the method is FedAvg, bit by bit; None if no options do this.
    :ivar owns: Parameters and buffers that ``aggregate`` returns.
    :ivar starts: Parameters and buffers whose values at the start of a client's training ``begin_local`` returns.
    :ivar exchanges: The :class:`Exchange` of parameters between clients in the middle of their training.
    :ivar corrects: Parameters that ``post_train`` changes.
    :ivar encodes: Parameters that ``pre_upload`` may move from the update to its payload. ``pre_aggregate`` puts them
        back.
    :ivar reads: Things that the method reads and that not every run has: the frozen models ``"global"`` and
        ``"previous"``, ``"public"`` samples (``--public``), the ``"staleness"`` of clients (``--system concurrency``).
    :ivar assumes: Assumptions about a client's training. ``"displacement"``: w_t - y_k is the client's own work, so
        that state can be derived from it; without it, clients may start elsewhere (``starts``). ``"sgd"``: gradients
        can be derived from a movement by SGD's learning rate, momentum and number of steps; who derives them from
        w_t - y_k assumes both (SCAFFOLD, FedNova). ``"one-model"``: all clients train one global model, so that their
        movements, features or layers can be compared, averaged or exchanged (FedProc, CCVR); another plugin that
        ``starts`` and ``owns`` the same names counts as one with several models. ``"cross-entropy"``: no plugin
        replaces the task loss, as this one trains, adapts or chooses another model by it (Ditto, FedALA).
        ``"classes"``: samples have classes, by which the method groups, counts or weighs them (FedProto, FedRS).
        ``"rounds"``: the run has the number of rounds that it was begun with, on which each round's training depends
        (FedProc).
    :ivar scales_task: Whether a ``Loss`` of this plugin scales the task loss.
    :ivar server_optimizer: Whether ``server_step`` replaces the mean as a whole (FedAvgM, FedDyn).
    """

    Options: ClassVar[type[PluginOptions]] = PluginOptions
    neutral: Mapping[str, Any] | None = declaration(None, takes=(Mapping, "a mapping of options to values, or None"))
    owns: tuple[str, ...] = declaration(
        (), plugin="plugin that owns parameters (owns)", patterns=True, shared=True, hooks=("aggregate",), needed=True
    )
    starts: tuple[str, ...] = declaration(
        (),
        plugin="plugin that chooses what clients start from (starts)",
        patterns=True,
        shared=True,
        hooks=("begin_local",),
    )
    exchanges: Exchange | None = declaration(
        None,
        takes=(Exchange, "Exchange(patterns, epochs), or None"),
        plugin="plugin that exchanges parameters in mid-epoch (exchanges)",
        patterns=True,
        shared=True,
        hooks=("mid_local_epoch",),
        needed=True,
    )
    corrects: tuple[str, ...] = declaration((), patterns=True, shared=True, hooks=("post_train",))
    encodes: tuple[str, ...] = declaration(
        (),
        plugin="plugin that encodes uploads (encodes)",
        patterns=True,
        hooks=("pre_upload", "pre_aggregate"),
        excludes={
            "guard_upload": "{one!r} sends parameters in another form (encodes), but {other!r} guards what goes up "
            "in its plain form"
        },
    )
    reads: tuple[str, ...] = declaration((), items=("global", "previous", "public", "staleness"))
    assumes: tuple[str, ...] = declaration(
        (),
        items=("displacement", "sgd", "one-model", "cross-entropy", "classes", "rounds"),
        plugin="plugin that derives state from how far a client's model moved (assumes displacement)",
        value="displacement",
        excludes={
            "exchanges": "{one!r} derives its state from how far a client's model moved, but {other!r} exchanges "
            "{value} between clients in mid-epoch"
        },
    )
    scales_task: bool = declaration(
        False, plugin="plugin that scales the task loss (scales_task)", alone="both scale the task loss (scales_task)"
    )
    server_optimizer: bool = declaration(
        False,
        plugin="server optimizer (server_optimizer)",
        alone="both are server optimizers (server_optimizer)",
        excludes={"owns": "{one!r} steps the whole model on the server, but {other!r} owns the aggregation of {value}"},
    )

    name: str
    parts: tuple[Plugin, ...] = ()
    _sealed = False

    def __init__(self, options: OptionsT | None = None) -> None:
        self.options: OptionsT = options or cast(OptionsT, self.Options())

    @property
    def members(self) -> tuple[Plugin, ...]:
        """The objects whose hooks are the plugin's hooks: its parts, with the parts of these, then the plugin."""
        return (*(member for part in self.parts for member in part.members), self)

    def implements(self, hook: str) -> bool:
        """Return whether the plugin or one of its parts has this hook."""
        return any(hasattr(type(member), hook) for member in self.members)

    @property
    def questions(self) -> dict[str, Callable[..., Any]]:
        """The methods of the plugin and its parts that are marked with :func:`question`, by name."""
        return {
            name: getattr(member, name)
            for member in self.members
            for name in dir(type(member))
            if hasattr(getattr(type(member), name), "fedcore_question")
        }

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Set ``Options`` to the class in ``Plugin[...]``."""
        super().__init_subclass__(**arguments)
        for base in get_original_bases(cls):
            options = get_args(base)[:1] if get_origin(base) is Plugin else ()
            if options and isinstance(options[0], type) and "Options" not in vars(cls):
                cls.Options = options[0]

    def __setattr__(self, attribute: str, value: object) -> None:
        if self._sealed:
            raise PluginContractError.of(
                self.name,
                f"sets self.{attribute} after __init__, but plugin objects are read-only",
                hint="keep values in client.state or server.state, and values of one round in client.scratch",
            )
        super().__setattr__(attribute, value)


ATTRIBUTES = tuple(row for row in vars(Plugin).values() if isinstance(row, Declaration))
"""The declarations that are attributes of :class:`Plugin`. Its docstring explains them."""


def patterns_of(plugin: Plugin | type[Plugin], declaration: str) -> tuple[str, ...]:
    """Return the patterns of a declaration over the model's names."""
    declared = getattr(plugin, declaration)
    return tuple(declared.patterns if isinstance(declared, Exchange) else declared or ())


def parse_options(
    name: str, cls: type[Configurable], options: Mapping[str, Any], *, kind: str = "plugin"
) -> PluginOptions:
    """Validate the options of a plugin, or of a class of another ``kind``.

    :raises UnknownNameError: an option that does not exist.
    :raises ConfigError: a value that its option does not take.
    """
    known = option_names(cls)
    for option in options:
        if option not in known:
            raise UnknownNameError(f"{name} option", option, known, cls.Options.elsewhere.get(option, ""))
    try:
        return cls.Options.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigError(describe(error, f"{kind} {name!r}: ", flags=False)) from None


def option_names(cls: type[Configurable]) -> dict[str, str]:
    """Return the options' names for users, which can be aliases such as ``lambda`` -> the fields' names."""
    return {field.alias or name: name for name, field in cls.Options.model_fields.items()}
