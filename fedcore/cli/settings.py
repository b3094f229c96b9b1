"""Combine preset, config file, flags and ``--set`` into a RunConfig.

Flags override the file, the file overrides the preset, and the preset overrides defaults.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcore.base import registry
from fedcore.base.config import RunConfig, marked, read_choices
from fedcore.base.errors import ConfigError, FedcoreError, suggestion
from fedcore.base.identity import LABELS, full_name, preset_options
from fedcore.base.safe_yaml import BESIDE_OPTIONS, parse_setting, read_mapping
from fedcore.base.section import Repeated
from fedcore.hooks.plugin import option_names
from fedcore.runs.saved import check_code, code_in

CONFIGURABLE = ("plugin", "tracker", "engine")
"""Kinds of objects that ``--set`` gives options to."""


def build_config(
    flags: Mapping[str, Any],
    file: Path | None,
    settings: Sequence[str],
    *,
    allow_code: bool = False,
    preset: str | None = None,
) -> RunConfig:
    """Return the configuration of a run.

    :param flags: the flags that the user wrote, by field.
    :param settings: ``plugin.option=value`` texts.
    :param preset: the name of a known setting. The file overrides it.
    :param allow_code: whether the file may name code (``module:...``), as flags may.
    :raises ConfigError: names the problem and its source, the file or a flag.
    """
    source = str(file) if file else ""
    preset_values = preset_options(preset) if preset else {}
    base = {**preset_values, **(_file_options(file) if file else {})}
    values = {**base, **flags}
    for name in flags.keys() & base.keys():
        if marked(name, Repeated):
            values[name] = [base[name], *flags[name]]
    plugins = _chosen("plugin", flags.get("plugins"), base.get("plugins", {}))
    trackers = _chosen("tracker", flags.get("trackers"), base.get("trackers", {}))
    default = RunConfig.model_fields["engine"].default
    engine = str(values.get("engine", default))
    # The engine's options stay only if the engine stays.
    options = base.get("engine_options") if engine == base.get("engine", default) else None
    changed = set_options({**read_choices({engine: options}, "engine"), **plugins, **trackers}, settings)
    values["plugins"] = {name: changed[name] for name in plugins}
    values["trackers"] = {name: changed[name] for name in trackers}
    values["engine_options"] = changed[engine]
    config = RunConfig.create(values, source=source, typed=flags)
    check_code(code_in(config), source, allow=allow_code, own=typed_code([*flags.values(), *preset_values.values()]))
    return config


def _file_options(file: Path) -> dict[str, Any]:
    """Return the options in a file, without what belongs to one run if the file is an earlier run's."""
    content = read_mapping(file)
    own = (*LABELS, "out") if "digests" in content else ()
    return {name: value for name, value in content.items() if name not in (*BESIDE_OPTIONS, *own)}


def _chosen(kind: str, typed: list[str] | None, written: Any) -> dict[str, dict[str, Any]]:
    """Return the typed plugins or trackers, by default the file's, each with its options in the file."""
    options = read_choices(written, kind)
    return options if typed is None else {name: options.get(name, {}) for name in read_choices(typed, kind)}


def typed_code(values: Iterable[Any]) -> set[str]:
    """Return the code names that the user typed on the command line. They need no further permission."""
    return {name for value in values for name in re.findall(r"module:[\w.:]+", str(value))}


def set_options(plugins: Mapping[str, Mapping[str, Any]], settings: Sequence[str]) -> dict[str, Any]:
    """Return the plugins (and trackers, and the engine) with their options changed by ``plugin.option=value`` texts.

    ``Near`` or ``near`` is short for ``module:study.Near`` if only one of the names fits.

    :raises ConfigError: the run does not use the name, or an option is given twice.
    """
    changed = {name: dict(options) for name, options in plugins.items()}
    for text in settings:
        bare = text.partition("=")[0]
        if owners := [name for name in changed if "." not in bare and bare in _options(name)]:
            raise ConfigError(f"--set {text}: write --set {' or --set '.join(f'{name}.{text}' for name in owners)}")
        name, option, value = parse_setting(text)
        if len([other for other in settings if other.startswith(f"{bare}=")]) > 1:
            raise ConfigError(f"--set {text}: {bare} is given twice; give it once")
        name = full_name(name, changed)
        if name not in changed:
            raise ConfigError(f"--set {text}: {_absent(name, changed)}")
        changed[name][option] = value
    return changed


def _options(name: str) -> Collection[str]:
    """Return the options of a plugin, tracker or engine; empty if it cannot be imported."""
    for kind in CONFIGURABLE:
        with suppress(FedcoreError, AttributeError):
            return option_names(registry.resolve(kind, name))
    return ()


def _absent(name: str, used: Collection[str]) -> str:
    """Return a message: why a name cannot have options in a run that does not use it, and the remedy."""
    for kind in CONFIGURABLE:
        if name in registry.available(kind) or registry.package_of(kind, name):
            return f"{kind} {name!r} is not in this run. To use it, add --{kind} {name}"
    if registry.is_code(name):
        return f"{name!r} is not in this run.{suggestion(name, used)} To use it, add --plugin {name}"
    return f"there is no plugin {name!r}.{suggestion(name, {*used, *registry.available('plugin')})}"
