"""FedDC as a fedcore plugin: local drift is tracked on the clients and corrected on the server."""

from fedcore_feddc.equations import (
    corrected_mean,
    drift_target,
    gradient_gap,
    renewed_drift,
    renewed_gradient,
    renewed_mean_drift,
)
from fedcore_feddc.plugin import FedDC, FedDCOptions

__all__ = [
    "FedDC",
    "FedDCOptions",
    "corrected_mean",
    "drift_target",
    "gradient_gap",
    "renewed_drift",
    "renewed_gradient",
    "renewed_mean_drift",
]
