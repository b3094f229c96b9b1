"""Live tracking: what a tracker is, and the figures of a run as it wants them."""

from fedcore.runs.trackers.base import Status, TrackedRun, Tracker, TrackerOptions
from fedcore.runs.trackers.scalars import flat, parameters, round_scalars, scalars

__all__ = [
    "Status",
    "TrackedRun",
    "Tracker",
    "TrackerOptions",
    "flat",
    "parameters",
    "round_scalars",
    "scalars",
]
