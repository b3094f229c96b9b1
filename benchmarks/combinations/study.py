"""What combines with what: twelve methods, each with eight additions, on digits and Fashion-MNIST.

    python benchmarks/combinations/study.py run digits
    python benchmarks/combinations/study.py run fashion-mnist --data-dir data
    python benchmarks/combinations/study.py collect sweeps/combinations
    python benchmarks/combinations/study.py page

``run`` trains one sweep for each base method, one run at a time, and goes on where it was stopped. ``collect`` writes
the accuracy of each finished run into ``results/combinations.csv``. ``page`` makes the tables and pictures of
``docs/what-combines.md`` from this file and the guess in ``lab/``; with ``--check`` it writes nothing and ends with
code 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

import fedcore_study
from fedcore_study.comparisons.significance import holm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EVIDENCE = ROOT / "results" / "combinations.csv"
GUESS = ROOT / "lab" / "guess-combinations.csv"
PAGE = ROOT / "docs" / "what-combines.md"
PICTURES = ROOT / "docs" / "combinations"

SEEDS = (0, 1, 2)
DATA = {"digits": "Digits", "fashion-mnist": "Fashion-MNIST"}
BASES = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "MOON": "moon",
    "SCAFFOLD": "scaffold",
    "FedDyn": "feddyn",
    "FedProc": "fedproc",
    "FedCME": "fedcme",
    "FedCD": "fedcd",
    "FedRS": "fedrs",
    "FedLC": "fedlc",
    "FedDecorr": "feddecorr",
    "FedSAM": "fedsam",
}
ADDITIONS = {
    "USCC": "uscc",
    "CCVR": "ccvr",
    "FedProc": "fedproc",
    "MOON": "moon",
    "FedAvgM": "fedavgm",
    "FedAdam": "fedadam",
    "FedDecorr": "feddecorr",
}
REFUSED = {
    ("FedDyn", "FedAvgM"),
    ("FedDyn", "FedAdam"),
    ("FedCD", "FedProc"),
    ("FedCD", "FedAvgM"),
    ("FedCD", "FedAdam"),
}
"""Pairs that fedcore does not combine, next to a method with itself."""
FIRST = (
    "FedAvg",
    "FedProx",
    "SCAFFOLD",
    "FedProc",
    "FedCME",
    "MOON",
    "FedLC",
    "FedRS",
    "FedSAM",
    "FedDecorr",
    "FedDyn",
)
"""The order of the base methods on Fashion-MNIST, where there may be no time for all; FedCD is the last."""

TOLD = 0.05
"""Level of the tests, after Holm's correction."""
SMALL = 0.5
"""A guess below so many points says that nothing can be told."""

Cells = Mapping[str, Mapping[int, float]]
"""Plugins, joined by +, -> seed -> accuracy in percent."""


def plugins(base: str, addition: str | None) -> str | None:
    """Return the plugins of a cell, joined by +, with one name for both orders; None for a pair that is refused."""
    if addition is None:
        return BASES[base]
    if base == addition or (base, addition) in REFUSED:
        return None
    names = sorted({BASES[base], ADDITIONS[addition]} - {"fedavg"}, key=[*BASES.values(), *ADDITIONS.values()].index)
    return "+".join(names)


def row(base: str) -> list[str]:
    """Return the plugins of all cells of a base method, alone first."""
    return [name for addition in (None, *ADDITIONS) if (name := plugins(base, addition))]


# Statistics: arrays have a row per base method and a column per seed.


@dataclass(frozen=True)
class Effect:
    """A mean in points with its 95 % interval and the p-value of the test that it is 0."""

    mean: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def effect(mean: float, variance: float, freedom: float) -> Effect:
    """Return an estimate with this squared standard error, by Student's t."""
    error = math.sqrt(variance)
    half = float(stats.t.ppf(0.975, freedom)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Effect(mean, mean - half, mean + half, p)


def main_effect(gains: NDArray[np.float64]) -> Effect:
    """Return the mean over the base methods, tested over the seeds: the paired t-test of ``fedcore compare``."""
    seeds = gains.mean(axis=0)
    return effect(float(seeds.mean()), float(seeds.var(ddof=1)) / len(seeds), len(seeds) - 1)


def cell_effects(gains: NDArray[np.float64]) -> list[Effect]:
    """Return each base method's mean gain; its variance over seeds is pooled over the base methods.

    The gains of one seed go together, so the pooled variance is the sum of that of seeds and of the rest, with
    Satterthwaite's degrees of freedom.
    """
    bases, seeds = gains.shape
    of_seeds, rest = mean_squares(gains)
    total = of_seeds + (bases - 1) * rest
    freedom = (seeds - 1) * total**2 / (of_seeds**2 + (bases - 1) * rest**2) if total else seeds - 1
    return [effect(float(mean), total / (bases * seeds), freedom) for mean in gains.mean(axis=1)]


def interactions(gains: NDArray[np.float64]) -> list[Effect]:
    """Return each base method's gain minus that of the first, FedAvg's.

    Seeds are blocks: the error is what is left of the gains after the means of base methods and of seeds.
    """
    bases, seeds = gains.shape
    _, rest = mean_squares(gains)
    freedom = (bases - 1) * (seeds - 1)
    return [effect(float(mean), 2 * rest / seeds, freedom) for mean in (gains - gains[0]).mean(axis=1)[1:]]


def mean_squares(gains: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean squares of seeds, and of what the means of base methods and of seeds leave; 0 for one base."""
    bases, seeds = gains.shape
    rest = gains - gains.mean(axis=1, keepdims=True) - gains.mean(axis=0) + gains.mean()
    squares = float((rest**2).sum()) / max(1, (bases - 1) * (seeds - 1))
    return bases * float(gains.mean(axis=0).var(ddof=1)), squares


def corrected(effects: Mapping[str, Effect]) -> dict[str, float]:
    """Return the p-values after Holm's correction for the number of effects."""
    return holm({name: found.p for name, found in effects.items()})


def finished(cells: Cells, base: str) -> bool:
    """Return whether all cells of a base method have all seeds."""
    return all(set(SEEDS) <= set(cells.get(name, {})) for name in row(base))


class Study:
    """One data set's finished base methods and what follows from them.

    :param cells: accuracies of the runs; those of FedAvg are finished.
    :param guess: (base, addition) -> guessed gain; the addition "none" is the base minus FedAvg.
    """

    def __init__(self, cells: Cells, guess: Mapping[tuple[str, str], float]) -> None:
        self.cells, self.guess = cells, guess
        self.bases = [base for base in BASES if finished(cells, base)]
        self.open = [base for base in BASES if base not in self.bases]
        self.gain: dict[str, Effect] = {}
        """BASE + ADDITION -> gain over the base."""
        self.main: dict[str, Effect] = {}
        self.beyond: dict[str, Effect] = {}
        """BASE + ADDITION -> gain over the base minus the addition's gain over FedAvg; a pair of terms once."""
        pairs: set[str] = set()
        for addition in ADDITIONS:
            having = self.having(addition)
            gains = np.array([self.gains(base, addition) for base in having])
            self.main[addition] = main_effect(gains)
            for base, found in zip(having, cell_effects(gains)):
                self.gain[f"{base} + {addition}"] = found
            for base, found in zip(having[1:], interactions(gains)):
                name = plugins(base, addition)
                if name and name not in pairs:
                    pairs.add(name)
                    self.beyond[f"{base} + {addition}"] = found
        self.main_p, self.gain_p, self.beyond_p = map(corrected, (self.main, self.gain, self.beyond))
        self.alone = {
            base: main_effect((self.accuracy(base) - self.accuracy("FedAvg"))[None]) for base in self.bases[1:]
        }
        self.alone_p = corrected(self.alone)

    def having(self, addition: str) -> list[str]:
        """Return the base methods that can have an addition, FedAvg first."""
        return [base for base in self.bases if plugins(base, addition)]

    def accuracy(self, base: str, addition: str | None = None) -> NDArray[np.float64]:
        """Return a cell's accuracies in percent by seed."""
        runs = self.cells[plugins(base, addition) or ""]
        return np.array([runs[seed] for seed in SEEDS])

    def gains(self, base: str, addition: str) -> NDArray[np.float64]:
        """Return what an addition gains over its base on each seed."""
        return self.accuracy(base, addition) - self.accuracy(base)

    def told(self, name: str) -> bool:
        """Return whether a cell's gain is told apart from 0 after Holm's correction."""
        return self.gain_p[name] < TOLD

    def sign(self, base: str, addition: str) -> int:
        """Return the sign of a gain of at least ``SMALL`` that all seeds share, else 0."""
        return shared_sign(self.gains(base, addition))

    def pair(self, base: str, addition: str) -> str:
        """Return the name under which ``beyond`` has a pair: a pair of terms is there in one order."""
        name = f"{base} + {addition}"
        return name if name in self.beyond else f"{addition} + {base}"

    def pair_sign(self, base: str, addition: str) -> int:
        """Return the sign of what is left of a pair's gain after the addition's gain over FedAvg, as ``sign`` does."""
        return shared_sign(self.gains(base, addition) - self.gains("FedAvg", addition))


def shared_sign(values: NDArray[np.float64]) -> int:
    """Return the sign that all values share if their mean is at least ``SMALL``, else 0."""
    alike = abs(int(np.sign(values).sum())) == len(values)
    return int(np.sign(values[0])) if alike and abs(values.mean()) >= SMALL else 0


def where(study: Study, addition: str) -> str:
    """Return the cells of an addition's row that say on how many base methods it gains and loses, and the extremes."""
    cells = {base: study.gain[f"{base} + {addition}"].mean for base in study.having(addition)}
    signs = [study.sign(base, addition) for base in cells]
    told = sum(study.told(f"{base} + {addition}") for base in cells)
    ordered = sorted(cells, key=lambda base: cells[base])
    extremes = " | ".join(f"{base} {cells[base]:+.1f}" for base in (ordered[-1], ordered[0]))
    return f"{signs.count(1)}, {signs.count(-1)}, {told} of {len(cells)} | {extremes}"


def label(addition: str) -> str:
    """Return an addition's heading: a method that is a base, too, is added as its term."""
    return f"{addition}'s term" if addition in ("FedProc", "MOON") else addition


def tables(study: Study) -> str:
    """Return the Markdown of a data set: tables and pairs."""
    lines = ["| base method | alone, % | minus FedAvg [95 % interval] | p (Holm) |", "| --- | ---: | ---: | ---: |"]
    for base in study.bases:
        own = study.accuracy(base)
        figure = f"| {base} | {own.mean():.1f} ± {own.std(ddof=1):.1f} |"
        if base == "FedAvg":
            lines.append(f"{figure} | |")
        else:
            lines.append(f"{figure} {study.alone[base]} | {p(study.alone_p[base])} |")
    heading = "| addition | mean gain [95 % interval] | p (Holm) | gains, loses, significant | most on | least on |"
    lines += ["", heading, "| --- | ---: | ---: | ---: | --- | --- |"]
    for addition, found in study.main.items():
        row = (label(addition), str(found), p(study.main_p[addition]), where(study, addition))
        lines.append(f"| {' | '.join(row)} |")
    lines.append("")
    left = (
        [f"Without a figure, for runs of theirs are missing or diverged: {', '.join(study.open)}.", ""]
        if study.open
        else []
    )
    return "\n".join([*lines, *left, *pair_lines(study)])


def pair_lines(study: Study) -> list[str]:
    """Return the pairs whose gain is not the sum of the two gains, and those that hurt."""
    told = sorted((n for n, value in study.beyond_p.items() if value < TOLD), key=lambda n: study.beyond[n].mean)
    less, more = [n for n in told if study.beyond[n].mean < 0], [n for n in reversed(told) if study.beyond[n].mean > 0]
    hurting = sorted(
        (name for name, gain in study.gain.items() if gain.mean < 0 and study.told(name)),
        key=lambda name: study.gain[name].mean,
    )

    def text(names: Iterable[str], values: Mapping[str, Effect]) -> str:
        return "; ".join(f"{name} {values[name]}" for name in names) or "none"

    alike = sum(bool(study.pair_sign(*name.split(" + "))) for name in study.beyond)
    return [
        f"Of {len(study.beyond)} pairs, {len(told)} gain less or more than the sum of their two gains over FedAvg, "
        f"told apart after Holm's correction (gain of both minus the sum); {alike} differ from it by {SMALL} points or "
        "more in one direction on each seed:",
        "",
        f"- **Less than the sum:** {text(less, study.beyond)}.",
        f"- **More than the sum:** {text(more, study.beyond)}.",
        f"- **Pairs that hurt** (gain over the base, significant): {text(hurting, study.gain)}.",
    ]


def judged(study: Study) -> str:
    """Return how many guesses were right."""
    cells = {
        f"{base} + {addition}": study.guess[base, addition] for addition in ADDITIONS for base in study.having(addition)
    }
    signs = {f"{base} + {a}": study.sign(base, a) for a in ADDITIONS for base in study.having(a)}
    verdicts = [verdict(guess, signs[name]) for name, guess in cells.items()]
    count = {kind: verdicts.count(kind) for kind in KINDS}
    found = [study.gain[name].mean for name in cells]
    rank = float(stats.spearmanr(list(cells.values()), found).statistic)
    error = float(np.mean([abs(study.gain[name].mean - guess) for name, guess in cells.items()]))
    return (
        f"Of {len(cells)} guessed gains " + ", ".join(f"{count[kind]} are {kind}" for kind in KINDS) + ". "
        f"The guess is off by {error:.1f} points on average; its rank correlation with the result is {rank:.2f}."
    )


KINDS = ("right", "of the wrong sign", "no effect where one was found", "an effect where none was found")


def verdict(guess: float, sign: int) -> str:
    """Judge the sign of a guess; one below ``SMALL`` guesses no effect."""
    guessed = 0 if abs(guess) < SMALL else int(math.copysign(1, guess))
    if guessed == sign:
        return KINDS[0]
    if guessed and sign:
        return KINDS[1]
    return KINDS[2] if sign else KINDS[3]


def p(value: float) -> str:
    """Return a p-value as the tables have it."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


# The picture: a row per base method, a column per addition.

WIDTH, HEIGHT, LEFT, TOP = 94, 28, 92, 46
FULL = 10.0
"""Points at which a colour is full."""


def heat_map(study: Study, title: str, *, beyond: bool = False) -> str:
    """Return the SVG: blue gains and red losses that all seeds share, bold where told apart from 0; - is refused.

    :param beyond: show what a pair gains beyond the sum of its two gains over FedAvg, not the gain over the base.
    """
    columns: list[str | None] = [*ADDITIONS] if beyond else [None, *ADDITIONS]
    rows = [base for base in [*study.bases, *study.open] if not (beyond and base == "FedAvg")]
    width, height = LEFT + WIDTH * len(columns) + 8, TOP + HEIGHT * len(rows) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>{title}</title><rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="16" font-weight="bold">{title}</text>',
    ]
    for i, addition in enumerate(columns):
        parts.append(_text(LEFT + WIDTH * (i + 0.5), TOP - 8, label(addition) if addition else "alone, %"))
    for j, base in enumerate(rows):
        y = TOP + HEIGHT * j
        parts.append(f'<text x="8" y="{y + 18}">{base}</text>')
        for i, addition in enumerate(columns):
            x = LEFT + WIDTH * i
            words, bold, fill = _cell(study, base, addition, beyond=beyond)
            parts.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="{fill}" stroke="#ccc"/>')
            parts.append(_text(x + WIDTH / 2, y + 18, words, bold=bold))
    return "\n".join([*parts, "</svg>", ""])


def _cell(study: Study, base: str, addition: str | None, *, beyond: bool) -> tuple[str, bool, str]:
    """Return a cell's words, whether they are bold, and its colour."""
    if not plugins(base, addition):
        return "-", False, "#fff"
    if base in study.open:
        return "no figure", False, "#fff"
    if addition is None:
        return f"{study.accuracy(base).mean():.1f}", False, "#fff"
    if beyond:
        name = study.pair(base, addition)
        found, told, sign = study.beyond[name], study.beyond_p[name] < TOLD, study.pair_sign(base, addition)
    else:
        name = f"{base} + {addition}"
        found, told, sign = study.gain[name], study.told(name), study.sign(base, addition)
    return f"{found.mean:+.1f}", told, colour(found.mean) if sign else "#fff"


def colour(mean: float) -> str:
    """Return blue for a gain, red for a loss, paler for a small one."""
    share = min(1.0, abs(mean) / FULL)
    end = (107, 174, 214) if mean > 0 else (251, 130, 106)
    return "#" + "".join(f"{round(255 + share * (channel - 255)):02x}" for channel in end)


def _text(x: float, y: float, words: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle"{weight}>{words}</text>'


# Files


def read_evidence(file: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Return data set -> plugins -> seed -> accuracy in percent."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    with file.open(encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            found.setdefault(line["data"], {}).setdefault(line["plugins"], {})[int(line["seed"])] = float(
                line["accuracy"]
            )
    return found


def read_guess(file: Path) -> dict[str, dict[tuple[str, str], float]]:
    """Return data set -> (base, addition) -> guessed points."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    with file.open(encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            if line["gain"] != "refused":
                found.setdefault(line["data"], {})[line["base"], line["addition"]] = float(line["gain"])
    return found


def filled(text: str, made: Mapping[str, str]) -> str:
    """Return the page with each data set's tables between its marker and the end."""
    for data, content in made.items():
        pattern = re.compile(rf"(<!-- combinations: {data} -->\n).*?(<!-- end of combinations -->)", re.DOTALL)
        text = pattern.sub(lambda place, content=content: f"{place[1]}\n{content}\n\n{place[2]}", text)  # type: ignore[misc]
    return text


def pages() -> dict[Path, str]:
    """Return the page and its pictures as the evidence gives them, and how the guess fared."""
    evidence, guess = read_evidence(EVIDENCE), read_guess(GUESS)
    made, guessed, files = {}, {}, {}
    for data in (data for data in evidence if finished(evidence[data], "FedAvg")):
        study, title = Study(evidence[data], guess[data]), DATA[data]
        captions = {
            "gains": f"{title}: gain of an addition over its base method, points",
            "beyond": f"{title}: gain of both minus the sum of their gains over FedAvg, points",
        }
        for kind, caption in captions.items():
            files[PICTURES / f"{data}-{kind}.svg"] = heat_map(study, caption, beyond=kind == "beyond")
        images = [f"![{caption}]({PICTURES.name}/{data}-{kind}.svg)" for kind, caption in captions.items()]
        made[data] = "\n\n".join([*images, tables(study)])
        guessed[data] = judged(study)
    texts = {PAGE: made, GUESS.with_suffix(".md"): guessed}
    return {page: filled(page.read_text(encoding="utf-8"), of) for page, of in texts.items()} | files


def run(data: str, data_dir: str | None, out: Path) -> int:
    """Train the sweeps of a data set, and return the exit code of the first that failed."""
    command = [sys.executable, "-m", "fedcore", "sweep", str(HERE / f"{data}.yaml"), "--parallel", "1"]
    command += ["--data-dir", data_dir] if data_dir else []
    seen: set[str] = set()
    order = list(BASES) if data == "digits" else [*FIRST, *(base for base in BASES if base not in FIRST)]
    codes = []
    for base in order:
        names = [name for name in row(base) if name not in seen]
        seen.update(names)
        place = ["--grid", f"plugin={','.join(names)}", "--out", str(out / f"{data}-{BASES[base]}")]
        codes.append(subprocess.run([*command, *place], check=False).returncode)  # noqa: S603
    return next((code for code in codes if code), 0)


def collect(folders: Sequence[Path]) -> None:
    """Write a line for each finished run, of all data sets, whose sweeps are named DATA-BASE."""
    lines = []
    for data in DATA:
        sweeps = [path for folder in folders for path in sorted(folder.glob(f"{data}-*"))]
        if sweeps:
            runs = fedcore_study.compare(sweeps, each=True)
            lines += [
                (data, _canonical(r.method), r.seed, f"{100 * r.accuracy:.2f}", f"{r.seconds * r.rounds:.1f}")
                for r in runs.itertuples()
            ]
    with EVIDENCE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["data", "plugins", "seed", "accuracy", "seconds"])
        writer.writerows(lines)


def _canonical(method: str) -> str:
    known = {name for base in BASES for name in row(base)}
    return next(name for name in known if set(name.split("+")) == set(method.split("+")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("run")
    train.add_argument("data", choices=DATA)
    train.add_argument("--data-dir")
    train.add_argument("--out", type=Path, default=Path("sweeps/combinations"))
    commands.add_parser("collect").add_argument("folders", nargs="+", type=Path)
    commands.add_parser("page").add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    if given.command == "run":
        return run(given.data, given.data_dir, given.out)
    if given.command == "collect":
        collect(given.folders)
        return 0
    outdated = {
        file: text for file, text in pages().items() if not file.is_file() or file.read_text(encoding="utf-8") != text
    }
    for file, text in outdated.items():
        if given.check:
            print(f"{file.relative_to(ROOT)} is out of date", file=sys.stderr)
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return int(given.check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
