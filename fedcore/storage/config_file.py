"""Configuration files: YAML mappings of option names to values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedcore.base.errors import ConfigError
from fedcore.base.safe_yaml import read_yaml
from fedcore.storage.files import read_text

BESIDE_OPTIONS = ("digests", "changes", "versions")
"""Entries of a run's own config.yaml that are not options: digests of its data and installed versions."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the options of a YAML config, a run's own ``config.yaml`` included.

    :raises ConfigError: missing, unreadable or not a mapping.
    """
    return {name: value for name, value in read_mapping(path).items() if name not in BESIDE_OPTIONS}


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping, or nothing; raises as :func:`read_config_file`."""
    try:
        values = read_yaml(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"config file {path} must be a mapping of option names to values")
    return values
