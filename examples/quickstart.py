"""Train two methods together on the bundled digits, and read the result.

python examples/quickstart.py [ROUNDS]
"""

import sys

import fedcore


def show(event, details):
    if event == "round":
        accuracy = details["metrics"]["global"]["accuracy"]
        print(f"round {details['round'] + 1}: {accuracy:.1%}, losses {details['losses']}")


def main(rounds: int = 10) -> fedcore.RunResult:
    result = fedcore.run(
        plugins={"moon": {"mu": 1.0}, "fedprox": {"mu": 0.01}},
        clients=10,
        alpha=0.5,
        participation=0.5,
        client_test_fraction=0.2,
        rounds=rounds,
        notify=show,
    )
    for protocol in ("global", "global_local"):
        print(f"{protocol}: {result.metrics[protocol]['accuracy']:.1%}")
    print(f"everything is in {result.directory}")
    return result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
