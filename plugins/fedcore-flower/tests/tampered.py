"""A client whose training process lies: in round 0 about a shape, then with a nan, then about who it is."""

from __future__ import annotations

import sys

import torch


def main() -> None:
    from fedcore.engines import ClientResult
    from fedcore_flower import trainer, wire

    honest = wire.pack_answer

    def tampered(outcome):
        if isinstance(outcome, ClientResult) and "samples" in outcome.meta:
            name = next(iter(outcome.tensors))
            lie = int(outcome.task_id.split("-")[1])
            if lie == 0:
                outcome.tensors[name] = torch.zeros(1, 2, 3)
            elif lie == 1:
                outcome.tensors[name] = outcome.tensors[name] * float("nan")
            else:
                outcome.meta["client"] = (outcome.meta["client"] + 1) % 3
        return honest(outcome)

    wire.pack_answer = tampered
    trainer.main()


if __name__ == "__main__":
    from fedcore_flower import client

    client.TRAINER = "tampered:main"
    from fedcore.cli import main as command

    sys.argv[0] = "fedcore"
    command()
