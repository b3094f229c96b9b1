"""Diagnostics as a fedcore plugin: figures of the models in each round, next to any method."""

from fedcore_diagnostics.measures import (
    angle_spread,
    correlation,
    distance_from_simplex,
    duality_distance,
    linear_cka,
    nearest_mean_mismatch,
    norm_spread,
    prototype_drift,
    update_cosine,
    within_class_variability,
)
from fedcore_diagnostics.plugin import Diagnostics, DiagnosticsOptions

__all__ = [
    "Diagnostics",
    "DiagnosticsOptions",
    "angle_spread",
    "correlation",
    "distance_from_simplex",
    "duality_distance",
    "linear_cka",
    "nearest_mean_mismatch",
    "norm_spread",
    "prototype_drift",
    "update_cosine",
    "within_class_variability",
]
