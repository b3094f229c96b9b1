"""The limit: fedcore's reference loop, which fedcore bench compares with."""

from __future__ import annotations

import time

import export
from exported import Job, Stopwatch

from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore_bench.measure import reference_for


def main() -> None:
    """Run the loop."""
    job = Job.from_command_line()
    config, dataset = resolve_config(export.config_of(job))
    reference = reference_for(config, dataset, resolve_partition(config, dataset))
    watch = Stopwatch(job)
    ready = time.monotonic()
    watch.begin()
    for number in range(1, job.rounds + 1):
        if job.evaluates(number):  # also after the last round, whatever its number
            reference.task.config = config.model_copy(update={"eval_every": 1})
        reference.rounds(1)
        reference.task.config = config
        watch.round_evaluated(getattr(reference, "accuracy", float("nan")))
    reference.close()
    watch.report(first_batch=ready)


if __name__ == "__main__":
    main()
