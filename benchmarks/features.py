"""The papers' t-SNE figures in a small setting: features of test samples under global, local and pooled models.

    python benchmarks/features.py run --data-dir data
    python benchmarks/features.py draw

``run`` trains every method with three seeds, one run at a time, into ``features/``; finished runs are kept. ``draw``
prints the tables of silhouettes, and writes pictures of seed 0 to ``docs/pictures/``. FedECCR's Figure 2 compares
global models, FedProc's Figure 2 and FDCL's Figure 2 compare models of single clients with a global one, FDCL's also
with one that is trained on all data.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score
from torch import Tensor, nn

import fedcore
from fedcore.data import Dataset, load_dataset, load_partition
from fedcore_report.charts import Points, Scatter
from fedcore_report.files import save

SEEDS = (0, 1, 2)
POINTS = 500
METHODS = {
    "FedAvg": ["fedavg"],
    "FedProx": ["fedprox"],
    "MOON": ["moon"],
    "FedECCR": ["fedeccr"],
    "FedProc": ["fedproc"],
    "FDCL": ["fdcl"],
    "SOLO": ["solo"],
    "all data": ["centralised"],
}
SETTING = {
    "dataset": "fashion-mnist",
    "samples": 5000,
    "model": "fedcme-cnn",
    "projection": True,
    "alpha": 0.1,
    "clients": 10,
    "rounds": 20,
    "local_epochs": 2,
    "batch_size": 32,
    "lr": 0.01,
    "eval_every": 20,
    "workers": 0,
}
DRAWN = ("FedAvg", "FedECCR", "SOLO, client 1", "all data")
"""The models whose pictures stand on the page of results."""
FIRST, SECOND = 0, 1
"""The clients C_1 and C_2 of FedProc's figure."""


def folder(method: str, seed: int) -> Path:
    """Return the directory of a run."""
    return Path("features") / f"{method.lower().replace(' ', '-')}-{seed}"


def train(data_dir: Path) -> None:
    """Train what is not finished yet."""
    for seed in SEEDS:
        for method, plugins in METHODS.items():
            out = folder(method, seed)
            if not (out / "summary.json").is_file():
                if out.exists():
                    fedcore.resume(out)
                else:
                    fedcore.run(plugins=plugins, **SETTING, seed=seed, data_dir=data_dir, out=out, progress=False)
                print(out, flush=True)


def features(model: nn.Module, x: Tensor) -> np.ndarray:
    """Return the encoder's features (n, d) in float64."""
    with torch.inference_mode():
        rows: np.ndarray = model.eval()(x)[0].double().numpy()
    return rows


def models(method: str, seed: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the models of a run that the figures show: the global one, or those of two clients."""
    out = folder(method, seed)
    if method == "SOLO":
        yield "client 1", fedcore.client_model(out, FIRST)
        yield "client 2", fedcore.client_model(out, SECOND)
    else:
        yield "", fedcore.load_run(out).model


def picture(name: str, title: str, dataset: Dataset, rows: np.ndarray, labels: np.ndarray) -> Scatter:
    """Return the t-SNE of features, coloured by class."""
    flat = TSNE(init="pca", perplexity=30.0, random_state=0).fit_transform(rows)
    names = dataset.class_names or tuple(map(str, range(dataset.num_classes)))
    groups = [
        Points(names[c], flat[labels == c, 0].astype(float).tolist(), flat[labels == c, 1].astype(float).tolist())
        for c in np.unique(labels)
    ]
    return Scatter(name=name, title=title, about="t-SNE; distances are not to scale.", groups=groups)


def draw(data_dir: Path, pictures: Path) -> None:
    """Print the silhouettes of all models, and write the pictures of the first seed."""
    dataset = load_dataset("fashion-mnist", data_dir)
    chosen = torch.from_numpy(np.sort(np.random.default_rng(0).choice(len(dataset.test), POINTS, replace=False)))
    x, labels = dataset.test.gather(chosen), dataset.test.labels[chosen].numpy()
    silhouettes: dict[str, list[float]] = {}
    for seed in SEEDS:
        for method in METHODS:
            for which, model in models(method, seed):
                name = f"{method}, {which}" if which else method
                encoded = features(model, x)
                silhouettes.setdefault(name, []).append(float(silhouette_score(encoded, labels)))
                if seed == SEEDS[0] and name in DRAWN:
                    file = pictures / f"features-{name.lower().replace(', ', '-').replace(' ', '-')}.svg"
                    save(picture(file.stem, f"Features of {name}", dataset, encoded, labels), file)
    print("| model | silhouette of 500 test samples | each seed |\n| --- | ---: | --- |")
    for name, values in silhouettes.items():
        each = ", ".join(f"{value:.3f}" for value in values)
        print(f"| {name} | {statistics.mean(values):.3f} ± {statistics.stdev(values):.3f} | {each} |")
    # FedProc's figure is of the clients' own samples.
    print("\n| client's training samples | SOLO | FedAvg | FedProc |\n| --- | ---: | ---: | ---: |")
    for client in (FIRST, SECOND):
        cells = []
        for method in ("SOLO", "FedAvg", "FedProc"):
            values = []
            for seed in SEEDS:
                model = [model for _, model in models(method, seed)][client if method == "SOLO" else 0]
                positions = load_partition(folder(method, seed) / "partition.json", dataset).train[client][:POINTS]
                own = dataset.train.labels[positions].numpy()
                values.append(float(silhouette_score(features(model, dataset.train.gather(positions)), own)))
            cells.append(f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}")
        print(f"| client {client + 1} | {' | '.join(cells)} |")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("run", "draw"))
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--pictures", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    if options.step == "run":
        train(options.data_dir)
    else:
        draw(options.data_dir, options.pictures)


if __name__ == "__main__":
    main()
