"""FedLab's aggregators, handlers, compressors and partitions."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import fedlab.utils.dataset.functional as partitions
import numpy as np
import torch
import whole
from cases import Fixture, numbers, partition_figures
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.algorithm.feddyn import FedDynSerialClientTrainer, FedDynServerHandler
from fedlab.contrib.algorithm.fednova import FedNovaServerHandler
from fedlab.contrib.algorithm.fedprox import FedProxSerialClientTrainer
from fedlab.contrib.algorithm.scaffold import ScaffoldSerialClientTrainer, ScaffoldServerHandler
from fedlab.contrib.compressor import QSGDCompressor, TopkCompressor
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils.aggregator import Aggregators
from torch import nn

warnings.simplefilter("ignore")
C = Fixture("fedlab", "FedLab", "fedlab", source="run of the library's functions and handlers on these inputs")
C.difference(
    "N over K besides",
    "library",
    "FedLab's default option weighted_scale of FedNova takes p = 1 / K of those that came and multiplies by N / K "
    "besides: with 3 of 10 clients that is 3.33 steps in place of one.",
    follows="fedcore (Wang et al., Eq. 7)",
    where="fedlab/contrib/algorithm/fednova.py: FedNovaServerHandler.global_update",
    option="none; option='uniform' of FedLab agrees",
)
C.difference(
    "h for one client",
    "library",
    "FedLab subtracts the model once, Algorithm 1's sum over the round's clients once for each of them.",
    follows="fedcore (Acar et al., Algorithm 1)",
    where="fedlab/contrib/algorithm/feddyn.py: FedDynServerHandler.global_update",
    tracker="closed: About FedDyn (the implementation of updates of $h_t$ may be wrong)",
)
C.difference(
    "samples lost",
    "library",
    "FedLab rounds every client's part of a quantity skew down, and the rest of the samples belongs to nobody.",
    follows="fedcore (Li et al., NIID-Bench: all samples are given away)",
    where="fedlab/utils/dataset/functional.py: dirichlet_unbalance_split",
)
C.difference(
    "norm of QSGD",
    "decision",
    "FedLab divides by the largest entry, fedcore by the Euclidean norm of a bucket, as Section 3.1 does.",
    follows="fedcore (Alistarh et al., Section 3.1); the largest entry is their Section 4's variant",
    where="fedlab/contrib/compressor/quantization.py: QSGDCompressor",
)
C.difference(
    "float product rounded up",
    "decision",
    "Both round k up; FedLab's float product 0.07 * 100 is 7.000000000000001, so that it sends 8 entries where fedcore "
    "sends 7.",
    follows="fedcore (k is 7 of 100)",
    where="fedlab/contrib/compressor/topk.py: TopkCompressor",
)

W = "weighted mean"
rows, shares = np.round(np.random.default_rng(0).random((5, 30)), 3), [0.3, 0.1, 0.9, 0.4, 0.2]
tensors = [torch.tensor(row) for row in rows]
C.add(
    W,
    "test_aggregator without weights",
    "weighted_mean",
    Aggregators.fedavg_aggregate(tensors),
    models=rows,
    source="its test's shape",
)
C.add(
    W,
    "test_aggregator with weights",
    "weighted_mean",
    Aggregators.fedavg_aggregate(tensors, shares),
    models=rows,
    shares=shares,
)
C.add(
    W,
    "fedasync_aggregate, alpha .5",
    "mixed_models",
    Aggregators.fedasync_aggregate(tensors[0], tensors[1], 0.5),
    server=rows[0],
    client=rows[1],
    share=0.5,
)

for number, (n, fraction) in enumerate(((10, 0.1), (1000, 0.01), (10, 0.25), (7, 0.5), (100, 0.07), (100, 0.29))):
    x = numbers(number, n)
    values, positions = TopkCompressor(fraction).compress(torch.tensor(x))
    exact = len(values) == math.ceil(round(fraction * n, 9))
    C.add(
        "compression",
        f"top-k: {fraction} of {n}, how many",
        "top_k_count",
        len(values),
        size=n,
        fraction=fraction,
        differs="" if exact else "float product rounded up",
    )
    if n < 1000 and exact:
        C.add(
            "compression",
            f"top-k: {fraction} of {n}, which",
            "top_k",
            sorted(positions.tolist()),
            values=x,
            fraction=fraction,
        )
x = torch.tensor([3.0, -4.0, 0.5, 0.0])
quantiser = QSGDCompressor(4)
torch.manual_seed(0)
mean = torch.stack([quantiser.decompress(quantiser.compress(x)) for _ in range(20000)]).mean(0)
C.add("compression", "QSGD: the mean of what is received is the vector", "qsgd_mean", mean, values=x, tolerance=0.03)
C.add(
    "compression",
    "QSGD: the norm that is sent",
    "qsgd_norm",
    quantiser.compress(x)[0],
    values=x,
    differs="norm of QSGD",
)
received = quantiser.decompress(quantiser.compress(torch.zeros(3)))
C.add("compression", "QSGD of zeros", "qsgd_mean", received, values=[0.0, 0.0, 0.0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def handler(kind: Any, clients: int, share: float, *option: Any, **options: Any) -> Any:
    made = kind(Model(), 1, share)
    made.num_clients = clients
    made.setup_optim(*option, **options)
    made.set_model(torch.tensor(start))
    return made


start = np.array([1.0, 2.0, -1.0])
models = np.round(start + numbers(1, 3, 3, scale=0.1), 4)
trained = [torch.tensor(model) for model in models]
for option in ("weighted_com", "uniform", "other"):
    made = handler(FedNovaServerHandler, 3, 1.0, option)
    made.global_update([[y, torch.tensor([float(t)], dtype=torch.float64)] for y, t in zip(trained, (2, 8, 5))])
    C.add(
        "FedNova",
        f"3 of 3 clients, steps 2 8 5, option {option}",
        "fednova_round",
        made.model_parameters,
        start=start,
        models=models,
        steps=[2, 8, 5],
        samples=[7, 7, 7],
    )
made = handler(FedNovaServerHandler, 10, 0.3, "weighted_scale")
made.global_update([[y, torch.tensor([5.0], dtype=torch.float64)] for y in trained])
C.add(
    "FedNova",
    "3 of 10 clients, equal work, option weighted_scale",
    "fednova_round",
    made.model_parameters,
    start=start,
    models=models,
    steps=[5, 5, 5],
    samples=[7, 7, 7],
    differs="N over K besides",
)

made = handler(ScaffoldServerHandler, 10, 0.3, lr=0.7)
made.global_c, changes = made.global_c.double(), numbers(2, 3, 3)
made.global_update([[y - torch.tensor(start), torch.tensor(c)] for y, c in zip(trained, changes)])
C.add(
    "SCAFFOLD",
    "server, 3 of 10 clients, eta_g .7: model and c",
    "scaffold_round",
    torch.stack([made.model_parameters, made.global_c]),
    start=start,
    models=models,
    changes=changes,
    clients=10,
    lr=0.7,
)
own, control, gradients = numbers(3, 3), numbers(4, 3), numbers(5, 6, 3)
y = start - 0.1 * (gradients + control - own).sum(axis=0)
C.add(
    "SCAFFOLD",
    "client: y after 6 steps and the change of c_i by FedLab's line",
    "scaffold_local",
    [y, -(y - start) / (6 * 0.1) - control],
    start=start,
    gradients=gradients,
    lr=0.1,
    control=control,
    own=own,
    tolerance=1e-12,
    source="the line of its trainer in NumPy",
)

made = handler(FedDynServerHandler, 10, 0.3, alpha=0.1)
made.h = made.h.double()
made.global_update([[y] for y in trained])
inputs = {"start": start, "rounds": models[None], "clients": 10, "alpha": 0.1}
C.add(
    "FedDyn",
    "server, 3 of 10 clients, alpha .1",
    "feddyn_rounds",
    made.model_parameters[None],
    differs="h for one client",
    **inputs,
)
C.add(
    "FedDyn",
    "the same by Algorithm 1",
    "feddyn_rounds",
    (models.mean(0) + (models - start).sum(0) / 10)[None],
    source="Algorithm 1 in NumPy",
    tolerance=1e-12,
    **inputs,
)

# partitions
P = "partitions"
known = np.repeat(np.arange(10), 100)
np.random.seed(2021)
parts = list(partitions.hetero_dir_partition(known, 20, 10, 0.3, 10).values())
figures = ["at least ten each", "sizes differ", "every sample once"]
C.add(
    P,
    "test_hetero_dir",
    "partition",
    partition_figures(parts, known, figures),
    scheme="dirichlet",
    labels=known,
    clients=20,
    figures=figures,
    alpha=0.3,
)
eighty = np.repeat(np.arange(10), 80)
parts = list(partitions.shards_partition(eighty, 20, 80).values())
figures = ["sizes", "every sample once"]
C.add(
    P,
    "test_shards: 4 shards each",
    "partition",
    partition_figures(parts, eighty, figures),
    scheme="shards",
    labels=eighty,
    clients=20,
    figures=figures,
    classes_per_client=4,
)
parts = list(partitions.homo_partition(np.full(20, 50), len(known)).values())
C.add(
    P,
    "test_balance_iid",
    "partition",
    partition_figures(parts, known, figures),
    scheme="iid",
    labels=known,
    clients=20,
    figures=figures,
)
two = np.repeat([0, 1], 500)
C.add(
    P,
    "test_noniid_major_classes: one class each",
    "partition",
    [1.0, 1.0],
    scheme="classes",
    labels=two,
    clients=10,
    figures=["most classes", "every sample once"],
    classes_per_client=1,
    source="its test's assertion",
)
C.add(
    P,
    "test_unbalance: sizes differ, at least 10",
    "partition",
    [1.0, 1.0],
    scheme="quantity",
    labels=two,
    clients=10,
    figures=["sizes differ", "at least ten each"],
    alpha=0.3,
    seed=3,
    source="its test's assertion",
)
np.random.seed(0)
C.add(
    P,
    "quantity skew: samples given away of 1000",
    "partition",
    [float(partitions.dirichlet_unbalance_split(10, 1000, 0.3).sum())],
    scheme="quantity",
    labels=two,
    clients=10,
    figures=["samples"],
    alpha=0.3,
    differs="samples lost",
)
generator = np.random.default_rng(5)
for alpha, count in ((0.1, 8), (0.5, 10), (5.0, 7)):
    labels = generator.integers(0, 6, 997)
    draws = [np.round(generator.dirichlet(np.full(count, alpha)), 12) for _ in range(6)]
    again, random = itertools.cycle(draws), np.random.dirichlet
    np.random.dirichlet = lambda _, again=again: next(again)
    try:
        held = partitions.hetero_dir_partition(labels, count, 6, alpha, 1)
    finally:
        np.random.dirichlet = random
    value = [[int((labels[held[client]] == one).sum()) for client in range(count)] for one in range(6)]
    C.add(
        P,
        f"capped Dirichlet from the same draws, alpha {alpha}, {count} clients",
        "capped_counts",
        value,
        counts=np.bincount(labels, minlength=6),
        draws=draws,
    )


# whole runs of its pipeline
def drawn(kind: Any) -> Any:
    """Return a handler that takes the clients of ``whole.COHORTS``."""
    cohort = property(lambda handler: whole.COHORTS[handler.round])
    return type(
        kind.__name__,
        (kind,),
        {
            "sample_clients": lambda handler: list(cohort.fget(handler)),
            "num_clients_per_round": property(lambda handler: len(cohort.fget(handler))),
        },
    )


class Data:
    """Full batches."""

    def get_dataloader(self, client: int, batch_size: int) -> list[Any]:
        """Return a client's batches."""
        return [whole.samples(client)]


def pipeline(server: Any, trainer: Any, of_server: tuple[float, ...] = (), of_client: tuple[float, ...] = ()) -> Any:
    """Return the weights after a whole run."""
    handler = drawn(server)(whole.model(), len(whole.COHORTS), 1.0)
    clients = trainer(whole.model(), len(whole.parts))
    clients.setup_dataset(Data())
    clients.setup_optim(whole.EPOCHS, 1000, whole.LR, *of_client)
    if of_server:
        handler.setup_optim(*of_server)
    made = StandalonePipeline(handler, clients)
    made.evaluate = lambda: None
    made.main()
    return whole.final(handler.model)


C.difference(
    "clients the same",
    "decision",
    "FedLab's handlers count clients the same, fedcore by their samples.",
    follows="fedcore (McMahan et al., Algorithm 1: n_k / n)",
    where="fedlab/utils/aggregator.py: Aggregators.fedavg_aggregate, without weights",
    option="a plugin whose hook weight returns 1",
)
value = pipeline(SyncServerHandler, SGDSerialClientTrainer)
whole.add(C, "FedAvg", value, {}, differs="clients the same")
whole.add(C, "FedAvg, clients the same", value, {}, equal=True)
value = pipeline(SyncServerHandler, FedProxSerialClientTrainer, of_client=(0.4,))
whole.add(C, "FedProx, mu .4, clients the same", value, {"fedprox": {"mu": 0.4}}, equal=True)
for lr in (1.0, 0.5):
    value = pipeline(ScaffoldServerHandler, ScaffoldSerialClientTrainer, (lr,))
    whole.add(C, f"SCAFFOLD, eta_g {lr}", value, {"scaffold": {"server_lr": lr, "weighting": "uniform"}})
value = pipeline(FedDynServerHandler, FedDynSerialClientTrainer, (0.3,), (0.3,))
plugins = {"feddyn": {"alpha": 0.3, "weighting": "uniform"}}
whole.add(C, "FedDyn, alpha .3", value, plugins, differs="h for one client")
C.write()
