"""FLGo: a task of its own data ("direct" benchmark), clients one after the other, all threads on one client.

Favourable: such a task brings its own DataLoader, and ours is the gather-and-slice loop; nothing is held out, so no
client is evaluated; no progress bars. Its process pool (``num_parallels``)
makes a pool per round and is not used: the one round that was tried with it was slower.
Unfavourable: it evaluates the initial model, which counts as start-up.
"""

from __future__ import annotations

import os
import sys

import exported
import flgo
import flgo.algorithm.fedavg
from exported import Job, Stopwatch
from flgo.experiment.logger.simple_logger import SimpleLogger


class Logger(SimpleLogger):
    """Evaluates when the others do."""

    job: Job

    def check_if_log(self, round: int, eval_interval: int = -1) -> bool:
        """Say whether a round is evaluated."""
        super().check_if_log(round, eval_interval)
        return self.job.evaluates(round)


class Server(flgo.algorithm.fedavg.Server):
    """FLGo's FedAvg server, timed."""

    watch: Stopwatch

    def iterate(self) -> bool:
        """Run a round; the evaluation of the round before lies between two calls."""
        if self.watch.number:
            self.watch.round_ended()
        else:
            self.watch.begin()
        return super().iterate()


class Algorithm:
    """What flgo.init takes for a method."""

    Server = Server
    Client = flgo.algorithm.fedavg.Client


def main() -> None:
    """Make the task and run it."""
    job = Job.from_command_line()
    settings = exported.load(job.folder).settings
    Server.watch, Logger.job = Stopwatch(job), job
    os.chdir(job.folder)  # FLGo names a benchmark by its path from here, and imports it
    sys.path.insert(0, os.getcwd())
    config = os.path.join(os.path.dirname(__file__), "flgo_config.py")
    task = flgo.gen_direct_task_from_file("flgo_task", config, ".", overwrite=True)
    runner = flgo.init(
        task,
        Algorithm,
        {
            "num_rounds": job.rounds,
            "proportion": settings["participation"],
            "num_epochs": settings["local_epochs"],
            "num_steps": settings["local_steps"] or -1,
            "batch_size": settings["batch_size"],
            "learning_rate": settings["lr"],
            "momentum": settings["momentum"],
            "weight_decay": settings["weight_decay"],
            "train_holdout": 0.0,
            "eval_interval": settings["eval_every"],
            "torch_num_threads": job.cores,
            "no_tqdm": True,
            "no_log_console": True,
        },
        Logger=Logger,
    )
    runner.run()
    Server.watch.round_evaluated(runner.gv.logger.output["test_accuracy"][-1])
    Server.watch.report()


if __name__ == "__main__":
    main()
