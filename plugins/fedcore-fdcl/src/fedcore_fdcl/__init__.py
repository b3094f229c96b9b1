"""FDCL as a fedcore plugin: dual-layer bidirectional contrast, on features and on predictions."""

from fedcore_fdcl.equations import classifier_loss, encoder_loss
from fedcore_fdcl.plugin import FDCL, FDCLOptions

__all__ = ["FDCL", "FDCLOptions", "classifier_loss", "encoder_loss"]
