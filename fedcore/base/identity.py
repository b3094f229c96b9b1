"""What makes two runs the same run, or the same method in other settings: for sweeps and comparisons.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedcore.base.config import RunConfig

WITHOUT_EFFECT = (
    "out",
    "data_dir",
    "engine_options",
    "workers",
    "checkpoint_every",
    "max_waiting",
    "trackers",
    "client_timeout",
)
"""Options that say where and how a run is executed; the same seed gives the same bits for all their values."""

DEALING = ("dataset", "partition", "alpha", "classes_per_client", "clients", "client_test_fraction", "samples")
"""Options that, with the seed, decide who holds which samples."""


def settings(config: RunConfig) -> dict[str, Any]:
    """Return every option that can change a run's results, as plain values; the seed is one of them."""
    values = config.model_dump(mode="json", exclude=set(WITHOUT_EFFECT))
    values["plugins"].pop("fedavg", None)  # the built-in one is always there, named or not
    return values


def key(value: Any) -> str:
    """Return a text that is equal for equal plain values; the order of a mapping (of plugins) counts."""
    return json.dumps(value)


def digest(config: RunConfig) -> str:
    """Return 12 hexadecimal digits that two runs share when the same results are expected of them."""
    values = settings(config)
    for name in ("system", "local_steps"):
        if values[name] is None:
            del values[name]  # sweeps that were begun before there was the option find their runs again
    return hashlib.sha256(key(values).encode()).hexdigest()[:12]


def method(plugins: Mapping[str, Any]) -> str:
    """Return the name of a combination of plugins: ``moon+uscc``; without any it is ``fedavg``."""
    return "+".join(plugins) or "fedavg"
