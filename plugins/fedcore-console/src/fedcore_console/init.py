"""``init``: write a commented config file, generated from RunConfig and from the plugins' options."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from fedcore import ConfigError, RunConfig
from fedcore.cli import command
from fedcore.tools import option_names, options, output, parse_options, preset_options, process, registry, safe_yaml

_WIDTH = 100
_INDENT = "  "


@options.config_flags(only=("plugins",))
def init(
    flags: dict[str, Any],
    *,
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write.")] = Path("fedcore.yaml"),
    preset: options.RunPreset = None,
    debug: options.Debug = False,
) -> None:
    """Write a config file with all options, their descriptions and their defaults, for fedcore train --config FILE.

    Options that are not chosen here are commented out.
    """
    chosen: dict[str, Any] = {} if preset is None else preset_options(preset)
    known = RunConfig.create({"plugins": chosen.get("plugins", {})}).plugins
    named = RunConfig.create({"plugins": flags.get("plugins", list(known))}).plugins
    chosen["plugins"] = {name: known.get(name, {}) for name in named}
    with process.importing():
        text = commented(chosen, file, preset)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already; name another file: fedcore init FILE") from None
    output.line(f"written: {file} (use it with fedcore train --config {file})")


app = command(init)


def commented(chosen: Mapping[str, Any], file: Path, preset: str | None = None) -> str:
    """Return a config file's text: the chosen options as they are, and all others with their defaults in comments.

    :param chosen: options by name; ``plugins`` is a mapping to their options.
    :param preset: the name of the preset that the options are from.
    :raises ConfigError: or a subclass. A plugin or one of its options is unknown.
    """
    origin = f" Preset {preset}." if preset else ""
    lines = list(_comment(f"A run of fedcore: fedcore train --config {file}.{origin} Remove a # to set an option."))
    panel = ""
    panels = [*dict.fromkeys(map(options.panel, RunConfig.model_fields))]
    for name in sorted(RunConfig.model_fields, key=lambda name: panels.index(options.panel(name))):
        field = RunConfig.model_fields[name]
        if options.panel(name) != panel:
            panel = options.panel(name)
            lines += ["", f"# {f' {panel} ':-^{_WIDTH - 2}}"]
        lines.append("")
        if name == "plugins" and chosen[name]:
            lines += [*_comment(field.description or ""), "plugins:"]
            for plugin, values in chosen[name].items():
                lines += textwrap.indent("\n".join(_plugin(plugin, values)), _INDENT).splitlines()
        else:
            lines += _entry(name, field, {} if name == "plugins" else chosen)
    return "\n".join(lines) + "\n"


def _plugin(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a plugin with all its options."""
    cls = registry.resolve("plugin", name)
    parse_options(name, cls, values)
    yield f"{name}:"
    for option, field in option_names(cls).items():
        for line in _entry(option, cls.Options.model_fields[field], values):
            yield f"{_INDENT}{line}"


def _entry(name: str, field: FieldInfo, chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield an option's description, and its chosen value or in a comment its default."""
    limits = options.bounds(field) or ", ".join(options.choices(field.annotation))
    yield from _comment(f"{field.description or ''} [{limits}]" if limits else field.description or "")
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    plain = TypeAdapter(Any).dump_python(chosen.get(name, default), mode="json")
    value = safe_yaml.write_yaml({name: plain})
    yield from (line if name in chosen else f"# {line}" for line in value.splitlines())


def _comment(text: str) -> Iterator[str]:
    return (f"# {line}" for line in textwrap.wrap(text, _WIDTH - 2, break_on_hyphens=False))
