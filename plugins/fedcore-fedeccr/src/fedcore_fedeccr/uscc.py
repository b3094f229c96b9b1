"""The USCC plugin: stage 2 of FedECCR, alone or after any other method."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from fedcore import ClientContext, Plugin, PluginOptions, ServerContext, hookimpl
from fedcore.functional import check_statistics, feature_statistics, pool_answers, sample_features


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
        return feature_statistics(features, labels, client.num_classes)

    @hookimpl
    def post_train(self, server: ServerContext) -> None:
        """Pool the statistics (Eqs. 6 and 7), draw features and retrain the classifier (Algorithm 2)."""
        if self.options.epochs == 0:
            return
        check = partial(check_statistics, num_classes=server.num_classes, width=server.feature_dim)
        answers = server.ask("feature_statistics", clients="all", check=check)
        counts, means, covariances = pool_answers(answers, server.num_classes, asker=self.name)
        features, labels = sample_features(
            means, covariances, self.options.per_class, generator=server.generator("uscc"), known=counts > 0
        )
        server.retrain_classifier(
            features, labels, epochs=self.options.epochs, lr=self.options.lr, batch_size=self.options.batch_size
        )
