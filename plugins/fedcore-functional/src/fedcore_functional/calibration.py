"""The classifier's calibration after the training, which CCVR and USCC share."""

from __future__ import annotations

import math
from statistics import median_low

from pydantic import Field

from fedcore import Answer, DivergedError, PluginOptions, ServerContext
from fedcore_functional.statistics import check_statistics, pool_answers, sample_features


class CalibrationOptions(PluginOptions):
    """Options of a method that calibrates the classifier."""

    per_class: int = Field(default=100, ge=1, description="M: virtual features drawn for each class.")
    epochs: int = Field(default=100, ge=0, description="Epochs of retraining the classifier; 0 leaves it as it is.")
    lr: float = Field(default=0.01, gt=0, description="eta: learning rate of the retraining.")
    batch_size: int = Field(default=64, ge=1, description="Virtual features per mini-batch of the retraining.")


def calibrate_classifier(
    server: ServerContext, options: CalibrationOptions, *, asker: str, stream: str, momentum: float = 0.0
) -> None:
    """Pool the statistics of all clients' features, draw features of each class from them, and retrain the classifier.

    For ``post_train`` of a plugin whose ``answer`` returns :func:`fedcore_functional.feature_statistics`; the question
    is ``feature_statistics``. Classes that no client holds are left out.

    If the retraining diverges, it is repeated without the client whose statistics are by far the largest.

    :param asker: the plugin's name, for the messages; ``stream`` the purpose of the features' random stream.
    :param momentum: of the retraining.
    :raises RoundFailedError: no client answered.
    :raises DivergedError: the retraining diverges, and no client's statistics are far larger than the others'.
    :source: CCVR (Luo et al., NeurIPS 2021, arXiv 2106.05001), Algorithm 1; FedECCR (Zeng et al. 2023), Algorithm 2.
    """
    largest: dict[int, float] = {}
    limit = math.inf

    def check(answer: Answer) -> None:
        samples = int(server.client_sizes[answer.client])
        check_statistics(answer.tensors, server.num_classes, server.feature_dim, samples=samples)
        most = max((float(tensor.abs().max()) for tensor in answer.tensors.values() if tensor.numel()), default=0.0)
        if most >= limit:
            raise ValueError(f"with statistics up to {most:.1e} the classifier's retraining diverges")
        largest[answer.client] = most

    while True:
        largest.clear()
        answers = server.ask("feature_statistics", clients="all", check=check)
        counts, means, covariances = pool_answers(answers, server.num_classes, asker=asker)
        features, labels = sample_features(
            means, covariances, options.per_class, generator=server.generator(stream), known=counts > 0
        )
        try:
            return server.retrain_classifier(
                features, labels, epochs=options.epochs, lr=options.lr, batch_size=options.batch_size, momentum=momentum
            )
        except DivergedError:
            limit = max(largest.values())
            if limit <= 1000 * median_low(largest.values()):
                raise
