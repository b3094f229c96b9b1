"""Compressed uploads as fedcore plugins: top-k with error feedback, and QSGD."""

from fedcore_compress.equations import dequantise, keep_count, largest, pack_bits, quantise, unpack_bits
from fedcore_compress.plugin import QSGD, QSGDOptions, TopK, TopKOptions

__all__ = [
    "QSGD",
    "QSGDOptions",
    "TopK",
    "TopKOptions",
    "dequantise",
    "keep_count",
    "largest",
    "pack_bits",
    "quantise",
    "unpack_bits",
]
