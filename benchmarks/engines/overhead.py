"""What a round costs beyond its local training, on an engine and on the local one, in turn in one run.

Every client holds a few samples and trains one step, so that a round is nearly all overhead: payloads down, updates up,
checks, the running mean, the commit. Overhead is a round's seconds minus those of its clients, divided by the workers
that share them; evaluation and checkpoints are left out.

    python benchmarks/engines/overhead.py --engine ray --workers 2 --clients 2 --blocks 7 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from fedcore import RunConfig, SplitModel
from fedcore.runs.api import started

HERE = Path(__file__).parent
WIDTHS = {"small": 463, "large": 4962}
NEVER = 1_000_000


def model(width: int, num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return two layers of one width: all that matters is how many parameters they have."""
    first, second = nn.Linear(math.prod(input_shape), width), nn.Linear(width, width)
    layers = OrderedDict(flatten=nn.Flatten(), first=first, relu=nn.ReLU(), second=second)
    return SplitModel(nn.Sequential(layers), width, num_classes)


def small(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return a model of 249,567 parameters on digits."""
    return model(WIDTHS["small"], num_classes, input_shape)


def large(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return a model of 24,998,566 parameters on digits."""
    return model(WIDTHS["large"], num_classes, input_shape)


class Rounds:
    """A run that goes on as long as it is timed.

    :ivar start: seconds until its first round was done.
    """

    def __init__(self, stack: ExitStack, config: RunConfig) -> None:
        self.seen: list[dict[str, float]] = []
        began = time.perf_counter()
        self.experiment, self.state = stack.enter_context(started(config, notify=self._note))
        self.workers = self.experiment.federation.engine.workers
        self.run(1)
        self.start = time.perf_counter() - began

    def _note(self, event: str, details: Any) -> None:
        if event == "round":
            assert not details["failures"], details["failures"]
            self.seen.append(details["time"])

    def run(self, count: int) -> list[dict[str, float]]:
        """Run whole rounds; returns the seconds of each, and what is beyond local training."""
        self.seen.clear()
        for _ in range(count):
            self.state = self.experiment.one_round(self.state)
        return [
            {"round": each["round"], "overhead": each["round"] - each["client_seconds"] / self.workers}
            for each in self.seen
        ]


def compare(
    size: str,
    folder: Path,
    *,
    clients: int,
    workers: int,
    blocks: int,
    rounds: int,
    **engine: Any,
) -> dict[str, Any]:
    """Time an engine's rounds and the local engine's, block by block, who goes first changing.

    :param engine: options of RunConfig that choose the engine.
    """
    options = {
        "dataset": "digits",
        "model": f"module:overhead.{size}",
        "partition": "iid",
        "clients": clients,
        "samples": 4 * clients,
        "rounds": NEVER,
        "local_epochs": 1,
        "batch_size": 16,
        "device": "cpu",
        "eval_every": NEVER,
        "checkpoint_every": NEVER,
        "workers": workers,
    }
    with ExitStack() as stack:
        local, other = (
            Rounds(stack, RunConfig.create({**options, **given, "out": folder / f"{size}-{name}"}))
            for name, given in (("local", {}), ("other", engine))
        )
        for side in (local, other):
            side.run(rounds)  # does not count
        pairs = []
        for number in range(blocks):
            order = (local, other) if number % 2 else (other, local)
            timed = {id(side): side.run(rounds) for side in order}
            pairs.append((timed[id(local)], timed[id(other)]))
        return {
            "parameters": sum(p.numel() for p in local.experiment.federation.setup.model.parameters()),
            "start": {"local": local.start, "other": other.start},
            **{part: _spread(pairs, part) for part in ("round", "overhead")},
        }


def _spread(pairs: list[tuple[list[dict[str, float]], ...]], part: str) -> dict[str, Any]:
    medians = [[statistics.median(each[part] for each in side) for side in pair] for pair in pairs]
    ratios = [other / local for local, other in medians]
    return {
        "local": statistics.median(local for local, _ in medians),
        "other": statistics.median(other for _, other in medians),
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, help="name of an installed engine")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="option of the engine")
    parser.add_argument("--size", choices=WIDTHS, action="append", help="default both")
    for name, default in (("clients", 2), ("workers", 2), ("blocks", 7), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(HERE))
    options = dict(option.split("=", 1) for option in given.set)
    with tempfile.TemporaryDirectory(prefix="fedcore-overhead-") as folder:
        for size in given.size or WIDTHS:
            found = compare(
                size,
                Path(folder),
                clients=given.clients,
                workers=given.workers,
                blocks=given.blocks,
                rounds=given.rounds,
                engine=given.engine,
                engine_options=options,
            )
            print(json.dumps({"engine": given.engine, "load": os.getloadavg()[0], **found}, indent=1), flush=True)


if __name__ == "__main__":
    main()
