"""Live tracking: what a tracker is, the figures of a run as it wants them, and the processes that run trackers."""

from fedcore_trackers.base import Status, TrackedRun, Tracker, TrackerOptions
from fedcore_trackers.scalars import parameters, round_scalars, scalars

__all__ = [
    "Status",
    "TrackedRun",
    "Tracker",
    "TrackerOptions",
    "parameters",
    "round_scalars",
    "scalars",
]
