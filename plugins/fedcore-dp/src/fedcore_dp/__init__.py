"""Differential privacy as fedcore plugins: of clients, by noise on the server or on each of them; of samples."""

from fedcore_dp.accountant import spent_epsilon
from fedcore_dp.central import CentralDP, CentralDPOptions
from fedcore_dp.clipping import clip_factor, joint_norm, next_clip, noised_share, update_multiplier
from fedcore_dp.example import ExampleDP, ExampleDPOptions
from fedcore_dp.local import LocalDP, LocalDPOptions
from fedcore_dp.noise import secure_normal, secure_uniform, seeded_normal
from fedcore_dp.per_example import clipped_sum, noised_mean, one_pass

__all__ = [
    "CentralDP",
    "CentralDPOptions",
    "ExampleDP",
    "ExampleDPOptions",
    "LocalDP",
    "LocalDPOptions",
    "clip_factor",
    "clipped_sum",
    "joint_norm",
    "next_clip",
    "noised_mean",
    "noised_share",
    "one_pass",
    "secure_normal",
    "secure_uniform",
    "seeded_normal",
    "spent_epsilon",
    "update_multiplier",
]
