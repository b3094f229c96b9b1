"""Combine config file, flags and ``--set`` into a RunConfig: flags override the file, the file the defaults."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError, FedcoreError, UnknownNameError, suggestion
from fedcore.base.identity import full_name
from fedcore.base.safe_yaml import parse_setting, read_config_file
from fedcore.base.system_options import read_system
from fedcore.hooks.plugin import option_names
from fedcore.runs.saved import check_code, code_in


def build_config(
    given: Mapping[str, Any], file: Path | None, settings: Sequence[str], *, allow_code: bool = False
) -> RunConfig:
    """Return the configuration of a run.

    :param given: the flags that the user wrote, by field.
    :param settings: ``plugin.option=value`` texts.
    :param allow_code: whether the file may name code (``module:...``), as flags may.
    :raises ConfigError: names the problem and its source, the file or a flag.
    """
    source = str(file) if file else ""
    written = read_config_file(file) if file else {}
    if file and "out" in written and Path(str(written["out"])).resolve() == file.parent.resolve():
        del written["out"]  # the file of an earlier run; the new run gets a new directory
    values = {**written, **given}
    if "system" in given and written.get("system"):
        before = read_system(written["system"])
        values["system"] = {**(before if isinstance(before, dict) else {}), **read_system(given["system"])}
    chosen = {kind: _chosen(kind, given, written, source) for kind in ("plugins", "trackers")}
    engine = _engine(given, written, source)
    changed = set_options({**engine, **chosen["plugins"], **chosen["trackers"]}, settings)
    values.update({kind: {name: changed[name] for name in names} for kind, names in chosen.items()})
    values["engine_options"] = next(changed[name] for name in engine)
    try:
        config = RunConfig.create(values, source=source)
    except UnknownNameError:
        raise
    except ConfigError as error:
        raise ConfigError(_without_source(str(error), source, given)) from None
    check_code(code_in(config), source, allow=allow_code, own=typed_code(given.values()))
    return config


def typed_code(given: Iterable[Any]) -> set[str]:
    """Return the code names that the user typed on the command line; these need no further permission."""
    return {name for value in given for name in re.findall(r"module:[\w.:]+", str(value))}


def set_options(plugins: Mapping[str, Mapping[str, Any]], settings: Sequence[str]) -> dict[str, Any]:
    """Return the plugins (and trackers, and the engine) with their options changed by ``plugin.option=value`` texts.

    ``Near`` or ``near`` is short for ``module:study.Near`` where one of them has this name.

    :raises ConfigError: a name is not among the run's.
    """
    changed = {name: dict(options) for name, options in plugins.items()}
    for text in settings:
        bare = text.partition("=")[0]
        if owners := [name for name in changed if "." not in bare and bare in _options(name)]:
            raise ConfigError(f"--set {text}: write --set {' or --set '.join(f'{name}.{text}' for name in owners)}")
        name, option, value = parse_setting(text)
        name = full_name(name, changed)
        if name not in changed:
            kind = _kind(name)
            if kind == "engine":
                raise ConfigError(f"--set {text}: {name!r} is not this run's engine. To use it, add --engine {name}")
            if not (name in registry.available(kind) or registry.package_of(kind, name) or registry.is_code(name)):
                near = suggestion(name, {*changed, *registry.available(kind)})
                raise ConfigError(f"--set {text}: there is no {kind} {name!r}.{near}")
            near = suggestion(name, changed) if changed else ""
            raise ConfigError(
                f"--set {text}: {kind} {name!r} is not among this run's {kind}s.{near} To use it, add --{kind} {name}"
            )
        changed[name][option] = value
    return changed


def _options(name: str) -> Collection[str]:
    """Return the options of a plugin, tracker or engine; none where it cannot be imported."""
    for kind in ("plugin", "tracker", "engine"):
        with suppress(FedcoreError, AttributeError):
            return option_names(registry.resolve(kind, name))
    return ()


def _kind(name: str) -> str:
    """Return the kind of a name that this run does not use: tracker or engine if it is known as such, else plugin."""
    known = (
        kind for kind in ("tracker", "engine") if name in registry.available(kind) or registry.package_of(kind, name)
    )
    return next(known, "plugin")


def _engine(given: Mapping[str, Any], written: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """Return the engine of the flags, else of the file, with the options that the file has for it."""
    own = {key: written[key] for key in ("engine", "engine_options") if key in written}
    config = RunConfig.create(own, source=source)
    name = given.get("engine", config.engine)
    return {name: dict(config.engine_options) if name == config.engine else {}}


def _chosen(kind: str, given: Mapping[str, Any], written: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """Return the ``plugins`` or ``trackers`` of the flags, else of the file, with the options that the file has."""
    options: dict[str, dict[str, Any]] = getattr(RunConfig.create({kind: written.get(kind, {})}, source=source), kind)
    if kind not in given:
        return options
    chosen = [{name: options.get(name, {})} for name in given[kind]]
    named: dict[str, dict[str, Any]] = getattr(RunConfig.create({kind: chosen}), kind)
    return named


def _without_source(message: str, source: str, given: Mapping[str, Any]) -> str:
    """Remove the file's name from problems that a flag caused."""
    lines = []
    for line in message.splitlines():
        bare = line.removeprefix(f"{source}: ")
        name = bare.partition(":")[0].removeprefix("--").replace("-", "_")
        lines.append(bare if name in given else line)
    return "\n".join(lines)
