"""q-FedAvg as a fedcore plugin: clients with a larger loss count more."""

from fedcore_qffl.equations import bend, fair_step, fair_weight, step_factor
from fedcore_qffl.plugin import QFedAvg, QFedAvgOptions

__all__ = ["QFedAvg", "QFedAvgOptions", "bend", "fair_step", "fair_weight", "step_factor"]
