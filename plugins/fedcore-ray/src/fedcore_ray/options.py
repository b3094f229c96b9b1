"""What ``--set ray.NAME=VALUE`` can say."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from fedcore import PLACE, PluginOptions


class RayOptions(PluginOptions):
    """Options of the engine ``ray``."""

    address: str | None = Field(
        default=None,
        json_schema_extra=PLACE,
        description="The cluster: auto for the one that runs on this machine, HOST:PORT for its head; default a Ray of "
        "the run's own, on this machine.",
    )
    cpus_per_worker: float = Field(
        default=1.0, gt=0, le=1024, description="CPUs that a worker takes of its node; below 1 several share one."
    )
    gpus_per_worker: float | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="GPUs that a worker takes; below 1 several share one. Default 1 on CUDA, else 0.",
    )
    timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds until a client's task is given up and its worker replaced; default --client-timeout.",
    )
    start_timeout: float = Field(
        default=300.0,
        gt=0,
        description="Seconds within which the first worker has to be ready; the cluster may be busy.",
    )

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is None or value == "auto" or re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s/:\[\]]+):\d{1,5}", value):
            return value
        if value.startswith("ray://"):
            raise ValueError(
                "the run has to be started on a machine of the cluster, not through Ray's client protocol ray://; "
                "write auto there"
            )
        raise ValueError("write auto, or the head's HOST:PORT as ray start printed it")

    @field_validator("cpus_per_worker", "gpus_per_worker")
    @classmethod
    def _check_share(cls, value: float | None) -> float | None:
        if value is not None and value > 1 and value != int(value):
            raise ValueError("more than one is a whole number; Ray divides single CPUs and GPUs only")
        return value
