"""CCVR as a fedcore plugin: the classifier is calibrated after training, on virtual representations."""

from fedcore_ccvr.head import TukeyLinear, tukey
from fedcore_ccvr.plugin import Ccvr, CcvrOptions

__all__ = ["Ccvr", "CcvrOptions", "TukeyLinear", "tukey"]
