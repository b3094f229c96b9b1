"""What holds for the tests of the core and of every package in plugins/."""

import os

# `make test` runs as many processes as there are cores. Threads of their own would only wait for each other, at twice
# the processor time; runs have one thread anyway, see fedcore.runs.experiment.one_thread.
# Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
