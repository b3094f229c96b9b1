"""The calibration of the classifier after the training. CCVR and USCC share it."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedcore import (
    Answer,
    ClientContext,
    DivergedError,
    Plugin,
    ServerContext,
    Tensors,
    hookimpl,
    question,
)
from fedcore_functional.bounds import FeatureOptions, FeatureRange, feature_range
from fedcore_functional.statistics import check_statistics, feature_statistics, pool_answers, sample_features

LARGEST = 1e18
"""Larger weights count as diverged."""


class CalibrationOptions(FeatureOptions):
    """Options of a method that calibrates the classifier."""

    per_class: int = Field(default=100, ge=1, description="M: virtual features drawn for each class.")
    epochs: int = Field(default=100, ge=0, description="Epochs of retraining the classifier; 0 leaves it as it is.")
    lr: float = Field(default=0.01, gt=0, description="eta: learning rate of the retraining.")
    batch_size: int = Field(default=64, ge=1, description="Virtual features per mini-batch of the retraining.")


class ClassifierCalibration(Plugin[CalibrationOptions]):
    """A plugin, or a part of one, that calibrates the classifier after the last round of any method.

    Every client sends statistics of its features by class. The server pools them, draws features of each class, and
    trains the classifier further on these features. Classes that no client holds are left out.

    :source: CCVR (Luo et al., NeurIPS 2021, arXiv 2106.05001), Algorithm 1; FedECCR (Zeng et al. 2023), Algorithm 2.
    """

    corrects = ("classifier.*",)
    assumes = ("one-model", "classes")
    stream = "calibration"
    """The purpose of the random stream from which features are drawn."""
    momentum = 0.0
    """The momentum of the retraining."""

    def features(self, client: ClientContext) -> tuple[Tensor, Tensor]:
        """Return the features (n, d) for the statistics, and the labels (n,)."""
        features, _, labels = client.forward()
        return features, labels

    def within(self, server: ServerContext) -> FeatureRange:
        """Return the range of these features, outside of which a client's statistics are refused."""
        return self.options.narrowed(feature_range(server.network().encoder))

    @question
    def statistics(self, client: ClientContext) -> Tensors:
        """Return count, mean and covariance of the classes that the client holds."""
        return feature_statistics(*self.features(client), client.num_classes)

    @hookimpl
    def post_train(self, server: ServerContext) -> None:
        """Pool the statistics, draw features of each class, and retrain the classifier. With 0 epochs do nothing.

        :raises RoundFailedError: no client answered.
        :raises DivergedError: the retraining diverges.
        """
        options = self.options
        if options.epochs == 0:
            return
        within = self.within(server)

        def check(answer: Answer) -> None:
            samples = int(server.client_sizes[answer.client])
            check_statistics(answer.tensors, server.num_classes, server.feature_dim, samples=samples, within=within)

        answers = server.ask("all", self.statistics, check=check)
        counts, means, covariances = pool_answers(server, answers, asker=self.name)
        features, labels = sample_features(
            means, covariances, options.per_class, generator=server.generator(self.stream), known=counts > 0
        )
        server.update_model(self.retrained(server, features, labels))

    def retrained(self, server: ServerContext, features: Tensor, labels: Tensor) -> Tensors:
        """Return the global classifier's tensors after training on features (n, d) with labels (n,), by cross-entropy.

        :raises DivergedError: the weights are not finite, or above LARGEST.
        """
        options, classifier = self.options, server.network().classifier.cpu().train()
        x = features.to(next(classifier.parameters()).dtype)
        optimizer = torch.optim.SGD(classifier.parameters(), lr=options.lr, momentum=self.momentum)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(server.generator("retrain").initial_seed())  # for dropout, too
            for _ in range(options.epochs):
                for batch in torch.randperm(len(x)).split(options.batch_size):
                    optimizer.zero_grad()
                    F.cross_entropy(classifier(x[batch]), labels[batch]).backward()
                    optimizer.step()
        trained = {f"classifier.{name}": tensor for name, tensor in classifier.state_dict().items()}
        if not all(tensor.abs().max() <= LARGEST for tensor in trained.values() if tensor.is_floating_point()):
            raise DivergedError(
                f"plugin {self.name!r}: the classifier's retraining diverged; try a smaller {self.name}.lr "
                f"({options.lr:g} now). The trained model is kept."
            )
        return trained
