"""Tasks without classes: five methods beside the pooled model, on six sets of unequal clients, with three seeds.

    python benchmarks/tasks/study.py run diabetes regions labels shapes
    FLCHAIN=flchain.arff python benchmarks/tasks/study.py run flchain flchain-discrete
    python benchmarks/tasks/study.py page

``run`` trains every method at every rate and writes the figures of each run into ``results/tasks.csv``. ``page`` makes
the table of ``docs/tasks.md`` from this file. FLCHAIN is scikit-survival's ``sksurv/datasets/data/flchain.arff``
(examples/nine_sites.py says more); the pooled Cox model needs scikit-survival.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import fedcore
from fedcore.data import Dataset, as_dataset, load_dataset

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE, PAGE = ROOT / "results" / "tasks.csv", ROOT / "docs" / "tasks.md"
METHODS = ("fedavg", "fedprox", "scaffold", "ditto", "fedper", "solo", "centralised")
HEADS = ("FedAvg", "FedProx", "SCAFFOLD", "Ditto", "FedPer", "Solo", "Pooled", "Reference")
OWN = ("ditto", "fedper", "solo")
"""Methods that give each client its own model."""
SEEDS = (0, 1, 2)
RATES = (0.03, 0.1)
"""Learning rates that are tried, unless the study has its own."""
SETTINGS: dict[str, Any] = {"rounds": 10, "eval_every": 10, "local_epochs": 1, "batch_size": 32, "momentum": 0.0}
SETTINGS |= {"client_test_fraction": 0.3, "workers": 0, "device": "cpu", "progress": False}

Array = NDArray[Any]


def flchain() -> Dataset:
    """Return 7,874 residents with their time of death or of the last contact, and the year of sampling as the site."""
    lines = Path(os.environ["FLCHAIN"]).read_text(encoding="utf-8").splitlines()
    heads = [line.split()[1] for line in lines if line.lower().startswith("@attribute")]
    rows = [*csv.reader(lines[next(k for k, line in enumerate(lines) if line.lower() == "@data") + 1 :])]
    column = {name: np.array([row[k] for row in rows]) for k, name in enumerate(heads)}
    absent = column["creatinine"] == "?"
    creatinine = np.where(absent, "nan", column["creatinine"]).astype(float)
    numbers = [column[name].astype(float) for name in ("age", "kappa", "lambda")]
    words = [column["sex"] == "F", column["mgus"] == "yes", absent]
    x = np.column_stack([*numbers, np.where(absent, np.nanmedian(creatinine), creatinine), *words])
    y = np.column_stack([column["futime"].astype(float), np.isin(column["death"], ("dead", "1", "yes"))])
    return table("flchain", x, y, np.unique(column["sample.yr"], return_inverse=True)[1], "survival")


def flchain_discrete() -> Dataset:
    """Return the same for the task survival-discrete."""
    return as_dataset(flchain(), task="survival-discrete")


def diabetes() -> Dataset:
    """Return scikit-learn's 442 patients; five groups of age are the sites."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    return table("diabetes", x, y, np.digitize(x[:, 0], np.quantile(x[:, 0], [0.2, 0.4, 0.6, 0.8])), "regression")


def regions() -> Dataset:
    """Return 3,000 drawn prices of eight regions, which differ in size, in their samples and in what two numbers say.

    The noise has a deviation of 20.
    """
    rng = np.random.default_rng(0)
    region = rng.choice(8, size=3000, p=np.arange(1, 9) / 36)
    x = rng.normal(size=(3000, 8)) + rng.normal(size=(8, 8))[region] / 2
    level, slope = rng.normal(size=(2, 8))[:, region]
    y = 200 + 40 * (x[:, 0] + x[:, 1] ** 2 / 2 - x[:, 2] * x[:, 3]) + 30 * level + 30 * slope * x[:, 4]
    return table("regions", x, y + 20 * rng.normal(size=3000), region, "regression")


def table(name: str, x: Array, y: Array, site: Array, task: str) -> Dataset:
    """Return standardised rows, a fifth of them as the test set, and the others with their sites as sources."""
    test = np.random.default_rng(1).permutation(len(x)) < len(x) // 5
    x = ((x - x[~test].mean(axis=0)) / x[~test].std(axis=0)).astype(np.float32)
    dataset = as_dataset((x[~test], y[~test], x[test], y[test]), name, task)
    return replace(dataset, sources=torch.from_numpy(site[~test].astype(np.int64)))


@dataclass(frozen=True)
class Study:
    """One data set, how clients get it, and the figure that is compared.

    :param reference: what it is that the last column has.
    """

    title: str
    data: Callable[[], Dataset]
    figure: str
    options: Mapping[str, Any]
    reference: str = ""
    rates: tuple[float, ...] = RATES


SITES = {"partition": "natural"}
SKEWED = {"partition": "dirichlet", "alpha": 0.3, "clients": 5}
STUDIES = {
    "flchain": Study("flchain, 9 sites, Cox", flchain, "c-index", SITES | {"clients": 9}, "Cox model"),
    "flchain-discrete": Study(
        "the same, discrete time", flchain_discrete, "c-index", SITES | {"clients": 9}, "Cox model"
    ),
    "diabetes": Study("diabetes, 5 groups of age", diabetes, "rmse", SITES | {"clients": 5}, "linear regression"),
    "regions": Study("drawn prices, 8 regions", regions, "rmse", SITES | {"clients": 8}, "linear regression"),
    "labels": Study(
        "digits with 4 labels, 5 clients",
        lambda: load_dataset("digit-properties", None),
        "micro-f1",
        SKEWED,
        "logistic regression",
        rates=(0.1, 0.5),
    ),
    "shapes": Study(
        "shapes over digits, 5 clients",
        lambda: load_dataset("digit-shapes", None),
        "dice",
        SKEWED | {"samples": 400, "batch_size": 8},
        rates=(0.1, 0.3),
    ),
}


def run(name: str) -> Iterator[dict[str, Any]]:
    """Train all methods, and yield the figures of each run: on the test set, and the mean over the held-out parts.

    A run that diverges has none.
    """
    study = STUDIES[name]
    dataset = study.data()
    for method, lr, seed in product(METHODS, study.rates, SEEDS):
        shared, own = ("personal_global", "personal") if method in OWN else ("global", "global_local")
        with tempfile.TemporaryDirectory() as folder:
            settings = {**SETTINGS, **study.options, "lr": lr, "seed": seed, "out": Path(folder) / "run"}
            began = time.process_time()
            try:
                result = fedcore.run(dataset=dataset, plugins=[] if method == "fedavg" else [method], **settings)
            except fedcore.DivergedError:
                yield line(name, method, lr, seed, None, None, time.process_time() - began)
                continue
            seconds = time.process_time() - began
            if (method, lr) == ("fedavg", study.rates[0]) and study.reference:
                parts = json.loads((result.directory / "partition.json").read_text())
                yield line(name, "reference", "", seed, *reference(study, dataset, parts["train"], parts["test"]), 0.0)
        test = study.figure if method not in OWN else f"{study.figure}_mean"
        figures = result.metrics
        yield line(name, method, lr, seed, figures[shared][test], figures[own][f"{study.figure}_mean"], seconds)


def line(name: str, method: str, lr: float | str, seed: int, test: Any, mean: Any, seconds: float) -> dict[str, Any]:
    """Return a row of the evidence; a figure is empty if it is not finite."""
    numbers = {key: "" if value is None else f"{value:.5g}" for key, value in (("test", test), ("clients", mean))}
    return {"study": name, "method": method, "lr": lr, "seed": seed, **numbers, "seconds": f"{seconds:.1f}"}


def reference(
    study: Study, dataset: Dataset, train: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """Return a pooled model's figure on the test set, and the mean over the clients' held-out parts."""
    x, y = dataset.train.gather(torch.arange(len(dataset.train))).flatten(1).numpy(), dataset.train.labels.numpy()
    rows = [place for part in train for place in part]
    figure = judge(study.figure, x[rows], y[rows])
    of_sites = [figure(x[part], y[part]) for part in held_out if part]
    test = dataset.test
    return figure(test.gather(torch.arange(len(test))).flatten(1).numpy(), test.labels.numpy()), float(
        np.nanmean(of_sites)
    )


def judge(name: str, x: Array, y: Array) -> Callable[[Array, Array], float]:
    """Fit a model of another library, and return its figure on samples; nan if it is not defined."""
    if name == "c-index":
        from sksurv.linear_model import CoxPHSurvivalAnalysis
        from sksurv.metrics import concordance_index_censored

        cox = CoxPHSurvivalAnalysis().fit(
            x, np.array([(e > 0, t) for t, e in y], dtype=[("event", bool), ("time", float)])
        )

        def concordance(x: Array, y: Array) -> float:
            known = y[:, 1].any() and (y[:, 0] > y[y[:, 1] > 0, 0].min()).any()
            return float(concordance_index_censored(y[:, 1] > 0, y[:, 0], cox.predict(x))[0]) if known else np.nan

        return concordance
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.metrics import f1_score, root_mean_squared_error
    from sklearn.multioutput import MultiOutputClassifier

    if name == "rmse":
        line = LinearRegression().fit(x, y)
        return lambda x, y: float(root_mean_squared_error(y, line.predict(x)))
    labels = MultiOutputClassifier(LogisticRegression(max_iter=1000)).fit(x, y)
    return lambda x, y: float(f1_score(y, labels.predict(x), average="micro"))


def collect(names: Sequence[str]) -> None:
    """Run studies, and replace their rows of the evidence."""
    for name in names:
        rows = [*run(name)]
        known = [*csv.DictReader(EVIDENCE.open(encoding="utf-8"))] if EVIDENCE.exists() else []
        rows = sorted(
            (*(row for row in known if row["study"] != name), *rows), key=lambda row: [*STUDIES].index(row["study"])
        )
        with EVIDENCE.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def page() -> str:
    """Return the table: of each method at its best rate on the test set, mean ± deviation over the seeds."""
    rows = [*csv.DictReader(EVIDENCE.open(encoding="utf-8"))]
    lines = [f"| | figure | {' | '.join(HEADS)} |", f"| --- | --- |{' ---: |' * len(HEADS)}"]
    for name, study in STUDIES.items():
        cells = []
        for method in (*METHODS, "reference"):
            by_rate: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                if (row["study"], row["method"]) == (name, method):
                    by_rate.setdefault(row["lr"], []).append(
                        (float(row["test"] or "nan"), float(row["clients"] or "nan"))
                    )
            known = {lr: np.array(values) for lr, values in by_rate.items() if np.isfinite(values).all()}
            sign = -1 if study.figure == "rmse" else 1
            best = max(known, key=lambda lr: sign * known[lr][:, 0].mean(), default=None)
            cells.append("-" if best is None else cell(known[best][:, 1], percent=sign > 0))
        lines.append(f"| {study.title} | {study.figure} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(values: Array, *, percent: bool) -> str:
    """Return mean ± deviation over the seeds."""
    scale = 100 if percent else 1
    return f"{scale * values.mean():.1f} ± {scale * values.std(ddof=1):.1f}"


def main() -> None:
    """Run studies or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "page"))
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--check", action="store_true", help="page: write nothing, and fail if the page is out of date")
    options = parser.parse_args()
    if options.command == "run":
        collect(options.studies or [*STUDIES])
        return
    text = PAGE.read_text(encoding="utf-8")
    made = re.sub(r"(?s)(<!-- tasks -->\n).*?(<!-- end -->)", lambda found: found[1] + page() + "\n" + found[2], text)
    if options.check and made != text:
        raise SystemExit(f"{PAGE.name} is not what {EVIDENCE.name} gives: run the command without --check")
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
