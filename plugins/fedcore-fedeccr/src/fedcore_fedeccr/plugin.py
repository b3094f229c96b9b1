"""The FedECCR plugin: stage 1, prototype contrast, then stage 2, USCC."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field

from fedcore import Loss, Plugin, Step, hookimpl
from fedcore_fedeccr.uscc import Uscc, UsccOptions
from fedcore_functional import PrototypeExchange, PrototypeOptions, contrast_with


class FedECCROptions(UsccOptions, PrototypeOptions):
    """Options of FedECCR: of stage 1 and of USCC."""

    temperature: float = Field(default=0.5, gt=0, description="tau of the contrast (Eq. 1); the paper takes 0.5 or 1.")
    denominator: Literal["all", "others"] = Field(
        default="all",
        description="Classes in the contrast's denominator: all (Algorithm 1) or all but the own (Eq. 1).",
    )
    contrast_weight: float = Field(
        default=1.0, gt=0, description="Factor w on Loss_pc; the paper takes 0.1 on nearly uniform data (beta = 5)."
    )
    correct: bool = Field(default=True, description="Stage 2, USCC, after the last round; without it stage 1 alone.")


class FedECCR(Plugin[FedECCROptions]):
    """FedECCR (Zeng et al., CollaborateCom 2023): alpha * Loss_pc + (1 - alpha) * CE, alpha = 1 - r/R; then USCC.

    Loss_pc (Algorithm 1 line 16) pulls a sample's feature towards the global prototype of its class, and away from the
    prototypes of the other classes. A prototype is the mean feature of a class: over its samples, or over the clients'
    means (``prototype_weights``).
    """

    assumes = ("rounds",)
    scales_task = True

    def __init__(self, options: FedECCROptions) -> None:
        super().__init__(options)
        exchange = PrototypeExchange(options, temperature=options.temperature)  # z_r: Algorithm 1, lines 2 to 28; Eq. 2
        self.parts = (exchange, Uscc(options)) if options.correct else (exchange,)

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Return alpha * w * Loss_pc, and 1 - alpha for the cross-entropy (Eq. 3; lines 16 to 18)."""
        ready = PrototypeExchange.ready(step.client)
        if ready is None:
            return None
        alpha = 1 - step.round / step.rounds
        contrast = partial(contrast_with, step.features, step.y, ready, denominator=self.options.denominator)
        return Loss(contrast, weight=alpha * self.options.contrast_weight, task_scale=1 - alpha, name="contrast")
