"""The CCVR plugin."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from fedcore import ClientContext, ConfigError, ServerContext, SplitModel, hookimpl
from fedcore_ccvr.head import TukeyLinear, tukey
from fedcore_functional import CalibrationOptions, ClassifierCalibration, FeatureRange


class CcvrOptions(CalibrationOptions):
    """Options of CCVR."""

    momentum: float = Field(default=0.9, ge=0, lt=1, description="Momentum rho of the retraining.")
    tukey: float | None = Field(
        default=None, gt=0, le=1, description="Fit on max(z, 0)^tukey instead of z, and classify by it (paper: 0.5)."
    )


class Ccvr(ClassifierCalibration):
    """CCVR, classifier calibration with virtual representations (Luo et al., NeurIPS 2021, arXiv 2106.05001).

    After the last round of any method every client sends count, mean and covariance of its features by class. The
    server pools them, draws features from the pooled Gaussians, and retrains the classifier on these features.
    """

    Options = CcvrOptions
    neutral = {"epochs": 0}
    stream = "ccvr"

    def __init__(self, options: CcvrOptions) -> None:
        super().__init__(options)
        self.momentum = options.momentum
        self._power = options.tukey if options.epochs else None

    @hookimpl
    def configure_model(self, model: SplitModel) -> None:
        """Let the classifier read transformed features after its calibration."""
        if self._power is None:
            return
        if type(model.classifier) is not nn.Linear:
            raise ConfigError(
                f"ccvr.tukey needs a linear classifier, but this model's is a {type(model.classifier).__name__}; "
                "leave ccvr.tukey out"
            )
        model.classifier = TukeyLinear(model.classifier, self._power)

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Refuse, before anything is trained, a run whose classifier could not be marked as calibrated."""
        if self._power is not None and server.config.buffers == "local":
            raise ConfigError(
                "ccvr.tukey marks the shared classifier as calibrated in a buffer, which --buffers local keeps on the "
                "clients; leave one of the two out"
            )

    def features(self, client: ClientContext) -> tuple[Tensor, Tensor]:
        """Return the features for n_c,k, mu_c,k and Sigma_c,k, and the labels."""
        features, labels = super().features(client)
        return features if self._power is None else tukey(features, self._power), labels

    def within(self, server: ServerContext) -> FeatureRange:
        """Return the range of the features; Tukey's transformation begins with a ReLU."""
        if self._power is None:
            return super().within(server)
        return self.options.narrowed(FeatureRange(nonnegative=True))

    @hookimpl
    def post_train(self, server: ServerContext) -> None:
        """Pool the statistics, draw M_c virtual representations of each class, and retrain the classifier."""
        super().post_train(server)
        if self._power is not None:
            calibrated = server.model["classifier.calibrated"]
            server.update_model({"classifier.calibrated": calibrated.new_ones(calibrated.shape)})
