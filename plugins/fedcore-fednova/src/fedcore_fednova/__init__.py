"""FedNova as a fedcore plugin: updates divided by the local work before they are averaged."""

from fedcore_fednova.equations import local_norm, normalised_step, step_factor
from fedcore_fednova.plugin import FedNova, FedNovaOptions

__all__ = ["FedNova", "FedNovaOptions", "local_norm", "normalised_step", "step_factor"]
