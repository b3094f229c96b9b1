"""Adaptive server optimizers as fedcore plugins: FedAdam, FedYogi, FedAdagrad."""

from fedcore_fedopt.equations import adagrad, adam, first_moment, server_update, yogi
from fedcore_fedopt.plugin import (
    FedAdagrad,
    FedAdagradOptions,
    FedAdam,
    FedAdamOptions,
    FedYogi,
    FedYogiOptions,
)

__all__ = [
    "FedAdagrad",
    "FedAdagradOptions",
    "FedAdam",
    "FedAdamOptions",
    "FedYogi",
    "FedYogiOptions",
    "adagrad",
    "adam",
    "first_moment",
    "server_update",
    "yogi",
]
