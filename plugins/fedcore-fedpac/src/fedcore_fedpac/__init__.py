"""FedPAC as a fedcore plugin: feature alignment and combined classifiers."""

from fedcore_fedpac.equations import combination, head_statistics, least_quadratic, objective
from fedcore_fedpac.plugin import FedPAC, FedPACOptions

__all__ = [
    "FedPAC",
    "FedPACOptions",
    "combination",
    "head_statistics",
    "least_quadratic",
    "objective",
]
