"""Long runs and many clients: nothing grows with the rounds or with the number of registered clients."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from torch import nn

from fedcore import Plugin, SplitModel, hookimpl
from fedcore.runs.directory import RunDirectory
from tests.reliability import kills
from tests.reliability.processes import descendants, memory, open_files, shared_bytes, start

MIB = 1 << 20
HERE = f"module:{__name__}."
TURN = 1_000
HUGE_PAGE = 2 * MIB
"""What a worker's heap grows by at least: its allocator asks for huge pages."""


def tiny(num_classes, input_shape):
    """1,210 parameters on digits."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()), 16, num_classes)


class InTurn(Plugin):
    """A thousand clients in each round, one thousand after the other."""

    @hookimpl
    def select_clients(self, server):
        first = server.round * TURN % server.num_clients
        return list(range(first, first + TURN))


NUMBERS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Allocator(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in NUMBERS)


class Settled(Plugin):
    """Reports what the run's process holds: bytes that malloc gave out, and blocks that Python's allocator gave out.

    The resident memory also counts gaps in the heap, and grows by steps when the heap does.

    It brings Python's table of interned strings to its final size before anything is measured.

    Until Python 3.12 pathlib interns every part of a path. The dropped ones leave gaps, and when the table is full it
    is rebuilt, once with twice the places: 1.8 or 3.7 MB that no round is to blame for, after some thousand rounds.
    """

    @hookimpl
    def configure_model(self):
        for number in range(1 << 20):
            sys.intern(f"part {number}")

    @hookimpl
    def report(self):
        mallinfo = ctypes.CDLL(None).mallinfo2
        mallinfo.restype = Allocator
        found = mallinfo()
        return {"malloc": found.uordblks + found.hblkhd, "blocks": sys.getallocatedblocks()}


@dataclass(frozen=True)
class Sample:
    """What one look at a run showed; memory and files in bytes.

    :param malloc: bytes in the run's process that malloc gave out.
    :param blocks: blocks in the run's process that Python's allocator gave out; a block has 512 bytes at most.
    :param worker: private memory of the largest worker.
    :param disk: the run directory without metrics.jsonl, which grows by a line per round.
    """

    round: int
    parent: int
    malloc: int
    blocks: int
    worker: int
    open_files: int
    shared: int
    disk: int


def watch(process, out, every):
    """Look at a run until it ends, and read its metrics each time."""
    samples, directory = [], RunDirectory(out)
    while process.poll() is None:
        time.sleep(every)
        records = directory.metrics.read()
        assert [record["round"] for record in records if "round" in record] == list(range(len(records)))
        try:
            workers = descendants(process.pid)
            held = next(iter(records[-1].get("reports", {}).values()), {}) if records else {}
            samples.append(
                Sample(
                    round=len(records),
                    parent=memory(process.pid),
                    malloc=held.get("malloc", 0),
                    blocks=held.get("blocks", 0),
                    worker=max(map(memory, workers)),
                    open_files=sum(map(open_files, [process.pid, *workers])),
                    shared=shared_bytes(process.pid),
                    disk=size_of(out),
                )
            )
        except (OSError, ValueError):  # it ended meanwhile
            continue
    return samples


def size_of(out):
    total = 0
    for folder, _, names in os.walk(out):
        for name in names:
            if name != "metrics.jsonl":
                try:
                    total += os.stat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue
    return total


def growth(samples, name, rounds):
    """Return by how much a quantity grew from the second quarter of a run to its last, and per 1,000 rounds."""
    values = [(sample.round, getattr(sample, name)) for sample in samples]
    second = [value for at, value in values if rounds / 4 <= at < rounds / 2]
    last = [value for at, value in values if at >= 3 * rounds / 4]
    later = [(at, value) for at, value in values if at >= rounds / 4]
    slope = float(np.polyfit(*zip(*later), 1)[0]) * 1_000
    return median(last) - median(second), slope


def keep(name, record):
    print(json.dumps(record, indent=2))
    if folder := os.environ.get("FEDCORE_RELIABILITY_OUT"):
        Path(folder, f"{name}.json").write_text(json.dumps(record, indent=1))


@pytest.mark.slow
def test_nothing_grows_in_2000_rounds(tmp_path):
    rounds = 2_000
    config = kills.configure(
        tmp_path,
        "scaffold",
        before={f"{HERE}Settled": {}},
        clients=200,
        participation=0.05,
        rounds=rounds,
        workers=2,
        model=f"{HERE}tiny",
        client_test_fraction=0.0,
        batch_size=8,
        partition="iid",
    )
    out, log = tmp_path / "run", tmp_path / "log"
    began = time.monotonic()
    process = start("train", "--config", config, "--out", out, "--quiet", "--allow-code", log=log, fresh=True)
    samples = watch(process, out, every=0.5)
    assert process.wait() == 0, log.read_text()
    names = ("parent", "malloc", "blocks", "worker", "open_files", "shared", "disk")
    found = {name: growth(samples, name, rounds) for name in names}
    record = {
        "seconds": time.monotonic() - began,
        "samples": len(samples),
        "largest": {name: max(getattr(sample, name) for sample in samples) for name in asdict(samples[0])},
        "grown from the 2nd to the 4th quarter": {name: difference for name, (difference, _) in found.items()},
        "per 1,000 rounds": {name: slope for name, (_, slope) in found.items()},
    }
    keep("rounds", record)
    for name in ("parent", "worker"):
        difference, slope = found[name]
        assert difference < HUGE_PAGE + MIB, name
        assert slope < HUGE_PAGE + MIB, name
    assert max(found["malloc"]) < MIB / 2  # 0.25 KB a round
    assert max(found["blocks"]) < 4_000  # four a round; an entry of a list of records has dozens
    assert found["open_files"][0] <= 0
    assert found["shared"][0] < MIB
    assert found["disk"][0] < MIB


@pytest.mark.slow
def test_memory_does_not_depend_on_the_number_of_clients(tmp_path):
    peaks, rounds = {}, 10
    for clients in (1_000, 10_000):
        folder = tmp_path / str(clients)
        folder.mkdir()
        config = kills.configure(
            folder,
            "moon",
            before={f"{HERE}InTurn": {}},
            clients=clients,
            participation=1.0,
            rounds=rounds,
            workers=2,
            model=f"{HERE}tiny",
            client_test_fraction=0.0,
            batch_size=5,
            partition="module:fedcore_bench.scale.windows",
        )
        out, log = folder / "run", folder / "log"
        process = start("train", "--config", config, "--out", out, "--quiet", "--allow-code", log=log, fresh=True)
        samples = watch(process, out, every=0.3)
        assert process.wait() == 0, log.read_text()
        files = list((out / "clients").rglob("*.safetensors"))
        assert len({file.parent for file in files}) == clients
        peaks[clients] = {
            **{name: max(getattr(sample, name) for sample in samples) for name in ("parent", "worker", "open_files")},
            "files of clients": len(files),
            "bytes of clients": sum(file.stat().st_size for file in files),
        }
    keep("clients", peaks)
    few, many = peaks[1_000], peaks[10_000]
    for name in ("parent", "worker"):
        assert many[name] < few[name] + 16 * MIB, name
    assert many["open_files"] <= few["open_files"] + 2
