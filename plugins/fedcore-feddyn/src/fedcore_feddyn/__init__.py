"""FedDyn as a fedcore plugin: a dynamic regularizer aligns the clients' optima with the global one."""

from fedcore_feddyn.equations import client_alpha
from fedcore_feddyn.plugin import FedDyn, FedDynOptions

__all__ = ["FedDyn", "FedDynOptions", "client_alpha"]
