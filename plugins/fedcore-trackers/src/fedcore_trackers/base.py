"""The contract of a tracker. Imports no torch: a tracker's process needs none."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from fedcore import FedcoreError, PluginContractError, PluginOptions, RunConfig
from fedcore.tools import parse_options, registry

Status = Literal["finished", "stopped", "failed"]


class TrackerOptions(PluginOptions):
    """Base of every tracker's options: unknown names are refused, values are fixed."""

    patience: float = Field(
        default=60.0, gt=0, le=86400, description="Seconds that the run waits at its end for this tracker to finish."
    )


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is started with.

    :param directory: the run directory, an absolute path; ``config.yaml`` is in it.
    :param config: all options, resolved, with the options of plugins and trackers.
    :param round: the first round that will come: 0, or the first that earlier processes of this run did not take.
    :param state: the tracker's own JSON values. They are kept when the run is resumed.
    """

    directory: Path
    config: RunConfig
    round: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The run's display name: the name of its folder."""
        return self.directory.name


class Tracker(ABC):
    """Sends the records of a run in progress to another place.

    A tracker has its own process, which follows the run directory. What it imports, draws or waits for does not change
    the run. ``start`` is called first, then ``round`` and ``evaluation`` in the order of the rounds. Each round comes
    once, also over a resume. ``finish`` is called last, unless the process is killed. An exception switches the tracker
    off, with a warning. Import heavy or optional packages inside ``start``: the run itself imports the class for its
    options.
    """

    Options: ClassVar[type[PluginOptions]] = TrackerOptions

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def start(self, run: TrackedRun) -> None:
        """Begin, or go on with what ``run.state`` names; called once."""

    def round(self, record: Mapping[str, Any]) -> None:  # noqa: B027 - this and the next ones may be left out
        """Take a round's line of metrics.jsonl; see :func:`fedcore_trackers.round_scalars`."""

    def evaluation(self, round: int, metrics: Mapping[str, Any]) -> None:  # noqa: B027
        """Take a round's evaluation, by protocol. It follows the ``round`` of the same round."""

    def finish(self, status: Status, summary: Mapping[str, Any] | None) -> None:  # noqa: B027
        """Write the remaining values and close.

        :param status: ``finished``; ``stopped`` (Ctrl-C, or the run's process was killed), ``failed`` (an error).
        :param summary: summary.json of a finished run, else None.
        """


@contextmanager
def requires(*libraries: str) -> Iterator[None]:
    """Turn a missing library into a message that says how to install it.

    :raises FedcoreError: the block could not import something.
    """
    try:
        yield
    except ImportError as error:
        raise FedcoreError(f"pip install {' '.join(libraries)} ({error})") from error


def tracker_class(name: str) -> type[Tracker]:
    """Return the class behind a name.

    :raises UnknownNameError: no installed package provides the name.
    :raises PluginContractError: it cannot be imported, or is no tracker.
    """
    cls = registry.resolve("tracker", name)
    if not (inspect.isclass(cls) and issubclass(cls, Tracker)):
        expected = "a subclass of fedcore_trackers.Tracker"
        raise PluginContractError.of(name, f"is {cls!r}", kind="tracker", expected=expected)
    return cls


def create_tracker(name: str, options: Mapping[str, Any]) -> Tracker:
    """Build a tracker from its name and options.

    :raises FedcoreError: no such tracker or option.
    """
    cls = tracker_class(name)
    return cls(parse_options(name, cls, options, kind="tracker"))


def resolve_trackers(choices: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the trackers with all their options, defaults included. One that does not load keeps its options as
    they are.

    :raises ConfigError: a name or an option that does not exist, a value out of bounds.
    """
    resolved: dict[str, dict[str, Any]] = {}
    for name, options in choices.items():
        try:
            cls = tracker_class(name)
        except PluginContractError:
            resolved[name] = dict(options)  # its own process reports the error: no tracker stops a run
            continue
        parsed = parse_options(name, cls, options, kind="tracker")
        resolved[name] = parsed.model_dump(mode="json", by_alias=True)
    return resolved
