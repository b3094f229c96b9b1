"""The FedRep plugin."""

from __future__ import annotations

from pydantic import Field

from fedcore import ClientContext, Plugin, PluginOptions, RunSetup, hookimpl

HEAD, REPRESENTATION = ("classifier.*",), ("encoder.*",)


class FedRepOptions(PluginOptions):
    """Options of FedRep."""

    representation_epochs: int = Field(
        default=1,
        ge=1,
        le=1_000_000,
        description="Last local epochs, in which the representation is trained; the head in those before.",
    )


class FedRep(Plugin[FedRepOptions]):
    """FedRep (Collins, Hassani, Mokhtari, Shakkottai, ICML 2021, arXiv 2102.07078), Algorithm 1.

    Client i first trains its head h_i on the received representation phi, then phi under its head. The heads stay on
    the clients, the representations are averaged.
    """

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse methods that count steps, of which each part of the model takes fewer; tell of untrained heads."""
        setup.plugins.require_unfrozen_steps(self.name)
        (unit, work), last = setup.config.local_work, self.options.representation_epochs
        if unit == "epochs" and work <= last:
            problem = f"{work} local epochs are all for the representation, and heads are never trained"
        elif unit == "steps":
            problem = f"a client whose {work} local steps are no more than {last} of its epochs never trains its head"
        else:
            return
        setup.note(self.name, f"{problem}; use --local-epochs {last + 1} or more")

    @hookimpl
    def personal_parameters(self) -> tuple[str, ...]:
        """Keep h_i on each client."""
        return HEAD

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Train h_i first, then phi."""
        last = -self.options.representation_epochs
        client.freeze(REPRESENTATION, epochs=slice(0, last))
        client.freeze(HEAD, epochs=slice(last, None))
