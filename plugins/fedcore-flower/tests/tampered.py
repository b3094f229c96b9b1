"""A client whose training process sends wrong updates: first a wrong shape, then nan, then another client's number."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch


def main() -> None:
    from fedcore import ClientUpdate
    from fedcore_flower import trainer, wire

    honest = wire.pack_answer

    def tampered(task, outcome):
        if isinstance(outcome, ClientUpdate):
            name, lie = next(iter(outcome.model)), task.round
            if lie == 0:
                outcome.model[name] = torch.zeros(1, 2, 3)
            elif lie == 1:
                outcome.model[name] = outcome.model[name] * float("nan")
            else:
                outcome = replace(outcome, client=(outcome.client + 1) % 3)
        return honest(task, outcome)

    wire.pack_answer = tampered
    trainer.main()


if __name__ == "__main__":
    from fedcore_flower import client

    client.TRAINER = "tampered:main"
    from fedcore.cli import main as command

    sys.argv[0] = "fedcore"
    command()
