"""FedDC as a fedcore plugin: local drift is tracked on the clients and corrected on the server."""

from fedcore_feddc.equations import client_weight
from fedcore_feddc.plugin import FedDC, FedDCOptions

__all__ = ["FedDC", "FedDCOptions", "client_weight"]
