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
from fedcore_robust.heterogeneity import (
    bucket_weights,
    bulyan_selection,
    centred_clipping,
    geometric_median,
    mean_around_median,
    neighbour_weights,
    trusted_mean,
)
from fedcore_robust.rules import Krum, KrumOptions, Median, RuleOptions, TrimmedMean
from fedcore_robust.vectors import (
    Bulyan,
    CentredClip,
    CentredClipOptions,
    FLTrust,
    GeometricMedian,
    GeometricMedianOptions,
)

__all__ = [
    "Bulyan",
    "CentredClip",
    "CentredClipOptions",
    "FLTrust",
    "GeometricMedian",
    "GeometricMedianOptions",
    "Krum",
    "KrumOptions",
    "Median",
    "NormClip",
    "NormClipOptions",
    "RuleOptions",
    "TrimmedMean",
    "bucket_weights",
    "bulyan_selection",
    "centred_clipping",
    "clip_factor",
    "coordinate_median",
    "geometric_median",
    "krum_scores",
    "lowest",
    "mean_around_median",
    "neighbour_weights",
    "squared_distances",
    "trimmed_mean",
    "trusted_mean",
]
