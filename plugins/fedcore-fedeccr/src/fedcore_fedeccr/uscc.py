"""The USCC plugin: stage 2 of FedECCR, alone or after any other method."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import reduce
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, Plugin, PluginOptions, ServerContext, hookimpl
from fedcore.errors import RoundFailedError
from fedcore.functional import class_statistics
from fedcore_fedeccr.statistics import pack_statistics, pool_two, sample_features, unpack_statistics


class UsccOptions(PluginOptions):
    """Options of USCC; the defaults are the paper's (section 4.1)."""

    per_class: int = Field(400, ge=1, description="M, simulated features per class (Algorithm 2).")
    epochs: int = Field(20, ge=0, description="E, epochs of retraining the classifier; 0 leaves it as it is.")
    lr: float = Field(0.01, gt=0, description="eta, learning rate of the retraining.")
    batch_size: int = Field(64, ge=1, description="Simulated features per mini-batch of the retraining.")


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
        return pack_statistics(*class_statistics(features, labels, client.num_classes))

    @hookimpl
    def post_train(self, server: ServerContext) -> None:
        """Pool the statistics (Eqs. 6 and 7), draw features and retrain the classifier (Algorithm 2)."""
        if self.options.epochs == 0:
            return
        answers = server.ask("feature_statistics", clients="all")
        received = (unpack_statistics(answer.tensors, server.num_classes) for answer in answers)
        first = next(received, None)
        if first is None:
            raise RoundFailedError(
                f"plugin {self.name!r}: no client answered with its features' statistics, so the classifier cannot "
                "be corrected. The trained model is kept; fedcore resume asks again."
            )
        counts, means, covariances = reduce(pool_two, received, first)
        known = counts > 0
        if not known.all():
            absent = ", ".join(str(c) for c, held in enumerate(known.tolist()) if not held)
            warnings.warn(
                f"{self.name}: no client that answered holds class {absent}; the classifier is corrected without it",
                stacklevel=2,
            )
        features, labels = sample_features(
            means, covariances, self.options.per_class, generator=server.generator("uscc"), known=known
        )
        server.retrain_classifier(
            features, labels, epochs=self.options.epochs, lr=self.options.lr, batch_size=self.options.batch_size
        )
