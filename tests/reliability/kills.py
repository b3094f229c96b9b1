"""Runs that are killed at random moments, gone on with, and compared with the one that nothing happened to.

Compared byte by byte: ``model.safetensors``, the states of all clients, the last checkpoint, the lines of
``metrics.jsonl``, ``summary.json``, and which files there are. Left aside is only what a clock measured or what names
the folder: ``time`` in the lines, ``seconds``, ``time``, ``finished`` and ``run_dir`` in the summary, and the
checkpoint's ``metrics_bytes``, which counts the digits of the times.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import fedcore
from fedcore import Plugin, PluginOptions, RejectUpdate, RunConfig, hookimpl
from fedcore.base.serial import dumps
from fedcore.base.tensors import flatten
from fedcore.runs.directory import RunDirectory
from tests.reliability.processes import alive, descendants, start, wait_for

CLOCKS = {"metrics.jsonl": {"time"}, "summary.json": {"seconds", "time", "finished", "run_dir"}}
OPTIONS: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "clients": 5,
    "participation": 0.6,
    "rounds": 16,
    "local_epochs": 1,
    "batch_size": 64,
    "device": "cpu",
    "client_test_fraction": 0.2,
}
METHODS = ("scaffold", "fedcme", "fedavgm", "moon", "fedcd", "fdcl")
"""State on both sides; clients that pause for an exchange; state on the server; on clients; on the server, with
payloads; parameters that stay on clients."""

ENDS_WITHIN = 30.0
"""Seconds within which every worker has to be gone when its parent was killed; on a busy machine, where an idle one
takes a fraction of a second."""

PROGRESSES_WITHIN = 600.0
"""Seconds within which a run has to record the next rounds, its start included; on a busy machine."""

Kind = Literal["tree", "parent", "worker"]


class AbsentOptions(PluginOptions):
    missing: list[tuple[int, int]] = []


class Absent(Plugin):
    """Leaves (round, client) pairs out, as if these had failed."""

    Options = AbsentOptions

    @hookimpl
    def pre_aggregate(self, server, update):
        if (server.round, update.client) in self.options.missing:
            raise RejectUpdate("absent")


@dataclass(frozen=True)
class Kill:
    """One kill, and what it left.

    :param moment: ``start`` before the first step towards a new round, else ``rounds``.
    :param resumed: whether the run had been killed before, and was gone on with.
    :param begun: whether it was a run by then, with its config.yaml.
    :param uncommitted: lines of metrics.jsonl beyond the last checkpoint.
    :param half_written: files that were being written.
    :param seconds: until the last worker was gone.
    """

    kind: Kind
    moment: str
    resumed: bool
    begun: bool
    round: int
    uncommitted: int
    half_written: int
    seconds: float


def configure(folder: Path, method: str, *, before: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Write a run's configuration and return its file."""
    plugins = {**(before or {}), method: {}}
    config = RunConfig(**{**OPTIONS, **options}, plugins=plugins)
    file = folder / f"{method}.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json", exclude={"out"})))
    return file


def unharmed(folder: Path, method: str, **options: Any) -> Path:
    """Run a method to its end, in this process, and return its folder."""
    config = RunConfig(**{**OPTIONS, **options, "workers": 0}, plugins={method: {}}, out=folder)
    return fedcore.run(config).directory


def kill(process: Any, out: Path, kind: Kind, chance: random.Random) -> Kill | None:
    """Kill a run, or one of its workers, at a random moment; None where it ended before.

    Most moments lie in the next three rounds, one in eight in the start. The first process is killed at its first
    files every other time.
    """
    began, resumed = rounds_done(out), (out / "config.yaml").exists()
    moment = "start" if chance.random() < (1 / 8 if resumed else 1 / 2) and kind != "worker" else "rounds"
    if moment == "start" and not resumed:
        wait_for(lambda: process.poll() is not None or out.exists(), PROGRESSES_WITHIN, every=0.0001)
        pause = chance.uniform(0, 0.02)
    elif moment == "start":
        pause = chance.uniform(0, 3)
    else:
        target = began + chance.randrange(3) + (kind == "worker" and not began)
        wait_for(lambda: process.poll() is not None or progressed(out, began, target), PROGRESSES_WITHIN)
        pause = chance.uniform(0, 0.15)
    end = time.monotonic() + pause
    while time.monotonic() < end and process.poll() is None:
        if moment == "start" and rounds_done(out) > began:
            break  # the start was shorter than the pause
        time.sleep(0.001)
    if process.poll() is not None:
        return None
    below = descendants(process.pid)
    at = rounds_done(out)
    if kind == "worker":
        if not below:
            return None
        os.kill(chance.choice(below), signal.SIGKILL)
        return Kill(kind, moment, False, True, at, 0, 0, 0.0)
    for pid in (process.pid, *(below if kind == "tree" else ())):
        with contextlib.suppress(ProcessLookupError):  # a short one, such as git, ended meanwhile
            os.kill(pid, signal.SIGKILL)
    process.wait()
    seconds = wait_for(lambda: not any(map(alive, below)), ENDS_WITHIN)
    found = list(out.rglob("*.tmp")) if out.exists() else []
    begun = (out / "config.yaml").exists()
    return Kill(kind, moment, resumed, begun, at, rounds_done(out) - committed_rounds(out), len(found), seconds)


def progressed(out: Path, began: int, target: int) -> bool:
    """Return whether a run that had ``began`` lines has ``target`` lines, or was set back by going on."""
    return (out / "config.yaml").exists() and (rounds_done(out) >= target or rounds_done(out) < began)


def rounds_done(out: Path) -> int:
    """Return the number of lines of metrics.jsonl."""
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def committed_rounds(out: Path) -> int:
    """Return the rounds of the newest checkpoint, by its name."""
    return max((int(path.name[:6]) for path in (out / "checkpoint").glob("[0-9]*.safetensors")), default=0)


def killed_run(out: Path, config: Path, kind: Kind, chance: random.Random, times: int) -> list[Kill]:
    """Train, be killed, go on, be killed again, up to ``times`` times, and go on to the end."""
    kills: list[Kill] = []
    log = out.with_suffix(".log")
    while True:
        going_on = (out / "config.yaml").exists()
        if out.exists() and not going_on:
            for path in sorted(out.rglob("*"), reverse=True):  # killed before it was a run
                path.rmdir() if path.is_dir() else path.unlink()
        words = ("resume", out) if going_on else ("train", "--config", config, "--out", out)
        process = start(*words, "--quiet", log=log)
        found = kill(process, out, kind, chance) if len(kills) < times else None
        if found is None:
            break
        kills.append(found)
    assert process.wait() == 0, log.read_text()
    assert "Traceback" not in log.read_text(), log.read_text()
    return kills


def run_without_workers_that_were_killed(out: Path, config: Path, chance: random.Random, times: int) -> list[Kill]:
    """Train to the end, in one go, while workers are killed now and then."""
    log = out.with_suffix(".log")
    process = start("train", "--config", config, "--out", out, "--quiet", log=log)
    kills = [found for _ in range(times) if (found := kill(process, out, "worker", chance))]
    assert process.wait() == 0, log.read_text()
    return kills


def left_by(out: Path) -> dict[str, bytes]:
    """Return everything that has to be the same in two runs, by name."""
    directory = RunDirectory(out)
    state = directory.checkpoints.load()
    assert state is not None
    assert state.phase == "done"
    rest = {key: value for key, value in asdict(replace(state, manifest={})).items() if key != "metrics_bytes"}
    tensors, plugins = flatten(state.plugins)
    found = {
        "model.safetensors": (out / "model.safetensors").read_bytes(),
        "checkpoint: model": dumps(state.model),
        "checkpoint: state of plugins": dumps(dict(sorted(tensors.items()))) + encoded(plugins),
        "checkpoint: manifest": encoded(dict(state.manifest)),
        "checkpoint: rest": encoded({key: rest[key] for key in rest.keys() - {"model", "plugins", "manifest"}}),
        "metrics.jsonl": b"\n".join(encoded(without_clocks(line, "metrics.jsonl")) for line in lines(out)),
        "summary.json": encoded(without_clocks(json.loads((out / "summary.json").read_text()), "summary.json")),
        "files": encoded(sorted(str(path.relative_to(out)) for path in out.rglob("*"))),
    }
    states = (path for path in directory.clients.root.rglob("*") if path.is_file())
    return found | {str(path.relative_to(out)): path.read_bytes() for path in states}


def lines(out: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; every one of them has to be whole."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]


def without_clocks(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a record without what a clock measured, or what names the folder."""
    return {key: entry for key, entry in value.items() if key not in CLOCKS[name]}


def encoded(value: Any) -> bytes:
    """Return JSON of which equal bytes mean equal values, floats to the last bit."""
    return json.dumps(value, sort_keys=True).encode()


def differences(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    """Return the names under which two runs left different things."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def check_worker_kills(out: Path, plain: Path, method: str, kills: list[Kill], options: Mapping[str, Any]) -> list[str]:
    """Check a run some of whose workers were killed; returns what became of the clients that they trained.

    Each kill costs at most one client, which is named, and the run is, bit by bit, one in which it was absent.
    """
    records = lines(out)
    assert [record["round"] for record in records] == list(range(OPTIONS["rounds"]))
    lost = [(record["round"], failure) for record in records for failure in record["failures"]]
    assert all(failure["kind"] == "worker_lost" for _, failure in lost), lost
    assert all(failure["client"] in records[round_]["cohort"] for round_, failure in lost)
    unevaluated = [failure for record in records for failure in (record["metrics"] or {}).get("failures", [])]
    assert {failure["kind"] for failure in unevaluated} <= {"worker_lost"}
    assert len(lost) + len(unevaluated) <= len(kills)
    missing = [(round_, failure["client"]) for round_, failure in lost]
    name = f"module:{__name__}.Absent"
    config = RunConfig(
        **{**OPTIONS, **options, "workers": 0},
        plugins={name: {"missing": missing}, method: {}},
        out=out.with_name(f"{out.name}-absent"),
    )
    absent = left_by(fedcore.run(config).directory) if missing else left_by(plain)
    ours = left_by(out)
    parts = ["model.safetensors", "checkpoint: manifest", "checkpoint: state of plugins"]
    parts += [name for name in {*ours, *absent} if name.startswith("clients/")]
    assert [name for name in parts if ours.get(name) != absent.get(name)] == []
    return ["training"] * len(lost) + ["evaluation"] * len(unevaluated)
