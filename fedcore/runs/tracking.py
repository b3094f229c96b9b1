"""The connection of a run to its trackers, which are in the package fedcore-trackers and packages on top of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, cast

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.server.round import Notify

Trackers = Mapping[str, Mapping[str, Any]]


class Tracking(Protocol):
    """The interface of the entry point ``processes`` of the group ``fedcore.tracking``."""

    def resolve_trackers(self, choices: Trackers) -> dict[str, dict[str, Any]]:
        """Return the trackers with all their options.

        :raises ConfigError: a name or an option does not exist.
        """

    def tracked(self, config: RunConfig, directory: Path, notify: Notify) -> AbstractContextManager[Notify]:
        """Start a run's trackers; yield a ``notify`` that also informs them."""


def resolve_trackers(choices: Trackers) -> dict[str, dict[str, Any]]:
    """Return the trackers of a run with all their options.

    :raises UnknownNameError: a tracker is not installed.
    :raises ConfigError: an option does not exist or is out of bounds.
    """
    return _tracking(choices).resolve_trackers(choices) if choices else {}


def tracked(config: RunConfig, directory: Path, notify: Notify) -> AbstractContextManager[Notify]:
    """Start a run's trackers, if it has any, until the block ends; yield the run's ``notify``."""
    if not config.trackers:
        return nullcontext(notify)
    return _tracking(config.trackers).tracked(config, directory, notify)


def _tracking(choices: Trackers) -> Tracking:
    if "processes" not in registry.available("tracking"):
        registry.resolve("tracker", next(iter(choices)))  # names the package that is missing
    return cast(Tracking, registry.resolve("tracking", "processes"))
