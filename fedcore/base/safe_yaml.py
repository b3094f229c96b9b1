"""YAML restricted to JSON's values, without objects. For files of unknown origin and typed options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fedcore.base.errors import ConfigError, flag_of

BESIDE_OPTIONS = ("digests", "changes", "versions")
"""Entries of a run's own config.yaml next to the options: digests of its files, changes at a resume, versions."""

_ONLY = ("null", "bool", "int", "float", "str", "seq", "map")


class _Loader(yaml.SafeLoader):
    """A safe loader for JSON's types. Dates stay text. Sets, bytes and other types are refused."""

    yaml_constructors = {  # PyYAML's own registry: the entry None refuses every other tag
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix("tag:yaml.org,2002:") in _ONLY
    }
    yaml_implicit_resolvers = {
        first: [(tag, expression) for tag, expression in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Refuse a key that stands twice. PyYAML would take its last value."""
        node, keys = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            if (written := (key.tag, str(key.value))) in keys and written[1] != "<<":
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
            keys.add(written)
        return node

    def construct_scalar(self, node: Any) -> Any:
        """Join surrogate pairs: ``json.dumps`` writes a character beyond U+FFFF as two escapes."""
        value = super().construct_scalar(node)
        return value.encode("utf-16", "surrogatepass").decode("utf-16") if isinstance(value, str) else value


class _PlainLoader(_Loader):
    """A loader for files that :func:`write_yaml` wrote. A few lines of aliases can stand for billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases. Without them a merge key repeats nothing."""
        if self.check_event(yaml.AliasEvent):
            problem = "it has an alias, which fedcore never writes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())
        return super().compose_node(parent, index)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """A dumper that writes a value again where the same object stands twice, instead of an alias.

    libyaml's, where PyYAML was built with it: it takes a sixth of the time.
    """

    def ignore_aliases(self, data: Any) -> bool:
        """Return True for every value."""
        return True


def write_yaml(options: Mapping[str, Any]) -> str:
    """Return the YAML text of options with values of JSON's types, without aliases. Mappings keep their order.

    :raises ConfigError: a text, such as a path, is not valid UTF-8, so that it could not be read back.
    """
    for name, value in options.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{flag_of(name)} {value!r:.500} is not valid UTF-8, as YAML has to be; rename the file or folder"
            ) from None
    return str(yaml.dump(options, Dumper=_Dumper, sort_keys=False))


def read_yaml(text: str, *, plain: bool = False) -> Any:
    """Return the value of a YAML text.

    :param plain: refuse aliases, which :func:`write_yaml` does not write.
    :raises ValueError: the text is not YAML, has a type that JSON lacks, or a mapping has a key twice.
    """
    try:
        return yaml.load(text, Loader=_PlainLoader if plain else _Loader)  # noqa: S506 - safe loaders
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (RecursionError, AttributeError, KeyError, IndexError, TypeError) as error:  # PyYAML on `!!int`, `[[[[...`
        raise ValueError(f"it cannot be read as YAML ({type(error).__name__}: {error})") from None


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the options of a YAML file. The file may be a run's own ``config.yaml``.

    :raises ConfigError: the file is missing, unreadable or not a mapping.
    """
    return {name: value for name, value in read_mapping(path).items() if name not in BESIDE_OPTIONS}


def read_mapping(path: Path, *, plain: bool = False) -> dict[str, Any]:
    """Read a YAML file that holds a mapping or is empty. Errors are as for :func:`read_config_file`.

    :param plain: as for :func:`read_yaml`.
    """
    try:
        values = read_yaml(Path(os.path.expanduser(path)).read_text(encoding="utf-8"), plain=plain)
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"config file {path} must be a mapping of option names to values")
    return values


def parse_setting(text: str) -> tuple[str, str, Any]:
    """Split ``plugin.option=value``. The value is read as YAML, so numbers, lists and null work.

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
