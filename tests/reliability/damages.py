"""Run directories of each kind, every file of them damaged in every way, and what the commands say to that.

A case is one damage of one file: ``evaluate``, ``compare``, ``report`` and ``resume`` see it. It is handled if
``evaluate`` and ``resume`` either end with exit code 2 and a message, or give what they give for the whole directory,
or say what they left out. Records, which anybody may edit, can stay as they are: then what reads them differs, the
summary included, and no model or state does. ``compare`` and ``report`` end with a message or a table. Never an
internal error, and never a wait.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from typer.testing import CliRunner, Result

import fedcore
from fedcore import RunConfig
from fedcore.base.serial import dumps, read_tensors
from fedcore.base.tensors import flatten
from fedcore.cli.app import app
from fedcore.data import partition
from fedcore.runs.api import started
from tests.reliability import kills, permissions

ROUNDS, STOPPED = 3, 2
PATIENCE = 120
"""Seconds after which a command counts as waiting for ever."""

COMPARED = ("--round", STOPPED, "--format", "json")

FLIPS = 10
KINDS: dict[str, dict[str, Any]] = {
    "stateless": {"plugins": {"fedavgm": {}}},
    "stateful": {"plugins": {"scaffold": {}}},
    "personal": {"plugins": {"ditto": {}}},
    "stacked": {"plugins": {"moon": {}}, "stack": 2},
    "corrected": {"plugins": {"ccvr": {}}},
    "system": {"plugins": {"moon": {}}, "system": {"dropout": 0.3, "slow": 0.5}, "min_clients": 0},
    "split": {"plugins": {"fedavgm": {}}},
    "tracked": {"plugins": {"fedavgm": {}}, "trackers": {"tensorboard": {}}},
}
"""The partition of ``split`` has a file of its own next to partition.json, as a large one has; the states of clients
that trained as a stack are in one file."""


def configured(folder: Path, kind: str, seed: int = 0, **more: Any) -> RunConfig:
    """Return the configuration of a small run on 60 images of 6 x 6."""
    file = folder / "data.npz"
    if not file.exists():
        chance = np.random.default_rng(0)
        labels = np.arange(60) % 3
        images = (chance.random((60, 6, 6)) * 100 + 60 * labels[:, None, None]).astype(np.uint8)
        np.savez(file, x_train=images, y_train=labels, x_test=images[:30], y_test=labels[:30])
    options = {
        "dataset": f"npz:{file}",
        "model": "mlp",
        "partition": "iid",
        "clients": 4,
        "participation": 0.5,
        "client_test_fraction": 0.2,
        "rounds": ROUNDS,
        "checkpoint_every": 1,
        "local_epochs": 1,
        "workers": 0,
        "device": "cpu",
        "seed": seed,
    }
    return RunConfig(**{**options, **KINDS[kind], **more})


@dataclass(frozen=True)
class Made:
    """A run directory, another run's of the same kind, and what commands say to it while it is whole.

    :param whole: what :func:`left` gives when it is gone on with.
    """

    path: Path
    other: Path
    whole: dict[str, bytes]
    metrics: str
    table: str


def make(folder: Path, kind: str, *, finished: bool) -> Made:
    """Train a run of a kind, to its end or stopped before it, another one, and one that nothing happens to."""
    paths = []
    with mock.patch.object(partition, "MAX_IN_JSON", 0 if kind == "split" else partition.MAX_IN_JSON):
        for name, seed in (("run", 0), ("other", 1)):
            out = folder / name
            with started(configured(folder, kind, seed, out=out)) as (experiment, state):
                while state.phase == "train" and (finished or state.round < STOPPED):
                    state = experiment.one_round(state)
                if finished:
                    experiment.train(state)
            paths.append(out)
        whole = fedcore.run(configured(folder, kind, out=folder / "whole")).directory
    metrics, table = run("evaluate", paths[0], "--json"), run("compare", paths[0], *COMPARED)
    assert (metrics.exit_code, table.exit_code) == (0, 0), metrics.output + table.output
    return Made(paths[0], paths[1], left(whole), metrics.stdout, table.stdout)


def run(*words: object) -> Result:
    """Run a command in this process; one that waits for ever ends in TimeoutError."""

    def late(*_: object) -> None:
        raise TimeoutError(f"fedcore {' '.join(map(str, words))} does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        with permissions.obeyed():
            return CliRunner().invoke(app, [str(word) for word in words])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def left(out: Path) -> dict[str, bytes]:
    """Return what has to be the same in two finished runs, whatever the version that wrote it."""
    directory = fedcore.runs.directory.RunDirectory(out)
    state = directory.checkpoints.load()
    assert state is not None
    assert state.phase == "done"
    tensors, plugins = flatten(state.plugins)
    found = {
        "model": _encoded(out / "model.safetensors"),
        "checkpoint": dumps(dict(sorted(state.model.items()))),
        "server": dumps(dict(sorted(tensors.items()))) + kills.encoded(plugins),
        "manifest": kills.encoded(dict(state.manifest)),
        "metrics": b"\n".join(kills.encoded(kills.without_clocks(_line, "metrics.jsonl")) for _line in _lines(out)),
        "summary": kills.encoded(kills.without_clocks(json.loads((out / "summary.json").read_text()), "summary.json")),
    }
    for client, version in state.manifest.items():
        tensors, rest = flatten(directory.clients.read(client, version))
        found[f"client {client}"] = dumps(dict(sorted(tensors.items()))) + kills.encoded(rest)
    return found


def _lines(out: Path) -> Iterator[dict[str, Any]]:
    for line in (out / "metrics.jsonl").read_bytes().split(b"\n")[:-1]:
        try:
            yield json.loads(line)
        except ValueError:
            yield {"damaged": True}


def _encoded(file: Path) -> bytes:
    tensors, meta = read_tensors(file)
    return dumps(dict(sorted(tensors.items()))) + kills.encoded(meta)


def files_of(made: Made) -> list[str]:
    """Return the names of all files of a run, as its directory has them."""
    return sorted(str(file.relative_to(made.path)) for file in made.path.rglob("*") if file.is_file())


Damage = Callable[[Path, Path, random.Random], None]


def _content(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    return lambda file, other, chance: _write(file, change(file.read_bytes(), chance))


def _write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def _flip(at: int) -> Damage:
    def flip(content: bytes, chance: random.Random) -> bytes:
        if not content:
            return content
        start, end = (len(content) * part // FLIPS for part in (at, at + 1))
        position = min(chance.randrange(start, max(end, start + 1)), len(content) - 1)
        return content[:position] + bytes([content[position] ^ 1 << chance.randrange(8)]) + content[position + 1 :]

    return _content(flip)


def _replace(make: Callable[[Path], object]) -> Damage:
    def replace(file: Path, other: Path, chance: random.Random) -> None:
        file.unlink()
        make(file)

    return replace


def _linked(file: Path, other: Path, chance: random.Random) -> None:
    aside = Path(tempfile.mkdtemp())
    target = aside / file.name
    shutil.copy(file, target)
    file.unlink()
    file.symlink_to(target)


def _others(file: Path, other: Path, chance: random.Random) -> None:
    if other.exists():
        shutil.copy(other, file)


DAMAGES: dict[str, Damage] = {
    "empty": _content(lambda content, chance: b""),
    **{f"cut at {part} %": _content(lambda c, chance, p=part: c[: len(c) * p // 100]) for part in (10, 30, 60, 95)},  # type: ignore[misc]
    **{f"flipped in part {at}": _flip(at) for at in range(FLIPS)},
    "nul": _content(lambda content, chance: bytes(len(content))),
    "random": _content(lambda content, chance: chance.randbytes(len(content))),
    **{text: _content(lambda c, chance, t=text: t.encode()) for text in ("{}", "[]", "1", "null")},  # type: ignore[misc]
    "twice": _content(lambda content, chance: content + content),
    "deleted": _replace(lambda file: None),
    "a folder": _replace(lambda file: file.mkdir()),
    "a pipe": _replace(os.mkfifo),
    "a link": _linked,
    "unreadable": lambda file, other, chance: file.chmod(0),
    "another run's": _others,
}


def check(made: Made, folder: Path, name: str, how: str, *, readers: bool = True) -> dict[str, str]:
    """Damage a copy of a directory, and see what each command does; returns each one's answer in a word.

    :param readers: also ``compare`` and ``report``, which read records and never checkpoints.
    :raises AssertionError: one of them is not handled.
    """
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(made.path, out, symlinks=True)
    file = out / name
    DAMAGES[how](file, made.other / name, random.Random(f"{name} {how}"))
    answers = {}

    def answer(command: str, result: Result, same: Callable[[], list[str]]) -> None:
        said = " ".join(result.stderr.split())
        context = f"{command} after {name} was {how}: exit code {result.exit_code}\n{result.output}"
        if isinstance(result.exception, TimeoutError):
            raise AssertionError(context)
        assert "internal error" not in said, context
        assert "Traceback" not in result.output, context
        if result.exit_code == 0:
            differing = same()
            assert not differing or "note:" in said or "warning" in said.lower(), f"{context}\ndiffers in {differing}"
            answers[command] = "told" if "note:" in said else "same"
        else:
            assert result.exit_code == 2, context
            assert said.startswith("error: ") or "error: " in said, context
            answers[command] = "refused"

    evaluated = run("evaluate", out, "--json")
    answer("evaluate", evaluated, lambda: [] if evaluated.stdout == made.metrics else ["figures"])
    if readers:
        answer("compare", run("compare", out, *COMPARED), list)
        page = folder / "report.html"
        page.unlink(missing_ok=True)
        answer("report", run("report", out, "--out", page, "--points", 0), lambda: [] if page.exists() else ["page"])

    def differing() -> list[str]:
        if file.is_file():
            file.chmod(0o600)
        read = ("metrics", "summary") if name == "metrics.jsonl" else ()
        return [each for each in kills.differences(left(out), made.whole) if each not in read]

    answer("resume", run("resume", out, "--quiet"), differing)
    return answers
