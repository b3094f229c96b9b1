"""A report's charts of samples: partitions among the clients, and embeddings of models' features."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedcore import DataError, FedcoreError, numpy_generator
from fedcore.client import Setup
from fedcore.data import Dataset, Partition, load_dataset, load_partition, with_public
from fedcore.models import Placement, forward_chunk
from fedcore.tools import RunDirectory, process
from fedcore_report.charts import Chart, Heatmap, Omitted, Points, Scatter, spaced
from fedcore_study.tools import Group, RunRecord

MAX_CLIENTS = 300
"""The largest number of clients in a picture as a file. Of more clients, evenly spaced ones are drawn."""

NARROW = 100
"""The largest number of clients in a picture on the page."""

MAX_PARTITIONS = 3
FEWEST_POINTS = 10

_log = logging.getLogger(__name__)


def find_dataset(group: Group, data_dir: Path | None) -> Dataset | str:
    """Return the data set of all runs of a group, or the reason why they have no common one."""
    config = next(iter(group.rows.values()))[0].config
    if any(run.config.dataset != config.dataset for runs in group.rows.values() for run in runs):
        return "the rows have different data sets; without --by dataset each has a separate section"
    try:
        return load_dataset(config.dataset, data_dir or config.data_dir, config.task)
    except FedcoreError as error:
        hint = " --data-dir names the folder of the data sets." if isinstance(error, DataError) else ""
        return f"data set not found: {error}{hint}"


def partition_pictures(group: Group, dataset: Dataset | str) -> Iterator[Chart | Omitted]:
    """Yield a picture of clients by classes for each partition among the group's runs."""
    title = "Who holds what"
    if isinstance(dataset, str):
        yield Omitted(title, dataset)
        return
    different: dict[str, RunRecord] = {}
    for run in sorted((run for runs in group.rows.values() for run in runs), key=lambda run: run.config.seed):
        different.setdefault(run.partition, run)
    shown = list(different.values())[:MAX_PARTITIONS]
    more = f" Shown are {len(shown)} of {len(different)} partitions." if len(different) > len(shown) else ""
    for number, run in enumerate(shown, start=1):
        seeds = [other.config.seed for other in different.values()].count(run.config.seed)
        name = f"seed {run.config.seed}" + (f" ({number})" if seeds > 1 else "")
        try:
            drawn = picture(load_partition(run.path / "partition.json", dataset), dataset, NARROW)
        except FedcoreError as error:
            yield Omitted(f"{title}, {name}", str(error))
            continue
        yield replace(drawn, name=f"{drawn.name}-{name}", title=f"{title}, {name}", about=drawn.about + more)


def picture(partition: Partition, dataset: Dataset, most: int = MAX_CLIENTS) -> Heatmap:
    """Return training samples by client (columns) and class (rows).

    :param most: the largest number of clients. Of more clients, evenly spaced ones are drawn.
    """
    groups, names = dataset.strata
    counts = partition.class_counts(groups, len(names))
    kind = "class" if dataset.task.classes else "group of similar labels"
    clients = spaced(partition.num_clients, most)
    few = f" Shown are {len(clients)} of {partition.num_clients} clients." if len(clients) < len(counts) else ""
    return Heatmap(
        name="partition",
        title="Who holds what",
        about=f"Training samples by client and {kind}; shades grow with the square root.{few}",
        x_title="client",
        y_title=kind,
        columns=[partition.names[client] for client in clients],
        rows=names,
        grid=[[float(n) for n in row] for row in counts[clients].T.tolist()],
        unit="samples",
        root=True,
    )


def embeddings(group: Group, dataset: Dataset | str, most: int) -> Iterator[Chart | Omitted]:
    """Yield the t-SNE of test features for each row, of its first run that has a model.

    :param most: the largest number of test samples, which are the same for all runs of a data set.
    """
    for label, runs in group.rows.items():
        title = f"Features of {label}"
        if isinstance(dataset, str):
            yield Omitted(title, dataset)
            continue
        ready = [run for run in runs if (run.path / "model.safetensors").is_file()]
        if not ready:
            yield Omitted(title, "no run of it has a model yet: model.safetensors is written when a run is finished")
            continue
        run = min(ready, key=lambda run: run.config.seed)
        try:
            yield _embedding(run, dataset, most, label)
        except (FedcoreError, ValueError, KeyError, RuntimeError, OSError) as error:
            _log.debug("no embedding of %s", run.path, exc_info=True)
            yield Omitted(title, f"{run.path / 'model.safetensors'} cannot be used: {type(error).__name__}: {error}")


def _embedding(run: RunRecord, dataset: Dataset, most: int, label: str) -> Chart | Omitted:
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    title = f"Features of {label}, seed {run.config.seed}"
    count = min(most, len(dataset.test))
    if count < FEWEST_POINTS:
        return Omitted(title, f"{count} test samples are too few to be laid out")
    chosen = np.sort(numpy_generator(0, "embedding").choice(len(dataset.test), size=count, replace=False))
    if dataset.task.grid:
        return Omitted(title, "the features are those of pixels")
    features = _features(run, dataset, torch.from_numpy(chosen))
    if isinstance(features, str):
        return Omitted(title, features)
    if features.shape[1] < 2:
        return Omitted(title, "features of width 1 cannot be laid out in a plane")
    if not np.isfinite(features).all():
        return Omitted(title, "the model's features are not finite")
    with process.one_thread():
        flat = TSNE(init="pca", perplexity=min(30.0, (count - 1) / 3), random_state=0).fit_transform(features)
    labels = dataset.task.strata(dataset.test.labels.cpu()).numpy()[chosen]
    silhouette_text = ""
    if 1 < len(set(labels.tolist())) < count:
        silhouette = silhouette_score(features, labels)
        silhouette_text = (
            f" Their silhouette is {silhouette:.3f}: 1 where the classes stand apart, 0 where they are mixed."
        )
    groups = [
        Points(name, flat[labels == c, 0].astype(float).tolist(), flat[labels == c, 1].astype(float).tolist())
        for c, name in enumerate(dataset.strata[1])
        if (labels == c).any()
    ]
    about = f"t-SNE of the encoder's features of {count} test samples, coloured by class; distances are not to scale."
    return Scatter(name=f"features-{label}", title=title, about=about + silhouette_text, groups=groups)


def _features(run: RunRecord, dataset: Dataset, positions: torch.Tensor) -> np.ndarray | str:
    """Return the encoder's features (n, d) in float64, or the reason why there are none."""
    config = run.config
    dataset = with_public(dataset, config.public, config.seed, config.data_dir)
    setup = Setup.build(config.model_copy(update={"device": "cpu"}), dataset)
    if any(name.startswith("encoder.") for name in setup.layout.personal):
        return "there is no global encoder: it stays on the clients"
    model = Placement.plain().model(setup.model)
    RunDirectory(run.path).load_model(model)
    model.eval()
    with torch.no_grad():
        parts = [model(dataset.test.gather(part))[0] for part in positions.split(forward_chunk(torch.device("cpu")))]
    return torch.cat(parts).double().numpy()
