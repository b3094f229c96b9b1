"""FedPAC as a fedcore plugin: feature alignment and combined classifiers."""

from fedcore_fedpac.equations import combination, head_statistics, least_quadratic, objective
from fedcore_fedpac.plugin import EncoderWarning, FedPAC, FedPACOptions

__all__ = [
    "EncoderWarning",
    "FedPAC",
    "FedPACOptions",
    "combination",
    "head_statistics",
    "least_quadratic",
    "objective",
]
