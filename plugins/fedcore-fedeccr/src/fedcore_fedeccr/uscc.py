"""The USCC plugin: stage 2 of FedECCR, alone or after any other method."""

from __future__ import annotations

from pydantic import Field

from fedcore_functional import CalibrationOptions, ClassifierCalibration


class UsccOptions(CalibrationOptions):
    """Options of USCC. The defaults are the paper's (section 4.1)."""

    per_class: int = Field(default=400, ge=1, description="M, simulated features per class (Algorithm 2).")
    epochs: int = Field(default=20, ge=0, description="E, epochs of retraining the classifier; 0 leaves it as it is.")


class Uscc(ClassifierCalibration):
    """USCC, unbiased simulation correction of the classifier (FedECCR, Zeng et al. 2023, section 3.3, Algorithm 2).

    After the last round every client sends statistics of its features by class (Eqs. 4 and 5). The server pools them
    (Eqs. 6 and 7), draws the same number of features for each class from the pooled Gaussians, and trains the
    classifier further on these features.
    """

    Options = UsccOptions
    neutral = {"epochs": 0}
    stream = "uscc"
