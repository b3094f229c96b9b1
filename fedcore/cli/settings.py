"""A config file, flags and ``--set`` joined to a RunConfig: flags override the file, the file the defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcore.config import RunConfig, parse_setting, read_config_file
from fedcore.errors import ConfigError, UnknownNameError, suggestion


def build_config(given: Mapping[str, Any], file: Path | None, settings: Sequence[str]) -> RunConfig:
    """Return the configuration of a run.

    :param given: the flags that the user wrote, by field.
    :param settings: ``plugin.option=value`` texts.
    :raises ConfigError: what is wrong, and whether the file or a flag said so.
    """
    source = str(file) if file else ""
    written = read_config_file(file) if file else {}
    if file and "out" in written and Path(str(written["out"])).resolve() == file.parent.resolve():
        del written["out"]  # the file of an earlier run; the new one gets a directory of its own
    values = {**written, **given}
    listed = values.pop("plugins", {})
    if "plugins" in given:
        listed = _keep_options(given["plugins"], written.get("plugins", {}), source)
    values["plugins"] = set_options(
        RunConfig.create({"plugins": listed}, source="" if "plugins" in given else source).plugins, settings
    )
    try:
        return RunConfig.create(values, source=source)
    except UnknownNameError:
        raise
    except ConfigError as error:
        raise ConfigError(_without_source(str(error), source, given)) from None


def set_options(plugins: Mapping[str, Mapping[str, Any]], settings: Sequence[str]) -> dict[str, Any]:
    """Return the plugins with their options changed by ``plugin.option=value`` texts.

    :raises ConfigError: a plugin that is not among the run's.
    """
    changed = {name: dict(options) for name, options in plugins.items()}
    for text in settings:
        name, option, value = parse_setting(text)
        if name not in changed:
            near = suggestion(name, changed) if changed else ""
            raise ConfigError(
                f"--set {text}: plugin {name!r} is not among this run's plugins.{near} To use it, add --plugin {name}"
            )
        changed[name][option] = value
    return changed


def _keep_options(names: Sequence[str], in_file: Any, source: str) -> list[Any]:
    """Return plugins named by flags, each with the options that the file has for it."""
    options = RunConfig.create({"plugins": in_file}, source=source).plugins
    return [{name: options.get(name, {})} for name in names]


def _without_source(message: str, source: str, given: Mapping[str, Any]) -> str:
    """Take the file's name off the problems of what a flag set."""
    lines = []
    for line in message.splitlines():
        bare = line.removeprefix(f"{source}: ")
        name = bare.partition(":")[0].removeprefix("--").replace("-", "_")
        lines.append(bare if name in given else line)
    return "\n".join(lines)
