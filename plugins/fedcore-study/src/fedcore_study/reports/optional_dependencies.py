"""The libraries of the extra ``fedcore[report]``: there, or a message that says how to get them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from fedcore import ConfigError

LIBRARIES = ("plotly", "matplotlib", "jinja2")


def require(libraries: Iterable[str] = LIBRARIES) -> None:
    """Check that libraries are installed, without importing them.

    :raises ConfigError: some are not.
    """
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this needs {' and '.join(missing)}, which are not installed: pip install {' '.join(missing)}"
        )
