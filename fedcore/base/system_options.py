"""Options of the simulated system (``--system``): unavailable, lost, late and slow clients. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedcore.base.errors import ConfigError, UnknownNameError
from fedcore.base.safe_yaml import read_yaml


class SystemOptions(BaseModel):
    """Simulated faults of clients and connections. The defaults are ideal clients.

    The faults have four axes: availability (``availability``, ``day``), connectivity (``no_show``, ``dropout``),
    completeness (``stragglers``, ``partial``) and responsiveness (``slow``, ``slow_factor``, ``step_seconds``,
    ``latency``, ``deadline``, ``concurrency``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    availability: float = Field(default=1.0, gt=0, le=1, description="Chance that a client can be selected in a round.")
    day: int | None = Field(
        default=None,
        ge=2,
        le=1 << 20,
        description="Rounds in a day: each client is available at its own hours, the same every day; "
        "by default availability is drawn in every round.",
    )
    no_show: float = Field(default=0.0, ge=0, le=1, description="Chance that a selected client cannot be reached.")
    dropout: float = Field(
        default=0.0, ge=0, le=1, description="Chance that a client is lost during its local training."
    )
    stragglers: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Chance that a client completes fewer local epochs, 1 to E - 1, or steps, 1 to K - 1, in the same "
        "time.",
    )
    partial: Literal["aggregate", "drop"] = Field(
        default="aggregate",
        description="Whether updates of clients that completed only some of their epochs are aggregated or dropped.",
    )
    slow: float = Field(
        default=0.0, ge=0, le=1, description="Fraction of the clients that are slow throughout the run."
    )
    slow_factor: float = Field(default=4.0, ge=1, le=1e6, description="Factor on the time of slow clients.")
    step_seconds: float = Field(
        default=1.0, gt=0, le=1e6, description="Virtual seconds per mini-batch of the other clients."
    )
    latency: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Mean virtual transfer time per client and round in seconds, exponentially distributed.",
    )
    deadline: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="Virtual seconds after which the server accepts no more updates of a round.",
    )
    concurrency: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="Clients that train at the same time without waiting for each other, for a method that starts "
        "clients from older models (fedbuff): the server steps when a cohort's number of updates is there.",
    )

    @model_validator(mode="after")
    def _check_concurrency(self) -> SystemOptions:
        ideal = {"availability": 1.0, "no_show": 0.0, "dropout": 0.0, "stragglers": 0.0, "deadline": None}
        beside = [name for name, value in ideal.items() if getattr(self, name) != value]
        if self.concurrency is not None and beside:
            raise ValueError(
                f"concurrency has no rounds in which clients could be lost or late, but {beside[0]} is set: use it "
                "with slow, slow_factor, step_seconds and latency"
            )
        return self


def read_system(value: Any) -> Any:
    """Return ``["dropout=0.1", "slow=0.3"]`` as a mapping, with its values read as YAML.

    Values of any other form are returned unchanged.

    :raises ConfigError: a text has another form, or an option is given twice.
    :raises UnknownNameError: there is no such option.
    """
    texts = [value] if isinstance(value, str) else value
    if texts and isinstance(texts, (list, tuple)):
        value = {}
        for text in texts:
            name, equals, setting = str(text).partition("=")
            name = name.strip().replace("-", "_")
            if not (isinstance(text, str) and equals and name and setting.strip()):
                raise ConfigError(f"--system {text}: write OPTION=VALUE, for example --system dropout=0.1")
            if name in value:
                raise ConfigError(f"--system {text}: {name} is given twice; give it once")
            try:
                value[name] = read_yaml(setting)
            except ValueError as error:
                raise ConfigError(f"--system {text}: the value is not valid YAML ({error})") from None
    for name in value if isinstance(value, dict) else ():
        if name not in SystemOptions.model_fields:
            raise UnknownNameError("system option", str(name), SystemOptions.model_fields)
    return value
