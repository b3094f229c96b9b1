"""Options that both mechanisms have."""

from __future__ import annotations

from pydantic import Field

from fedcore import PluginOptions


class MechanismOptions(PluginOptions):
    """Bound and noise of a Gaussian mechanism on the clients' updates."""

    clip: float = Field(default=0.1, gt=0, description="S: largest Euclidean norm of a client's update y_k - w_t.")
    noise_multiplier: float = Field(
        default=1.0,
        ge=0,
        description="z: standard deviation of the noise, in units of the norm to which its vector is clipped; 0 clips "
        "only, and guarantees nothing.",
    )
    seed_noise: bool = Field(
        default=False,
        description="Draw all of the mechanism's randomness from the run's seed: reproducible, no protection.",
    )
