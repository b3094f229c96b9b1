"""Data sets and models of Hugging Face for fedcore, from folders on this machine, and data sets of the Hub."""

from fedcore_huggingface.data import dataset
from fedcore_huggingface.models import model

__all__ = ["dataset", "model"]
