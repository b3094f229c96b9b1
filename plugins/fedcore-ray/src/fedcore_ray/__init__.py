"""Clients on Ray: ``--engine ray`` spreads a run's clients over the workers of a cluster."""

from __future__ import annotations

from fedcore_ray.engine import RayEngine
from fedcore_ray.options import RayOptions

__all__ = ["RayEngine", "RayOptions"]
