"""Everything that one has to know of a GPU, in one command of at most 25 minutes on a machine with torch.

    python benchmarks/gpu/battery.py --wheels                  # what to carry to a machine that has torch alone
    python benchmarks/gpu/battery.py --out gpu --data-dir data # there
    python benchmarks/gpu/battery.py --out try --device cpu --small

The parts run one after the other, each in a separate process with a time limit, the most important first:
``equality`` (every installed method, captured steps against plain ones), ``bench`` (the workloads beside the reference
loop, with 1, 4 and 8 clients in flight as lanes or processes), ``stacking`` (several clients as one), ``pfl``
(pfl-research on the same card) and ``paper`` (a table's column at its paper's scale, as many rounds as fit).
``battery.json`` and ``battery.md`` are written after every step, so that a cut leaves what was done before.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOLD = 12
"""Lines of a step's output that are kept where it fails."""


@dataclass(frozen=True)
class Step:
    """One command.

    :param limit: seconds after which it is ended; what it printed until then counts.
    """

    part: str
    name: str
    command: Sequence[str]
    limit: float


@dataclass
class Done:
    """What a step gave.

    :param rows: the JSON that it printed: one per line, or one list.
    :param ended: ``whole``, ``cut`` at its time limit, ``failed`` or ``skipped``.
    :param utilization: of the GPU in percent, the mean of samples a second apart; None where nvidia-smi is not there.
    """

    part: str
    name: str
    rows: list[Any] = field(default_factory=list)
    ended: str = "whole"
    seconds: float = 0.0
    utilization: float | None = None
    told: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """What the battery is to run.

    :param seconds: for all of it; ``small`` a self-test of seconds, whose figures mean nothing.
    """

    device: str
    out: Path
    data_dir: Path | None
    seconds: float
    small: bool
    parts: tuple[str, ...]


PARTS = ("equality", "bench", "stacking", "pfl", "paper")


def steps(asked: Asked) -> Iterator[Step]:
    """Yield the steps in order."""
    python, small = sys.executable, asked.small
    on = ["--device", asked.device]

    def script(name: str, *arguments: str) -> list[str]:
        return [python, str(HERE / name), *on, *arguments, *(["--small"] if small else [])]

    def bench(workload: str, *arguments: str) -> list[str]:
        size = ["--blocks", "1", "--rounds", "1"] if small else ["--blocks", "2"]
        return [python, "-m", "fedcore", "bench", "--json", "--workload", workload, *on, *size, *arguments]

    yield Step("equality", "captured and plain", script("equality.py"), 300)
    for workload in ("tiny",) if small else ("pfl-cifar10", "tiny", "W1", "W2"):
        yield Step("bench", f"{workload}, 1 in flight", bench(workload), 300 if small else 50)
        for count in () if small else ("4", "8"):
            yield Step("bench", f"{workload}, {count} lanes", bench(workload, "--lanes", count), 30)
            yield Step("bench", f"{workload}, {count} processes", bench(workload, "--workers", count), 40)
    size = ["--clients", "2", "--blocks", "1", "--steps", "1"] if small else ["--clients", "8", "--clients", "64"]
    yield Step("stacking", "stacked steps", [python, str(HERE.parent / "stacking.py"), *on, *size], 90)
    yield Step("pfl", "pfl-research", script("pfl_research.py"), 150)
    if asked.data_dir is not None:
        yield Step("paper", "FedProc's Table 2 on CIFAR-10", paper(asked), 600)


def paper(asked: Asked) -> list[str]:
    """Return the command that trains a column of a paper's table, four runs at a time; a cut leaves checkpoints."""
    table = ["fedproc", "--table", "2", "--column", "CIFAR-10", "--scale", "quick" if asked.small else "paper"]
    where = ["--data-dir", str(asked.data_dir), "--out", str(asked.out / "paper"), "--device", asked.device]
    how = ["--seeds", "1", "--parallel", "4", "--format", "json"]
    return [sys.executable, "-m", "fedcore", "reproduce", *table, *where, *how]


def run(step: Step, device: str) -> Done:
    """Run a step to its end or to its time limit."""
    began, lines = time.monotonic(), list[str]()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    with watched_gpu(device) as samples:
        process = subprocess.Popen(  # noqa: S603 - our own commands
            step.command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(step.limit, os.killpg, (process.pid, signal.SIGKILL))  # its children, too
        timer.start()
        assert process.stdout is not None
        lines += (line.rstrip("\n") for line in process.stdout)
        code = process.wait()
        cut = not timer.is_alive()
        timer.cancel()
    found = Done(step.part, step.name, parsed(lines), seconds=time.monotonic() - began)
    if samples:
        found.utilization = sum(samples) / len(samples)
    if code:
        found.ended = "cut" if cut else "failed"
        found.told = lines[-TOLD:]
    elif not found.rows:
        found.told = lines[-TOLD:]
    return found


def parsed(lines: Sequence[str]) -> list[Any]:
    """Return what a step printed: a JSON object per line, one JSON list, or the rows of a Markdown table."""
    start = next((number for number, line in enumerate(lines) if line.startswith("[")), None)
    if start is not None:
        try:
            whole = json.loads("\n".join(lines[start:]))
        except ValueError:
            whole = None
        if isinstance(whole, list):
            return whole
    rows: list[Any] = []
    for line in lines:
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        elif line.startswith("| ") and not line.startswith("| ---"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


@contextmanager
def watched_gpu(device: str) -> Iterator[list[float]]:
    """Sample the GPU's utilization in percent once a second within a block; no samples without nvidia-smi."""
    samples: list[float] = []
    if not device.startswith("cuda"):
        yield samples
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-l", "1"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # noqa: S603
    except OSError:
        yield samples
        return
    assert process.stdout is not None
    stream = process.stdout
    reader = threading.Thread(
        target=lambda: samples.extend(float(line) for line in stream if line.strip().isdigit()), daemon=True
    )
    reader.start()
    try:
        yield samples
    finally:
        process.kill()
        process.wait()
        reader.join(5)


def battery(asked: Asked) -> list[Done]:
    """Run all that is asked for within the time, and write the results after every step."""
    asked.out.mkdir(parents=True, exist_ok=True)
    end, done = time.monotonic() + asked.seconds, list[Done]()
    for step in steps(asked):
        if step.part not in asked.parts:
            continue
        left = end - time.monotonic()
        if left < min(30.0, step.limit):
            done.append(Done(step.part, step.name, ended="skipped", told=["no time left"]))
        else:
            print(f"{step.part}: {step.name}, at most {min(step.limit, left):.0f} s", file=sys.stderr, flush=True)
            done.append(run(Step(step.part, step.name, step.command, min(step.limit, left)), asked.device))
            print(f"  {done[-1].ended} after {done[-1].seconds:.0f} s", file=sys.stderr, flush=True)
        write(asked, done)
    return done


def write(asked: Asked, done: Sequence[Done]) -> None:
    """Write ``battery.json`` and ``battery.md``, whole or not at all."""
    about = {
        "device": asked.device,
        "gpu": gpu_name(asked.device),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "small": asked.small,
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    content = json.dumps({"about": about, "steps": [asdict(each) for each in done]}, indent=1)
    for name, text in (("battery.json", content), ("battery.md", markdown(about, done))):
        temporary = asked.out / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(asked.out / name)


def markdown(about: dict[str, Any], done: Sequence[Done]) -> str:
    """Return one table: a line per row of every step."""
    lines = [f"{about['gpu']}, torch {about['torch']}, {about['date']}", ""]
    if about["small"]:
        lines = ["A self-test: the figures mean nothing.", "", *lines]
    lines += ["| part | step | result | GPU % | s |", "| --- | --- | --- | --- | --- |"]
    for each in done:
        use = "" if each.utilization is None else f"{each.utilization:.0f}"
        texts = [text_of(row) for row in each.rows] or [each.told[-1] if each.told else ""]
        if each.ended != "whole":
            texts.append(f"{each.ended}: {each.told[-1] if each.told else ''}")
        for text in texts:
            cell = text.replace("|", "/")
            lines.append(f"| {each.part} | {each.name} | {cell} | {use} | {each.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def text_of(row: Any) -> str:
    """Return one row of a step's result as a short text."""
    if isinstance(row, dict) and isinstance(row.get("ratio"), dict):
        ratio, spent, beside = row["ratio"], row["seconds"]["median"], row["beside"]["median"]
        spread = f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['greatest']:.2f})"
        return f"{spread} of {row['beside_name']}'s {row['ratio_is']}, {spent:.3g} s per round, {beside:.3g} s beside"
    if isinstance(row, dict):
        return ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
    return " ".join(map(str, row)) if isinstance(row, list) else str(row)


def gpu_name(device: str) -> str:
    """Return the name of the device, told by a process of its own: this one leaves the GPU to the steps."""
    if not device.startswith("cuda"):
        return platform.processor() or platform.machine()
    ask = f"import torch; print(torch.cuda.get_device_name({device!r}))"
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)  # noqa: S603
    return told.stdout.strip() or "no CUDA device"


def wheels(packages: Sequence[str]) -> list[str]:
    """Return ``name==version`` of what these distributions need, torch and what it brings left out."""
    found: dict[str, str] = {}
    waiting = list(packages)
    left_out = {"torch", "torchvision", *needs("torch")}
    while waiting:
        name = waiting.pop()
        if name in found or name in left_out:
            continue
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += needs(name)
    return sorted(f"{name}=={version}" for name, version in found.items() if not name.startswith("fedcore"))


def needs(package: str) -> list[str]:
    """Return the names that an installed distribution requires, extras left out."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    plain = (line for line in lines if "extra ==" not in line)
    return [re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0].lower().replace("_", "-") for line in plain]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the battery; returns 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", action="store_true", help="say what a machine with torch needs beside it, and end")
    parser.add_argument("--out", type=Path, default=Path("battery"), help="folder of battery.json and battery.md")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data-dir", type=Path, help="folder with CIFAR-10, for the papers' setting")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts together")
    parser.add_argument("--part", action="append", choices=PARTS, help="can be given again; default all")
    parser.add_argument("--small", action="store_true", help="a self-test of the battery, also on a CPU")
    given = parser.parse_args(arguments)
    if given.wheels:
        print("fedcore and its packages: make dist, then dist/*.whl; and from the package index:")
        print("\n".join(wheels(["fedcore-fl", "fedcore-study", "pfl"])))
        return 0
    parts = tuple(given.part or PARTS)
    data = given.data_dir.resolve() if given.data_dir else None
    asked = Asked(given.device, given.out, data, 60 * given.minutes, given.small, parts)
    done = battery(asked)
    print((asked.out / "battery.md").read_text(encoding="utf-8"))
    return int(any(each.ended == "failed" for each in done))


if __name__ == "__main__":
    sys.exit(main())
