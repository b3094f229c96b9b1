"""Options that both mechanisms have."""

from __future__ import annotations

from pydantic import Field

from fedcore import PluginOptions
from fedcore_dp.accountant import Accountant


class MechanismOptions(PluginOptions):
    """Noise and accounting of a Gaussian mechanism."""

    noise_multiplier: float = Field(
        default=1.0,
        ge=0,
        description="z: standard deviation of the noise, in units of the norm to which its vector is clipped; 0 clips "
        "only, and guarantees nothing.",
    )
    accountant: Accountant = Field(
        default="pld",
        description="pld: epsilon by privacy loss distributions, with the Renyi accountant's next to it; rdp: by the "
        "Renyi accountant alone.",
    )
    seed_noise: bool = Field(
        default=False,
        description="Draw all of the mechanism's randomness from the run's seed: reproducible, no protection.",
    )

    @property
    def private(self) -> bool:
        """Whether there is noise."""
        return self.noise_multiplier > 0


class UpdateOptions(MechanismOptions):
    """Bound and noise of a Gaussian mechanism on the clients' updates."""

    clip: float = Field(default=0.1, gt=0, description="S: largest Euclidean norm of a client's update y_k - w_t.")
