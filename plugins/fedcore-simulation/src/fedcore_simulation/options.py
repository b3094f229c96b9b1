"""The option ``--system`` of a run. Imports no torch: it is read with the configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

from pydantic import BeforeValidator, Field, model_validator

from fedcore import ConfigError, Repeated, Section
from fedcore.tools import safe_yaml
from fedcore_simulation.system import SimulatedSystem

if TYPE_CHECKING:
    from fedcore import RunConfig, RunSetup, System


def _read_system(value: Any) -> Any:
    """Return ``["dropout=0.1", "slow=0.3"]`` as a mapping, with its values read as YAML.

    A list may begin with a mapping, or with another list, whose options the texts override. Values of any other form
    are returned unchanged.

    :raises ConfigError: a text has another form, or an option is given twice.
    """
    texts = [value] if isinstance(value, str) else value
    if not (texts and isinstance(texts, (list, tuple))):
        return value
    before = None if isinstance(texts[0], str) else _read_system(texts[0])
    if isinstance(before, dict):
        texts = texts[1:]
    system: dict[str, Any] = {}
    for text in texts:
        name, equals, setting = str(text).partition("=")
        name = name.strip().replace("-", "_")
        if not (isinstance(text, str) and equals and name and setting.strip()):
            raise ConfigError(f"--system {text}: write OPTION=VALUE, for example --system dropout=0.1")
        if name in system:
            raise ConfigError(f"--system {text}: {name} is given twice; give it once")
        try:
            system[name] = safe_yaml.read_yaml(setting)
        except ValueError as error:
            raise ConfigError(f"--system {text}: the value is not valid YAML ({error})") from None
    return {**before, **system} if isinstance(before, dict) else system


class Simulation(Section):
    """The system that a run simulates."""

    panel = "Clients"

    system: Annotated[SimulatedSystem | None, BeforeValidator(_read_system), Repeated("OPTION=VALUE")] = Field(
        default=None,
        description="Simulate unavailable, lost, late or slow clients, such as --system dropout=0.1. Off by default."
        f" Options: {', '.join(SimulatedSystem.model_fields)}.",
    )

    @model_validator(mode="after")
    def _check_system(self) -> Self:
        if self.system is not None:
            self.system.check(cast("RunConfig", self))
        return self

    def check(self, setup: RunSetup) -> None:
        """Refuse methods that do not fit clients that do not wait for each other."""
        if self.system is not None:
            self.system.check_setup(setup)

    def cautions(self, setup: RunSetup) -> list[str]:
        """Return the options of the system that have no effect."""
        return [] if self.system is None else self.system.idle(cast("RunConfig", self))

    def simulated(self, samples: Callable[[int], int], breaks: Collection[int] = ()) -> System | None:
        """Return the system of the run; see :class:`fedcore_simulation.simulator.Simulator`."""
        if self.system is None:
            return None
        from fedcore_simulation.simulator import Simulator

        return Simulator(self.system, cast("RunConfig", self), samples, breaks)
