"""Attacks of malicious clients as a fedcore plugin."""

from fedcore_attacks.equations import (
    alie,
    alie_z,
    flipped_labels,
    inflated_payload,
    inner_product_manipulation,
    most_spread,
    scaled_payload,
    swapped_payload,
    triggered,
)
from fedcore_attacks.plugin import Attack, AttackOptions, malicious_clients

__all__ = [
    "Attack",
    "AttackOptions",
    "alie",
    "alie_z",
    "flipped_labels",
    "inflated_payload",
    "inner_product_manipulation",
    "malicious_clients",
    "most_spread",
    "scaled_payload",
    "swapped_payload",
    "triggered",
]
