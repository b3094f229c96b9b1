"""Robust aggregation as fedcore plugins: the server's defence against a few clients that send anything."""

from fedcore_robust.clipping import NormClip, NormClipOptions
from fedcore_robust.equations import (
    clip_factor,
    coordinate_median,
    krum_scores,
    lowest,
    squared_distances,
    trimmed_mean,
)
from fedcore_robust.rules import Krum, KrumOptions, Median, RobustnessWarning, TrimmedMean, TrimmedMeanOptions

__all__ = [
    "Krum",
    "KrumOptions",
    "Median",
    "NormClip",
    "NormClipOptions",
    "RobustnessWarning",
    "TrimmedMean",
    "TrimmedMeanOptions",
    "clip_factor",
    "coordinate_median",
    "krum_scores",
    "lowest",
    "squared_distances",
    "trimmed_mean",
]
