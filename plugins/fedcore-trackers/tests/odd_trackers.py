"""Trackers for tests: one that writes down what it is given, and one for each way to go wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

from fedcore_trackers import Tracker, TrackerOptions


class Recorder(Tracker):
    """Writes every call to calls.jsonl in the run directory."""

    def start(self, run):
        self.file = run.directory / "calls.jsonl"
        run.state["starts"] = run.state.get("starts", 0) + 1
        self.note("start", run.round, dict(run.state), run.config.rounds)

    def round(self, record):
        self.note("round", record)

    def evaluation(self, round, metrics):
        self.note("evaluation", round, metrics)

    def finish(self, status, summary):
        self.note("finish", status, summary)

    def note(self, *call):
        with self.file.open("a") as file:
            file.write(json.dumps(call) + "\n")


class Hostile(Recorder):
    """Does to its process whatever could reach a run's bits."""

    def round(self, record):
        import numpy
        import torch

        random.seed(record["round"])
        numpy.random.seed(record["round"])
        torch.manual_seed(record["round"])
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        record["losses"].clear()


class OfflineFirst(Recorder):
    """Cannot be reached until a file says so."""

    def start(self, run):
        if not (run.directory.parent / "online").exists():
            raise ConnectionError("no route to host")
        super().start(run)


class Silent(Tracker):
    """Writes nothing."""

    def start(self, run):
        pass


class InStart(Tracker):
    def start(self, run):
        raise ValueError("boom in start")


class InRound(Silent):
    def round(self, record):
        if record["round"] == 1:
            raise ValueError("boom in round")


class InFinish(Silent):
    def finish(self, status, summary):
        raise ValueError("boom in finish")


class Exits(Silent):
    def round(self, record):
        sys.exit(0)


class Dies(Silent):
    def round(self, record):
        os.kill(os.getpid(), signal.SIGKILL)


class State(Silent):
    def start(self, run):
        run.state["not"] = {"JSON"}


class HangsAtOnce(Tracker):
    def start(self, run):
        time.sleep(600)


class HangsAtTheEnd(Silent):
    def finish(self, status, summary):
        time.sleep(600)


class Asks(Silent):
    """Asks a question, as SDKs without a key do."""

    def start(self, run):
        input("API key: ")


class Edits(Silent):
    def evaluation(self, round, metrics):
        metrics.clear()


class NoDescriptionOptions(TrackerOptions):
    folder: str = ""


class NoDescription(Silent):
    Options = NoDescriptionOptions


class NoTracker:
    pass
