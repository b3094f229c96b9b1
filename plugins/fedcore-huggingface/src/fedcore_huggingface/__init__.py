"""Data sets and models of Hugging Face for fedcore, from folders on this machine, data sets of the Hub; next tokens."""

from fedcore_huggingface.data import dataset
from fedcore_huggingface.language import NextToken, TokenBlocks
from fedcore_huggingface.models import model

__all__ = ["NextToken", "TokenBlocks", "dataset", "model"]
