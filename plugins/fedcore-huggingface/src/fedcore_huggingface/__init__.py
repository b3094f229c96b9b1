"""Data sets and models of Hugging Face for fedcore, from folders on this machine; nothing is downloaded."""

from fedcore_huggingface.data import dataset
from fedcore_huggingface.models import model

__all__ = ["dataset", "model"]
