"""The check for matplotlib, which draws figures as files and comes with the extra ``report``."""

from __future__ import annotations

import importlib.util

from fedcore import ConfigError


def require_matplotlib() -> None:
    """Check that matplotlib is installed, without importing it.

    :raises ConfigError: it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("figures as files need matplotlib, which is not installed: pip install matplotlib")
