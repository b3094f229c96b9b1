"""A client whose training process stops before a task until the test lets it go on, however busy the machine is.

``FEDCORE_TEST_GATES`` names a folder. A file ``KIND-ROUND`` there stops the process before this task. The process then
renames the file to ``KIND-ROUND.reached`` and goes on when the file is deleted. Each file stops the process once.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> None:
    from fedcore.engines import ClientRuntime
    from fedcore_flower import trainer

    handle = ClientRuntime.handle

    def gated(self, task, shared):
        gate = Path(os.environ["FEDCORE_TEST_GATES"], f"{task.kind}-{task.round}")
        reached = gate.with_suffix(".reached")
        if gate.exists():
            gate.rename(reached)
            while reached.exists():
                time.sleep(0.01)
        return handle(self, task, shared)

    ClientRuntime.handle = gated
    trainer.main()


if __name__ == "__main__":
    from fedcore_flower import client

    client.TRAINER = "gated:main"
    from fedcore.cli import main as command

    sys.argv[0] = "fedcore"
    command()
