"""What can be chosen."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedcore import PluginOptions


class FedAMPOptions(PluginOptions):
    """Options of FedAMP."""

    lambda_: float = Field(
        default=1.0, ge=0, alias="lambda", description="lambda: strength of the collaboration; 0 is local training."
    )
    alpha: float = Field(
        default=1.0, gt=0, description="alpha_k: step of the message passing; the pull is lambda / alpha_k."
    )
    sigma: float = Field(default=10.0, gt=0, description="sigma of A(x) = 1 - exp(-x / sigma), or the cosine's scale.")
    attention: Literal["distance", "cosine"] = Field(
        default="distance", description="xi by the distance of models (FedAMP), or by their cosine (HeurFedAMP)."
    )
    self_weight: float = Field(default=0.5, ge=0, lt=1, description="xi_ii of HeurFedAMP: a client's own share of u_i.")
