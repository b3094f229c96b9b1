"""Run methods alone and together, compare them, and see why two cannot be combined.

python examples/combine_methods.py [ROUNDS]
"""

import sys

import fedcore

CHOICES = {
    "FedAvg": {},
    "FedProx": {"fedprox": {"mu": 0.01}},
    "MOON": {"moon": {"mu": 1.0}},
    "MOON + FedProx": {"moon": {"mu": 1.0}, "fedprox": {"mu": 0.01}},
    "MOON + USCC": {"moon": {"mu": 1.0}, "uscc": {}},
}


def main(rounds: int = 10) -> dict[str, float]:
    accuracies = {}
    for title, plugins in CHOICES.items():
        # The projection head that MOON adds, for all: else the models would not be the same.
        # workers=0: runs this short end before worker processes would have started.
        config = fedcore.RunConfig(plugins=plugins, projection=True, alpha=0.1, rounds=rounds, seed=0, workers=0)
        result = fedcore.run(config)
        accuracies[title] = result.metrics["global"]["accuracy"]
        before = result.metrics.get("global_before_correction")
        note = f" ({before['accuracy']:.1%} before the correction)" if before else ""
        print(f"{title:15} {accuracies[title]:.1%}{note}")
    try:
        fedcore.run(fedcore.RunConfig(plugins={"fedper": {}, "uscc": {}}))
    except fedcore.FedcoreError as error:
        print(f"refused: {error}")
    return accuracies


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
