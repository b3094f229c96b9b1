"""A first run must not depend on its seed: with default options methods train on digits without divergence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import fedcore
from fedcore.base import registry
from fedcore_testing import needs_of, records

PAPERS = ("fedproc", "fedeccr", "fedcd", "fdcl", "fedcme")
ALPHAS = (0.1, 0.5)
SEEDS = range(10)


def train(folder: Path, method: str, seed: int, alpha: float, **options):
    """Train a method with default options in this process; returns the result, of which no client was rejected."""
    config = {"plugins": {method: {}}, "seed": seed, "alpha": alpha, "workers": 0, **needs_of(method), **options}
    rounds = config.get("rounds", fedcore.RunConfig().rounds)
    run = fedcore.RunConfig(
        **config, out=folder / f"{method}-{seed}-{alpha}", eval_every=rounds, checkpoint_every=rounds
    )
    result = fedcore.run(run)
    failures = [failure for line in records(result) for failure in line["failures"]]
    assert failures == [], f"{method}, seed {seed}, alpha {alpha}: {failures[:3]}"
    if (found := result.metrics["global"]) is not None:  # FedCP has no global model
        assert math.isfinite(found["loss"] or math.nan)
    return result


def test_the_default_rate_and_momentum():
    """lab/results-digits.md, "All methods at their defaults", has these; measure it again with others."""
    config = fedcore.RunConfig()
    assert (config.lr, config.momentum, config.batch_size, config.rounds, config.clip_norm) == (0.02, 0.9, 16, 20, None)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", *PAPERS])
@pytest.mark.parametrize("seed", range(3))
def test_three_seeds_of_fedavg_and_the_five_papers(tmp_path, method, seed):
    """Short: few samples and rounds, but the default steps. Logits that swing show in a round's mean loss.

    Records without a task loss are those of other stages, and of rounds whose schedule leaves it out.
    """
    result = train(tmp_path, method, seed, 0.1, rounds=3, samples=400)
    assert all(line.get("losses", {}).get("task", 0.0) < 2 * math.log(10) for line in records(result))


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted({*registry.available("plugin")} - {"attack"}))  # whose aim is divergence
def test_every_installed_method_trains_with_ten_seeds(tmp_path, method):
    """Methods x 10 seeds x 2 alphas; prints each method's mean accuracy by alpha."""
    accuracies = {}
    for alpha in ALPHAS:
        results = [train(tmp_path, method, seed, alpha) for seed in SEEDS]
        found = [result.metrics["global"]["accuracy"] for result in results if result.metrics["global"]]
        accuracies[alpha] = sum(found) / len(found) if found else None
    print(method, accuracies)
