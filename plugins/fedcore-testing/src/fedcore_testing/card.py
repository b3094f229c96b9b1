"""The description of a plugin, from its code."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, get_origin

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedcore import ConfigError, Exchange, FedcoreError, Plugin
from fedcore.hooks import (
    ATTRIBUTES,
    BUILTIN,
    EXCLUSIVE,
    HOOKS,
    TABLE,
    Declaration,
    check_class,
    create_plugin,
    patterns_of,
)
from fedcore.tools import option_names, options, output, registry, short_name
from fedcore_testing.traffic import watch

_SIDES = {"server": "server", "client": "client", "step": "client", "update": "server"}


def describe(name: str) -> dict[str, Any]:
    """Return a plugin's documentation, options, hooks, declarations and package as JSON values.

    :raises UnknownNameError: no installed package provides the name.
    :raises PluginContractError: it breaks the contract.
    """
    cls = registry.resolve("plugin", name)
    check_class(name, cls)
    source: Plugin | type[Plugin] = cls
    with suppress(ConfigError):  # an option without a default: the class's declarations are used
        source = create_plugin(name, {})  # declarations may depend on options; these are the defaults'
    hooks = [hook for hook in HOOKS if hasattr(cls, hook) or (isinstance(source, Plugin) and source.implements(hook))]
    sent: dict[str, Any] = {}
    not_run = ""
    if name != BUILTIN:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about a run that nobody asked for
            try:
                sent = watch(name).tensors
            except FedcoreError as error:  # it needs other options, or more clients, or fails
                not_run = str(error)
    return {
        **_origin_and_options("plugin", name, cls),
        "hooks": [
            {
                "name": hook,
                "side": _side(hook),
                "exclusive": hook in EXCLUSIVE,
                "summary": output.prose(HOOKS[hook]).partition("\n")[0],
            }
            for hook in hooks
        ],
        "parts": [type(part).__name__ for part in source.parts],
        "sends": sent,
        "not_run": not_run,
        "declarations": {row.name: _plain(getattr(source, row.name)) for row in ATTRIBUTES},
        "excludes": [] if name == BUILTIN else excluded_by(source),
    }


def describe_part(kind: str, name: str) -> dict[str, Any]:
    """Return the documentation, options and package of a tracker or an engine as JSON values.

    :param kind: ``tracker`` or ``engine``.
    :raises PluginContractError: it cannot be imported.
    """
    return _origin_and_options(kind, name, registry.resolve(kind, name))


def _origin_and_options(kind: str, name: str, cls: Any) -> dict[str, Any]:
    point = registry.available(kind).get(name)
    dist = point.dist if point else None
    fields = option_names(cls) if hasattr(cls, "Options") else {}
    return {
        "name": name,
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "package": dist.name if dist else None,
        "version": dist.version if dist else None,
        "description": output.prose(cls),
        "options": [_option(option, cls.Options.model_fields[field]) for option, field in fields.items()],
    }


def meanings() -> dict[str, str]:
    """Return the meaning of each attribute, from the docstring of the class Plugin; empty under ``python -OO``."""
    documented = re.findall(r":ivar (\w+): ((?:.|\n )+)", inspect.getdoc(Plugin) or "")
    return dict.fromkeys((row.name for row in ATTRIBUTES), "") | {
        name: " ".join(text.split()) for name, text in documented
    }


def excluded_by(plugin: Plugin | type[Plugin]) -> list[str]:
    """Return the kinds of plugins that cannot be combined with this one, each as a noun phrase."""
    refused = []
    if Declaration(name="personal_parameters").made_by(plugin):
        refused.append("a plugin that keeps the same parameters on the clients")
        refused.append("a plugin that owns, exchanges or corrects any of the parameters that stay on the clients")
    for one, other in (("assumes", "starts"), ("starts", "assumes")):  # the set-up compares the shared names
        if TABLE[one].made_by(plugin):
            refused.append(f"a {TABLE[other].plugin}, unless what is started stays on the clients")
    if "cross-entropy" in plugin.assumes:
        refused.append(f"a {TABLE['task_loss'].plugin}")
    if TABLE["task_loss"].made_by(plugin):
        refused.append("a plugin with another model that follows cross-entropy (assumes cross-entropy)")
    for declaration in TABLE.values():
        if not declaration.made_by(plugin):
            refused += [f"a {declaration.plugin}" for name in declaration.excludes if TABLE[name].made_by(plugin)]
            continue
        if declaration.alone:
            refused.append(f"another {declaration.plugin}")
        if declaration.patterns:
            patterns = ", ".join(patterns_of(plugin, declaration.name))
            refused.append(f"another plugin that {declaration.name} any of {patterns}")
            if declaration.shared:
                refused.append(f"a plugin that keeps any of {patterns} on the clients")
        refused += [f"a {TABLE[name].plugin}" for name in declaration.excludes]
    return list(dict.fromkeys(refused))


def draw(card: Mapping[str, Any]) -> Group:
    """Return a description for a terminal. That of a tracker or an engine has no hooks and declarations."""
    package = f"{card['package']} {card['version']}" if card["package"] else "no installed package"
    parts: list[RenderableType] = [
        Text.assemble((output.clean(card["name"]), "bold"), "  ", (output.clean(f"{card['class']}, {package}"), "dim")),
        "",
        output.text(card["description"]),
        "",
    ]
    if card["options"]:
        parts.append(
            _table(
                "Options (--set)",
                ("option", "type", "default", "bounds", "description"),
                [
                    (f"{short_name(card['name'])}.{o['name']}", o["type"], o["default"], o["bounds"], o["description"])
                    for o in card["options"]
                ],
            )
        )
    else:
        parts += [Text("No options.", style="dim"), ""]
    if "hooks" not in card:
        return Group(*parts)
    if card["hooks"]:
        rows = [(h["name"], h["side"], "exclusive" if h["exclusive"] else "", h["summary"]) for h in card["hooks"]]
        parts.append(_table("Hooks", ("hook", "side", "", "what it is for"), rows))
    if card["parts"]:
        parts += [Text.assemble(("Made of  ", "bold"), output.clean(", ".join(card["parts"]))), ""]
    if card["sends"]:
        sent = [
            (way, name, " x ".join(map(str, shape)) or "one number")
            for way, payloads in card["sends"].items()
            for name, shape in payloads.items()
        ]
        parts.append(_table("Sent next to the model, seen in two rounds on digits", ("way", "tensor", "shape"), sent))
    if card["not_run"]:
        parts += [output.text(f"Two rounds on digits, which would show what it sends, fail: {card['not_run']}"), ""]
    meaning = meanings()
    declared = [
        (key, _say(value), meaning[key].replace("``", ""))
        for key, value in card["declarations"].items()
        if value not in (None, False, []) or key == "neutral"
    ]
    parts.append(_table("Declarations", ("declaration", "value", "meaning"), declared))
    if card["excludes"]:
        parts.append(Text("Cannot be combined with", style="bold"))
        parts += [output.text(f"  - {line}") for line in card["excludes"]]
    if card["name"] != BUILTIN:
        pair = f"fedcore train --plugin {card['name']} --plugin OTHER --fast-dev-run"
        parts.append(output.text(f"Some pairs are refused by their options or by the model. This tries one: {pair}"))
    return Group(*parts)


def _option(name: str, field: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": _type_name(field.annotation),
        "default": "required" if field.is_required() else _plain(field.get_default(call_default_factory=True)),
        "bounds": options.bounds(field),
        "description": field.description or "",
    }


def _type_name(annotation: Any) -> str:
    """Return a short name: ``float``, ``int or none``, ``mean|sum``."""
    inner = options.base_type(annotation)
    if options.choices(annotation):
        name = "|".join(options.choices(annotation))
    elif isinstance(inner, type) and get_origin(inner) is None:
        name = inner.__name__
    else:
        name = str(inner).replace("typing.", "")
    return name if inner is annotation else f"{name} or none"


def _side(hook: str) -> str:
    first = next(iter(inspect.signature(HOOKS[hook]).parameters), "")
    return _SIDES.get(first, "both")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Exchange):
        return _plain(value.patterns)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _say(value: Any) -> str:
    if value is None:
        return "none: no options make it FedAvg"
    if isinstance(value, dict):
        settings = ", ".join(f"{key}={item}" for key, item in value.items())
        return f"{settings or 'as it is'} (is FedAvg, bit by bit)"
    return ", ".join(map(str, value)) if isinstance(value, list) else {True: "yes"}.get(value, str(value))


def _table(title: str, headings: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold not italic", box=box.SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        table.add_column(heading, no_wrap=not index)
    for row in rows:
        table.add_row(*(output.text("none" if cell is None else str(cell)) for cell in row))
    return table
