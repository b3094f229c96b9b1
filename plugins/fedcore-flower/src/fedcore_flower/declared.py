"""What the name ``flower`` stands for as an engine in a run's configuration."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from fedcore import ConfigError, PluginOptions
from fedcore.engines import ClientSite

REFUSAL = (
    "the clients of a Flower federation are organisations that join it. Start it with fedcore federate server, and "
    "have each of them run fedcore federate client; to simulate clients, leave --engine out"
)


class FlowerOptions(PluginOptions):
    """Options of the engine ``flower``, which ``fedcore federate server`` sets."""

    federation: str = Field(default="", description="Id of the federation, in federation.json too; set by its server.")

    @model_validator(mode="after")
    def _is_federated(self) -> Self:
        if not self.federation:
            raise ValueError(REFUSAL)
        return self


class FlowerEngine:
    """Stands for the engine in a configuration; the server of a federation makes the real one."""

    Options: ClassVar[type[FlowerOptions]] = FlowerOptions
    simulates = False
    """Its clients are elsewhere: checks of plugins leave it out."""

    def __init__(self, spec: ClientSite) -> None:
        raise ConfigError(REFUSAL)
