"""Simulated clients: unavailable, lost, late and slow ones, and clients that do not wait for each other. No torch."""

from fedcore_simulation.system import SimulatedSystem

__all__ = ["SimulatedSystem"]
