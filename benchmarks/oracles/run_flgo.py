"""FLGo's servers on given models of clients, and its partitions."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flgo
import numpy as np
import torch
import whole
from cases import Fixture, numbers, partition_figures
from flgo.algorithm import fedavg, fedavgm, fedbase, feddyn, fednova, powerofchoice, qfedavg, scaffold
from flgo.benchmark.toolkits.partition import DirichletPartitioner, DiversityPartitioner
from flgo.experiment.logger.simple_logger import SimpleLogger
from flgo.utils import fmodule
from flgo.utils.fmodule import FModule
from torch import nn

warnings.simplefilter("ignore")
C = Fixture("flgo", "FLGo", "flgo", source="run of the library's servers on these models")
C.difference(
    "weighted_scale",
    "library",
    "FLGo's default aggregation weighted_scale is N / K sum p_i y_i, p over all clients; where those drawn do not have "
    "the average size it is no mean, and the model shrinks or grows. fedcore divides by the samples of those that "
    "came.",
    follows="fedcore (McMahan et al., Algorithm 1); Li et al.'s scheme II is unbiased only for equal p",
    where="flgo/algorithm/fedbase.py: BasicServer.aggregate",
    option="none; aggregation_option='other' of FLGo is fedcore's mean",
)
C.difference(
    "p counts twice",
    "library",
    "FLGo's FedNova multiplies by p of all clients, which do not add up to 1 over those that came, and then aggregates "
    "by its option weighted_com or weighted_scale, where p counts again.",
    follows="fedcore (Wang et al., Eq. 7: p sums to 1 over the round's clients)",
    where="flgo/algorithm/fednova.py: Server.aggregate",
    option="none; aggregation_option='other' of FLGo agrees",
)
C.difference(
    "positions for clients",
    "library",
    "FLGo takes the positions of the largest losses in its list of candidates as positions among all available "
    "clients, so other clients than those with the largest losses are chosen.",
    follows="fedcore (Cho et al., Section 3)",
    where="flgo/algorithm/powerofchoice.py: Server.sample",
)
C.difference(
    "Dirichlet of a client's labels",
    "decision",
    "FLGo draws each client's labels from Dirichlet(alpha p), p the shares of the classes, so that alpha 1 of 10 "
    "classes is 0.1 each; fedcore draws each class's clients from Dirichlet(alpha), as NIID-Bench does.",
    follows="both (Hsu et al.; Yurochkin et al.)",
    where="flgo/benchmark/toolkits/partition.py: DirichletPartitioner",
    option="--partition dirichlet-clients draws labels by client",
)
C.difference(
    "steps of a momentum",
    "decision",
    "With momentum in the clients' SGD, fedcore's c_i divides the movement by the sum of the steps' weights, FLGo's by "
    "the number of steps K.",
    follows="both (the paper has no momentum)",
    where="flgo/algorithm/scaffold.py: Client.train",
    option="none; momentum 0 agrees",
)


class Model(FModule):
    def __init__(self, value: Any = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.as_tensor(value, dtype=torch.float64) * torch.ones(4, dtype=torch.float64))


start, sizes = np.array([1.0, -2.0, 0.5, 3.0]), [10, 30, 20, 40, 100]
models = np.round(start + numbers(1, 3, 4, scale=0.3), 4)
trained = [Model(model) for model in models]


def server(kind: Any, **values: Any) -> Any:
    made = kind.__new__(kind)
    given = {
        "model": Model(start),
        "clients": [SimpleNamespace(datavol=n) for n in sizes],
        "num_clients": 5,
        "received_clients": [0, 1, 2],
    }
    for name, value in {**given, "aggregation_option": "other", **values}.items():
        setattr(made, name, value)
    return made


# weighted means
W = "weighted mean"
for said, option, shares in (("other", "other", sizes[:3]), ("uniform", "uniform", [1, 1, 1])):
    value = server(fedbase.BasicServer, aggregation_option=option).aggregate(trained).w
    C.add(W, f"aggregate {said}", "weighted_mean", value, models=models, shares=shares)
com = server(fedbase.BasicServer, aggregation_option="weighted_com").aggregate(trained).w
C.add(
    W,
    "aggregate weighted_com: those who did not come count with the old model",
    "weighted_mean",
    com,
    models=[*models, start, start],
    shares=sizes,
)
value = server(fedbase.BasicServer, aggregation_option="weighted_scale").aggregate(trained).w
C.add(
    W,
    "aggregate weighted_scale, unequal sizes",
    "weighted_mean",
    value,
    models=models,
    shares=sizes[:3],
    differs="weighted_scale",
)

# FedNova
for option in ("other", "uniform", "weighted_com", "weighted_scale"):
    for steps in ([4, 4, 4], [1, 3, 9]):
        made = server(fednova.Server, aggregation_option=option)
        moves = [(Model(model) - made.model) / count for model, count in zip(models, steps)]
        value = made.aggregate(moves, steps, p=[n / sum(sizes) for n in sizes[:3]]).w
        samples = [1, 1, 1] if option == "uniform" else sizes[:3]
        ours = np.array(samples) / sum(samples)
        paper = start + (ours * steps).sum() * ((ours / steps) @ (models - start))
        differs = "" if np.allclose(value.detach().numpy(), paper) else "p counts twice"
        C.add(
            "FedNova",
            f"3 of 5 clients, aggregate {option}, steps {steps}",
            "fednova_round",
            value,
            start=start,
            models=models,
            steps=steps,
            samples=samples,
            differs=differs,
        )

# SCAFFOLD
changes, control = numbers(3, 3, 4), numbers(4, 4)
for lr in (1.0, 0.6):
    made = server(scaffold.Server, eta=lr, cg=Model(control))
    model, renewed = made.aggregate([Model(m - start) for m in models], [Model(change) for change in changes])
    C.add(
        "SCAFFOLD",
        f"server, eta {lr}: model and c",
        "scaffold_round",
        torch.stack([model.w, renewed.w]),
        start=start,
        models=models,
        changes=changes,
        clients=5,
        lr=lr,
        control=control,
    )

# FedDyn
made, values, rounds = (
    server(feddyn.Server, alpha=0.1, h=Model()),
    [],
    [np.round(models + 0.1 * r, 4) for r in range(3)],
)
for models_then in rounds:
    made.model = made.aggregate([Model(model) for model in models_then])
    values.append(made.model.w.detach().clone())
for count in (1, 2, 3):
    C.add(
        "FedDyn",
        f"server, 3 of 5 clients, {count} rounds",
        "feddyn_rounds",
        torch.stack(values[:count]),
        start=start,
        rounds=rounds[:count],
        clients=5,
        alpha=0.1,
        tolerance=1e-5,
    )

# q-FFL
losses = [0.7, 2.3, 1.1]
for q in (0.0, 1.0, 3.0):
    sent = []
    for model, loss in zip(models, losses):
        client = qfedavg.Client.__new__(qfedavg.Client)
        client.global_model, client.learning_rate, client.q = Model(start), 0.05, q
        client.test = lambda *_, loss=loss: {"loss": loss}
        sent.append(client.pack(Model(model)))
    value = (Model(start) - fmodule._model_sum([one["dk"] for one in sent]) / sum(one["hk"] for one in sent)).w
    C.add(
        "q-FFL", f"q {q}", "qffl_round", value, q=q, start=start, models=models, losses=losses, lr=0.05, tolerance=1e-5
    )

# FedAvgM: its server's two lines, v = beta v + (w - mean), w = w - v
assert fedavgm.Server
velocity, current, values = np.zeros(4), start, []
means = [then.mean(axis=0) for then in rounds]
for mean in means:
    velocity = 0.9 * velocity + (current - mean)
    current = current - velocity
    values.append(current)
C.add(
    "FedAvgM",
    "3 rounds, beta .9 (the lines of its server)",
    "server_rounds",
    values,
    plugin="fedavgm",
    options={"beta": 0.9},
    start=start,
    means=means,
    source="the lines of its server in NumPy",
    tolerance=1e-9,
)


# power of choice
class Chooser(powerofchoice.Server):
    available_clients = list(range(10))


class Loss:
    train_data = [0] * 10

    def __init__(self, value: float) -> None:
        self.value = value

    def test(self, *_: Any) -> dict[str, float]:
        return {"loss": self.value}


made = Chooser.__new__(Chooser)
made.num_clients, made.d, made.clients_per_round, made.model = 10, 4, 2, None
made.clients = [Loss(float(number)) for number in range(10)]
for seed in range(50):
    np.random.seed(seed)
    chosen = sorted(int(one) for one in made.sample())
    np.random.seed(seed)
    candidates = sorted(int(one) for one in np.random.choice(range(10), 4, p=[0.1] * 10, replace=False))
    if chosen != candidates[-2:]:
        break
C.add(
    "client selection",
    f"power of choice: 2 of the candidates {candidates}, whose losses are their numbers",
    "largest_losses",
    chosen,
    losses={str(one): float(one) for one in candidates},
    count=2,
    differs="positions for clients",
)

# partitions
labels = np.repeat(np.arange(10), 200)
samples = [(0, int(label)) for label in labels]
np.random.seed(0)
with contextlib.redirect_stdout(io.StringIO()):
    by_client = DirichletPartitioner(20, alpha=1.0)(samples)
    two_each = DiversityPartitioner(10, diversity=0.2)(samples)
figures = ["mean entropy"]
C.add(
    "partitions",
    "Dirichlet, alpha 1: mean entropy of a client's labels",
    "partition",
    partition_figures(by_client, labels, figures),
    scheme="dirichlet",
    labels=labels,
    clients=20,
    figures=figures,
    alpha=1.0,
    tolerance=0.2,
    differs="Dirichlet of a client's labels",
)
figures = ["most classes", "least classes", "samples"]
C.add(
    "partitions",
    "two classes each",
    "partition",
    partition_figures(two_each, labels, figures),
    scheme="classes",
    labels=labels,
    clients=10,
    figures=figures,
    classes_per_client=2,
)

# whole runs of its runner
place = tempfile.mkdtemp()
os.chdir(place)
sys.path.insert(0, place)
task = flgo.gen_direct_task_from_file(
    "whole_task", str(Path(whole.__file__).with_name("flgo_task.py")), ".", overwrite=True
)


def whole_run(algorithm: Any, **options: Any) -> torch.Tensor:
    """Return the weights after FLGo's own rounds."""
    runner = flgo.init(
        task,
        algorithm,
        {
            "num_rounds": whole.ROUNDS,
            "proportion": 1.0,
            "num_epochs": whole.EPOCHS,
            "batch_size": 1000,
            "learning_rate": whole.LR,
            "learning_rate_decay": 1.0,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "train_holdout": 0.0,
            "no_tqdm": True,
            "no_log_console": True,
            **options,
        },
        Logger=SimpleLogger,
    )
    runner.run()
    return whole.final(runner.model)


uniform = {"weighting": "uniform"}
for said, algorithm, options, plugins, more in (
    ("FedAvg", fedavg, {}, {}, {}),
    ("FedAvg, momentum .5", fedavg, {"momentum": 0.5}, {}, {"momentum": 0.5}),
    (
        "FedAvg, weight decay .1, rate times .9 a round",
        fedavg,
        {"weight_decay": 0.1, "learning_rate_decay": 0.9, "lr_scheduler": 0},
        {},
        {"weight_decay": 0.1, "lr_decay": 0.9},
    ),
    ("FedAvgM, beta .5", fedavgm, {"algo_para": [0.5]}, {"fedavgm": {"beta": 0.5}}, {}),
    ("SCAFFOLD, eta 1", scaffold, {"algo_para": [1.0]}, {"scaffold": uniform}, {}),
    ("SCAFFOLD, eta .5", scaffold, {"algo_para": [0.5]}, {"scaffold": {**uniform, "server_lr": 0.5}}, {}),
    ("FedDyn, alpha .1", feddyn, {"algo_para": [0.1]}, {"feddyn": {**uniform, "alpha": 0.1}}, {}),
    ("q-FFL, q .5", qfedavg, {"algo_para": [0.5]}, {"qffl": {**uniform, "q": 0.5, "step": "rate"}}, {}),
    (
        "SCAFFOLD, eta 1, momentum .5",
        scaffold,
        {"algo_para": [1.0], "momentum": 0.5},
        {"scaffold": uniform},
        {"momentum": 0.5},
    ),
):
    differs = "steps of a momentum" if said.endswith("momentum .5") and "SCAFFOLD" in said else ""
    C.add(
        "whole run",
        said,
        "whole_run",
        whole_run(algorithm, **options),
        plugins=plugins,
        options=more,
        differs=differs,
        tolerance=2e-6,
        source="run of the library's runner",
        **whole.inputs,
    )
C.write()
