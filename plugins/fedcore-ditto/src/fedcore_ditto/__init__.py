"""Ditto as a fedcore plugin."""

from fedcore_ditto.plugin import Ditto, DittoOptions

__all__ = ["Ditto", "DittoOptions"]
