"""The simulated system's options: unavailable, lost, late and slow clients, and what does not fit them. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedcore import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from fedcore import RunConfig, RunSetup


class SimulatedSystem(BaseModel):
    """Simulated faults of clients and connections. The defaults are ideal clients.

    The faults have four axes: availability (``availability``, ``day``), connectivity (``no_show``, ``dropout``),
    completeness (``stragglers``, ``partial``) and responsiveness (``slow``, ``slow_factor``, ``step_seconds``,
    ``latency``, ``deadline``, ``concurrency``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

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

    @model_validator(mode="before")
    @classmethod
    def _known_options(cls, values: Any) -> Any:
        """Refuse an unknown option and suggest a similar one."""
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                raise UnknownNameError("system option", str(name), cls.model_fields)
        return values

    @model_validator(mode="after")
    def _check_concurrency(self) -> SimulatedSystem:
        ideal = {"availability": 1.0, "no_show": 0.0, "dropout": 0.0, "stragglers": 0.0, "deadline": None}
        beside = [name for name, value in ideal.items() if getattr(self, name) != value]
        if self.concurrency is not None and beside:
            raise ValueError(
                f"concurrency has no rounds in which clients could be lost or late, but {beside[0]} is set: use it "
                "with slow, slow_factor, step_seconds and latency"
            )
        return self

    @property
    def arrival(self) -> float:
        """Chance that a client is available in a round, can be reached and is not lost."""
        return self.availability * (1 - self.no_show) * (1 - self.dropout)

    def check(self, config: RunConfig) -> None:
        """Refuse a configuration in which an option could have no effect.

        :raises ValueError: names the option.
        """
        unit, work = config.local_work
        if self.stragglers and work < 2:
            raise ValueError(
                f"system option stragglers needs --local-{unit} 2 or more: clients complete at least one {unit[:-1]}"
            )
        if self.concurrency is not None and config.training_clients < self.concurrency + config.cohort_size - 1:
            raise ValueError(
                f"system option concurrency: {self.concurrency} clients that train and up to {config.cohort_size - 1} "
                f"whose updates wait for a cohort of {config.cohort_size} are more than the run's "
                f"{config.training_clients}; lower concurrency or participation"
            )

    def idle(self, config: RunConfig) -> list[str]:
        """Return a sentence for each option that has no effect next to the others."""
        clients, usual = config.training_clients, type(self).model_fields
        whole = self.stragglers == 0 and self.deadline is None
        reasons = {
            "day": "without availability: all clients are there" if self.availability == 1 else "",
            "slow": f"with {clients} clients: it makes none slow" if round(self.slow * clients) == 0 else "",
            "slow_factor": "without slow" if self.slow == 0 else "",
            "partial": "without stragglers or a deadline: no client completes a part" if whole else "",
        }
        return [
            f"--system {name}={getattr(self, name)} has no effect {reason}"
            for name, reason in reasons.items()
            if reason and getattr(self, name) != usual[name].default
        ]

    def check_setup(self, setup: RunSetup) -> None:
        """Refuse clients that do not wait for each other next to methods that assume that they do.

        :raises ConfigError: names the method.
        """
        if self.concurrency is None:
            return
        if not setup.plugins.reads("staleness"):
            raise ConfigError(
                "system option concurrency: clients train from older models, but no plugin of the run starts them "
                "there; use --plugin fedbuff, or leave the option out"
            )
        breaking = [setup.plugins[name] for names in setup.breaks.values() for name in names]
        for plugin in [*setup.plugins.implementers("select_clients"), *breaking]:
            does = "exchanges layers in mid-epoch" if plugin in breaking else "selects clients"
            raise ConfigError(
                f"system option concurrency: clients do not wait for each other, but plugin {plugin.name!r} {does}; "
                "leave one of the two out"
            )

    def trial(self) -> SimulatedSystem | None:
        """Return the system of a trial with one client, which has to answer: only the kind of rounds stays."""
        return None if self.concurrency is None else SimulatedSystem(concurrency=1)
