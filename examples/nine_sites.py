"""Nine sites of a study of free light chains (flchain): five methods, the pooled baseline, and a result section.

python examples/nine_sites.py FLCHAIN [FOLDER]

FLCHAIN is the file flchain.arff of scikit-survival (``sksurv/datasets/data/flchain.arff`` in its package; Kyle et al.,
NEJM 2006; Dispenzieri et al., Mayo Clinic Proceedings 2012). Its nine years of sampling are the sites. FOLDER gets the
runs, ``table.tex``, ``auroc.pdf``, ``calibration.pdf`` and ``predictions.npz``. docs/nine-sites.md explains it.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import roc_auc_score

import fedcore
from fedcore.tools import Run
from fedcore_study import SweepResult, sweep

METHODS = ["fedavg", "fedprox", "scaffold", "ditto", "fedper"]
BASELINES = ["solo", "centralised"]
NAMES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "ditto": "Ditto",
    "fedper": "FedPer",
    "solo": "Solo",
    "centralised": "Pooled",
}
OWN = ("ditto", "fedper", "solo")
"""Methods that give each site its own model."""
RATES = [0.1, 0.3]
SEEDS = 3
OPTIONS = "?columns=age,kappa,lambda,creatinine,sex,mgus&missing=median&indicators=yes&label=death&source=site"
SETTINGS: dict[str, Any] = {
    "partition": "natural",
    "client_test_fraction": 0.3,
    "rounds": 15,
    "local_epochs": 1,
    "batch_size": 32,
    "momentum": 0.0,
    "metrics": ["auroc", "ece"],
    "eval_every": 15,
}


def main(source: Path, folder: Path, methods: Sequence[str] = (*METHODS, *BASELINES), **options: Any) -> pd.DataFrame:
    """Train, and write the result section. Returns the figures of every method, seed and site.

    :param methods: some of ``NAMES``.
    :param options: other options than ``SETTINGS``; ``rates`` and ``seeds``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sites = write_table(source, folder / "flchain.csv")
    rates, seeds = options.pop("rates", RATES), options.pop("seeds", SEEDS)
    data = {"dataset": f"hf:{folder / 'flchain.csv'}{OPTIONS}", "clients": len(sites)}
    grid = {"plugin": list(methods), "lr": rates}
    swept = sweep(grid, seeds, out=folder / "runs", quiet=True, **{**SETTINGS, **data, **options})
    chosen = tuned(swept)
    predictions = {
        (method, seed): predict(directory) for method, runs in chosen.items() for seed, directory in runs.items()
    }
    save(folder / "predictions.npz", predictions)
    figures = figures_of(chosen, predictions, sites)
    (folder / "table.tex").write_text(latex(figures, sites), encoding="utf-8")
    draw(figures, predictions, sites, folder)
    return figures


def write_table(source: Path, target: Path) -> list[str]:
    """Write flchain as a CSV file with a column ``site``, and return the sites' names in sorted order."""
    lines = source.read_text(encoding="utf-8").splitlines()
    heads = [line.split()[1] for line in lines if line.lower().startswith("@attribute")]
    rows = list(csv.reader(lines[next(k for k, line in enumerate(lines) if line.lower() == "@data") + 1 :]))
    table = pd.DataFrame(rows, columns=heads).replace("?", "")
    table["site"] = "Year " + table["sample.yr"]
    table.drop(columns=["sample.yr", "flc.grp", "futime", "chapter"]).to_csv(target, index=False)
    return sorted(table["site"].unique())


def protocol_of(method: str, *, shared: bool = False) -> str:
    """Return the protocol of a method's models on the sites' held-out rows; ``shared``: on the server's test set."""
    if method in OWN:
        return "personal_global" if shared else "personal"
    return "global" if shared else "global_local"


def tuned(swept: SweepResult) -> dict[str, dict[int, Path]]:
    """Return the run directories by method and seed, each method at its best rate.

    The mean AUROC over the seeds on the server's test set decides: none of these rows is a site's.
    """
    scores: dict[tuple[str, float], dict[int, tuple[float, Path]]] = {}
    for directory in sorted(path.parent for path in swept.directory.glob("**/summary.json")):
        result = fedcore.load_run(directory)
        method, seed = next(iter(result.config.plugins), "fedavg"), result.config.seed
        score = result.metrics[protocol_of(method, shared=True)]["auroc"]
        scores.setdefault((method, result.config.lr), {})[seed] = (score, directory)
    best: dict[str, tuple[float, dict[int, Path]]] = {}
    for (method, _), runs in scores.items():
        mean = float(np.mean([score for score, _ in runs.values()]))
        if method not in best or mean > best[method][0]:
            best[method] = (mean, {seed: directory for seed, (_, directory) in sorted(runs.items())})
    return {method: best[method][1] for method in NAMES if method in best}


@dataclass(frozen=True)
class Rows:
    """Some samples of a run, as its models take them."""

    samples: Any
    positions: torch.Tensor

    def __len__(self) -> int:
        return len(self.positions)

    def gather(self, at: torch.Tensor) -> torch.Tensor:
        """Return the samples at these places."""
        found: torch.Tensor = self.samples.gather(self.positions[at])
        return found


def predict(directory: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the held-out labels (n,) and the probabilities of death (n,) of each site, by its model."""
    run, result = Run.open(directory, allow_code=False, reads=True), fedcore.load_run(directory)
    method, found = next(iter(result.config.plugins), "fedavg"), []
    for site, positions in enumerate(run.partition.test):
        model = fedcore.client_model(directory, site) if method in OWN else result.model
        shares = result.predict_proba(Rows(run.dataset.train, positions), model=model)[:, 1]
        found.append((run.dataset.train.labels[positions].numpy(), shares))
    return found


def figures_of(
    chosen: Mapping[str, Mapping[int, Path]], predictions: Mapping[Any, Any], sites: Sequence[str]
) -> pd.DataFrame:
    """Return AUROC, that of the records, and ECE by method, seed and site.

    The records count scores in 1,000 bins, as sites that keep their rows can; AUROC here is exact. Both are nan where
    a site holds no death out: 2002 has a single one among its 48 patients.
    """
    rows = []
    for method, runs in chosen.items():
        for seed, directory in runs.items():
            result = fedcore.load_run(directory)
            recorded = result.metrics[protocol_of(method)]
            for client, (site, (labels, shares)) in enumerate(zip(sites, predictions[method, seed], strict=True)):
                known = len(np.unique(labels)) == 2
                rows.append(
                    {
                        "method": method,
                        "seed": seed,
                        "lr": result.config.lr,
                        "site": site,
                        "auroc": roc_auc_score(labels, shares) if known else np.nan,
                        "recorded_auroc": recorded["auroc_per_client"].get(str(client), np.nan),
                        "ece": recorded["ece_per_client"][str(client)],
                    }
                )
    return pd.DataFrame(rows)


def latex(figures: pd.DataFrame, sites: Sequence[str]) -> str:
    """Return a table (booktabs) with a row per site: AUROC and ECE in percent, mean and deviation over the seeds."""
    methods = list(dict.fromkeys(figures["method"]))
    rate = figures.groupby("method")["lr"].first()
    lines = [
        r"\begin{table}[t]\centering\footnotesize\setlength{\tabcolsep}{2.5pt}",
        r"\caption{flchain, nine sites: AUROC and expected calibration error (\%) on held-out patients, mean and "
        rf"standard deviation over {figures['seed'].nunique()} seeds. Pooled: all patients in one place.}}",
        r"\label{tab:nine-sites}",
        rf"\begin{{tabular}}{{l{'r' * len(methods)}}}",
        r"\toprule",
        " & ".join(["", *(NAMES[method] for method in methods)]) + r" \\",
    ]
    for name, head in (("auroc", "AUROC"), ("ece", "ECE")):
        lines += [r"\midrule", rf"\multicolumn{{{len(methods) + 1}}}{{l}}{{\emph{{{head}}}}} \\"]
        by_seed = figures.groupby(["method", "seed"])[name].mean()
        for site in (*sites, "Mean"):
            of_site: Any = (
                by_seed if site == "Mean" else figures[figures["site"] == site].set_index(["method", "seed"])[name]
            )
            cells = [_cell(of_site[method]) for method in methods]
            lines += [r"\addlinespace"] * (site == "Mean") + [" & ".join([site, *cells]) + r" \\"]
    lines += [r"\midrule", " & ".join(["Rate", *(f"${rate[method]:.2g}$" for method in methods)]) + r" \\"]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _cell(values: pd.Series) -> str:
    if values.isna().all():
        return "--"
    return f"${100 * values.mean():.1f}_{{{100 * values.std(ddof=min(1, len(values) - 1)):.1f}}}$"


def draw(figures: pd.DataFrame, predictions: Mapping[Any, Any], sites: Sequence[str], folder: Path) -> None:
    """Write ``auroc.pdf``, a point per site and method, and ``calibration.pdf``, reliability over all sites."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    methods = list(dict.fromkeys(figures["method"]))
    means: Any = figures.groupby(["method", "site"])["auroc"].mean()
    plot, axes = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
    for place, method in enumerate(methods):
        axes.scatter([place] * len(sites), 100 * means[method], s=14, alpha=0.6, color=f"C{place}")
        axes.hlines(100 * means[method].mean(), place - 0.3, place + 0.3, color=f"C{place}")
    axes.set_xticks(range(len(methods)), [NAMES[method] for method in methods], rotation=20)
    axes.set_ylabel("AUROC of each site (%)")
    plot.savefig(folder / "auroc.pdf")
    plt.close(plot)
    plot, axes = plt.subplots(figsize=(3.6, 3.4), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    edges = np.linspace(0, 1, 11)
    for place, method in enumerate(methods):
        parts = [part for (name, _), found in predictions.items() if name == method for part in found]
        labels, shares = (np.concatenate(column) for column in zip(*parts, strict=True))
        bins = np.clip(np.digitize(shares, edges) - 1, 0, 9)
        known = [b for b in range(10) if (bins == b).sum() >= 20]
        points = [(shares[bins == b].mean(), labels[bins == b].mean()) for b in known]
        axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=NAMES[method], color=f"C{place}")
    axes.set_xlabel("predicted risk of death")
    axes.set_ylabel("share that died")
    axes.legend(fontsize="x-small")
    plot.savefig(folder / "calibration.pdf")
    plt.close(plot)


def save(path: Path, predictions: Mapping[tuple[str, int], Sequence[tuple[np.ndarray, np.ndarray]]]) -> None:
    """Write labels and probabilities of each method, seed and site: ``METHOD/SEED/SITE/labels`` and ``/shares``."""
    arrays: dict[str, Any] = {
        f"{method}/{seed}/{site}/{name}": values
        for (method, seed), found in predictions.items()
        for site, pair in enumerate(found)
        for name, values in zip(("labels", "shares"), pair, strict=True)
    }
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    table = main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "nine-sites"))
    means_of_methods: Any = table.groupby("method", sort=False)[["auroc", "ece"]].mean()
    print((100 * means_of_methods).round(2))
