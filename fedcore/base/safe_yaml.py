"""YAML restricted to JSON's values, for files of unknown origin and typed options."""

from __future__ import annotations

import json
from typing import Any

import yaml

from fedcore.base.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """A safe loader to which a date is a text."""

    yaml_implicit_resolvers = {
        first: [(tag, expression) for tag, expression in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's, where PyYAML was built with it


def write_yaml(value: Any) -> str:
    """Return the YAML text of a value of JSON's types; mappings keep their order."""
    return str(yaml.dump(value, Dumper=_DUMPER, sort_keys=False))


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    :raises ValueError: it is not YAML, holds a type that JSON does not have, contains itself, or is nested too deeply.
    """
    try:
        value = _Loader(text).get_single_data()
        json.dumps(value)  # refuses sets, bytes and what contains itself, which PyYAML reads
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (AttributeError, KeyError, IndexError, TypeError) as error:  # PyYAML on odd scalars: `!!int`, `!!bool x`
        raise ValueError(f"a value is not of its type ({type(error).__name__}: {error})") from None
    return value


def parse_setting(text: str) -> tuple[str, str, Any]:
    """Split ``plugin.option=value``; the value is read as YAML, so numbers, lists and null work.

    :raises ConfigError: the text has another form.
    """
    target, equals, value = text.partition("=")
    plugin, dot, option = target.rpartition(".")
    if not (equals and dot and plugin and option):
        raise ConfigError(f"--set {text!r}: write plugin.option=value, for example --set fedcd.xi=0.5")
    try:
        return plugin, option, read_yaml(value)
    except ValueError as error:
        raise ConfigError(f"--set {text!r}: the value is not valid YAML ({error})") from None
