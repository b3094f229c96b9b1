"""The USCC plugin: stage 2 of FedECCR, alone or after any other method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, Plugin, ServerContext, hookimpl
from fedcore_functional import CalibrationOptions, calibrate_classifier, feature_statistics


class UsccOptions(CalibrationOptions):
    """Options of USCC; the defaults are the paper's (section 4.1)."""

    per_class: int = Field(default=400, ge=1, description="M, simulated features per class (Algorithm 2).")
    epochs: int = Field(default=20, ge=0, description="E, epochs of retraining the classifier; 0 leaves it as it is.")


class Uscc(Plugin):
    """USCC, unbiased simulation correction of the classifier (FedECCR, Zeng et al. 2023, section 3.3, Algorithm 2).

    After the last round every client sends its features' statistics by class; the server pools them and goes on
    training the classifier on features drawn from the pooled Gaussians, equally many of each class.
    """

    Options: ClassVar[type[UsccOptions]] = UsccOptions
    neutral: Mapping[str, Any] | None = {"epochs": 0}
    corrects: tuple[str, ...] = ("classifier.*",)
    options: UsccOptions

    @hookimpl
    def answer(self, client: ClientContext, question: str) -> dict[str, Tensor] | None:
        """Return n_k, mu_k and Sigma_k of the classes that the client holds (Eqs. 4 and 5)."""
        features, _, labels = client.forward()
        return feature_statistics(features, labels, client.num_classes)

    @hookimpl
    def post_train(self, server: ServerContext) -> None:
        """Pool the statistics (Eqs. 6 and 7), draw features and retrain the classifier (Algorithm 2)."""
        if self.options.epochs > 0:
            calibrate_classifier(server, self.options, asker=self.name, stream="uscc")
