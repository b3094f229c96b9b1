"""FedECCR as fedcore plugins: prototype contrast (stage 1) and the classifier's correction, USCC (stage 2)."""

from fedcore_fedeccr.plugin import FedECCR, FedECCROptions
from fedcore_fedeccr.uscc import Uscc, UsccOptions

__all__ = ["FedECCR", "FedECCROptions", "Uscc", "UsccOptions"]
