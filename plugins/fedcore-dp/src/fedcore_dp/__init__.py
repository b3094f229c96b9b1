"""Differential privacy of clients as fedcore plugins: noise on the server, or on each client before anything leaves."""

from fedcore_dp.accountant import spent_epsilon
from fedcore_dp.adaptive import next_clip, noised_share, update_multiplier
from fedcore_dp.central import CentralDP, CentralDPOptions
from fedcore_dp.clipping import clip_factor, joint_norm
from fedcore_dp.local import LocalDP, LocalDPOptions
from fedcore_dp.noise import secure_normal, secure_uniform, seeded_normal

__all__ = [
    "CentralDP",
    "CentralDPOptions",
    "LocalDP",
    "LocalDPOptions",
    "clip_factor",
    "joint_norm",
    "next_clip",
    "noised_share",
    "secure_normal",
    "secure_uniform",
    "seeded_normal",
    "spent_epsilon",
    "update_multiplier",
]
