"""FedDyn as a fedcore plugin: a dynamic regularizer aligns the clients' optima with the global one."""

from fedcore_feddyn.equations import corrected_mean, renewed_dual, renewed_mean_dual, shifted_target
from fedcore_feddyn.plugin import FedDyn, FedDynOptions

__all__ = ["FedDyn", "FedDynOptions", "corrected_mean", "renewed_dual", "renewed_mean_dual", "shifted_target"]
