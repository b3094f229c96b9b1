"""Print epsilon by both accountants: ``python -m fedcore_dp [q z T delta]``, by default the table of the card."""

from __future__ import annotations

import sys

from fedcore_dp.accountant import spent_epsilon

SETTINGS = (
    (0.25, 1.0, 40, 200**-1.1),
    (0.1, 1.0, 100, 1000**-1.1),
    (5000 / 763430, 1.0, 5000, 1e-9),
)
"""Sampling rate q, noise multiplier z, rounds T and delta of DP-FedAvg."""


def row(rate: float, noise_multiplier: float, rounds: int, delta: float) -> str:
    """Return a line of the table: the setting, epsilon by PLD, by RDP, and by how much PLD is lower."""
    by_losses = spent_epsilon(noise_multiplier, rate, rounds, delta)
    renyi = spent_epsilon(noise_multiplier, rate, rounds, delta, "rdp")
    setting = f"| {rate:.3g} | {noise_multiplier:g} | {rounds} | {delta:.2g} "
    return f"{setting}| {by_losses:.3f} | {renyi:.3f} | {1 - by_losses / renyi:.0%} |"


def main(words: list[str]) -> None:
    """Print the table's lines."""
    settings = [(float(words[0]), float(words[1]), int(words[2]), float(words[3]))] if words else SETTINGS
    print(
        "| q | z | T | delta | PLD | RDP | lower by |", "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |", sep="\n"
    )
    for setting in settings:
        print(row(*setting))


if __name__ == "__main__":
    main(sys.argv[1:])
