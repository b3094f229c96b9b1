"""The engine ``flower`` in a run's configuration."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from fedcore import ConfigError, PluginOptions
from fedcore.engines import ClientSite

REFUSAL = (
    "the clients of a Flower federation are organisations. Start the federation with fedcore federate server; each "
    "organisation joins it with fedcore federate client. To simulate clients, leave --engine out"
)


class FlowerOptions(PluginOptions):
    """The options of the engine ``flower``. ``fedcore federate server`` sets them."""

    federation: str = Field(default="", description="Id of the federation, as in federation.json; its server sets it.")

    @model_validator(mode="after")
    def _is_federated(self) -> Self:
        if not self.federation:
            raise ValueError(REFUSAL)
        return self


class FlowerEngine:
    """Refuses to start. A run names this engine, and ``fedcore federate server`` starts the run with a real one."""

    Options: ClassVar[type[FlowerOptions]] = FlowerOptions
    simulates = False
    """Its clients are not in this process, so checks of plugins skip this engine."""

    def __init__(self, spec: ClientSite) -> None:
        raise ConfigError(REFUSAL)
