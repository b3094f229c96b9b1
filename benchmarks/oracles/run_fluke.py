"""fluke's servers, losses and partitions on given models and samples."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import whole
from cases import Fixture, numbers, partition_figures
from fluke import DDict, FlukeENV
from fluke.algorithms.ccvr import CCVRServer
from fluke.algorithms.fedamp import FedAMPServer
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.fedavgm import FedAVGM, FedAVGMServer
from fluke.algorithms.fedlc import CalibratedLoss
from fluke.algorithms.fednh import FedNHClient, FedNHServer, ProtoNet
from fluke.algorithms.fednova import FedNovaServer
from fluke.algorithms.fedopt import FedOptServer
from fluke.algorithms.fedproto import FedProtoServer
from fluke.algorithms.fedprox import FedProx, FedProxClient
from fluke.algorithms.fedrod import BalancedSoftmaxLoss
from fluke.algorithms.fedrs import RSLoss
from fluke.algorithms.fedsam import SAMOptimizer
from fluke.algorithms.per_fedavg import PerFedAVGClient
from fluke.algorithms.scaffold import SCAFFOLD, SCAFFOLDServer
from fluke.comm import Channel, Message
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.server import Server
from torch import nn

warnings.simplefilter("ignore")
C = Fixture("fluke", "fluke", "fluke-fl", source="run of the library's servers, clients and losses on these inputs")
C.difference(
    "first round stands still",
    "library",
    "fluke's first round only makes the velocity, as 0, so the model stays where it was; its rounds 2 to 4 are "
    "fedcore's first three on the same updates.",
    follows="fedcore (Hsu et al.: v = beta v + d from the first round on)",
    where="fluke/algorithms/fedavgm.py: FedAVGMServer.aggregate",
)
C.difference(
    "learning rate twice",
    "library",
    "fluke multiplies the clients' mean movement by the server's rate before Adam, Yogi or Adagrad, and the step "
    "again, and v starts at 0; Algorithm 2 has the rate once, and v_-1 at least tau^2.",
    follows="fedcore (Reddi et al., Algorithm 2)",
    where="fluke/algorithms/fedopt.py: FedOptServer.aggregate, with fluke/server.py: Server.aggregate",
    option="none; at rate 1 and v_-1 = tau^2 the two agree",
    tracker="not this; Add bias correction support for Adam mode in FedOpt touches the same lines",
)
C.difference(
    "weights that do not add up to 1",
    "library",
    "Where clients take different numbers of steps, fluke adds up w_i y_i with weights that do not add up to 1; the "
    "paper steps from w_t by tau_eff sum p_i d_i.",
    follows="fedcore (Wang et al., Eq. 7)",
    where="fluke/algorithms/fednova.py: FedNovaServer.aggregate",
)
C.difference(
    "step times the models' mean",
    "library",
    "fluke multiplies the mean of the models by the global step, the paper the mean of their movements.",
    follows="fedcore (Karimireddy et al., Algorithm 1, line 17)",
    where="fluke/algorithms/scaffold.py: SCAFFOLDServer.aggregate",
)
C.difference(
    "biased covariances",
    "library",
    "fluke's clients send covariances divided by n into the paper's formula, which is right for those divided by n - "
    "1; fedcore's pooled covariance is that of all samples together.",
    follows="fedcore (Luo et al., Eq. 4)",
    where="fluke/algorithms/ccvr.py: CCVRClient.compute_mean_cov",
)
C.difference(
    "buffer kept",
    "decision",
    "fluke's clients keep their optimizer, and with it the momentum of their last round; fedcore's momentum is new in "
    "each round.",
    follows="both (the papers do not say)",
    where="fluke/client.py: Client.fit",
    option="none; persistency: false in fluke's client agrees",
)


class Model(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.as_tensor(value, dtype=torch.float64).clone())


start, sizes = np.array([1.0, -2.0, 0.5, 3.0]), [10, 30, 20]
rounds = np.round(start + numbers(0, 4, 3, 4, scale=0.3), 4)
clients = [SimpleNamespace(index=number, n_examples=size) for number, size in enumerate(sizes)]
shares = np.array(sizes) / sum(sizes)
means = np.einsum("k,rkd->rd", shares, rounds)


def run(server: Any, models: np.ndarray = rounds) -> torch.Tensor:
    """Return the model after each round."""
    after = []
    for then in models:
        server.aggregate(clients, [Model(model) for model in then])
        after.append(server.model.w.detach().clone())
    return torch.stack(after)


W = "weighted mean"
C.add(
    W,
    "Server.aggregate by samples",
    "weighted_mean",
    run(Server(Model(start), None, clients, weighted=True), rounds[:1])[0],
    models=rounds[0],
    shares=sizes,
)
C.add(
    W,
    "Server.aggregate, clients the same",
    "weighted_mean",
    run(Server(Model(start), None, clients), rounds[:1])[0],
    models=rounds[0],
)

value = run(FedAVGMServer(Model(start), None, clients, momentum=0.9))
C.add(
    "FedAvgM",
    "4 rounds, beta .9",
    "server_rounds",
    value,
    plugin="fedavgm",
    options={"beta": 0.9},
    start=start,
    means=means,
    differs="first round stands still",
)
C.add(
    "FedAvgM",
    "fluke's rounds 2 to 4",
    "server_rounds",
    value[1:],
    plugin="fedavgm",
    options={"beta": 0.9},
    start=start,
    means=means[1:],
    tolerance=1e-9,
)

for mode in ("adam", "yogi", "adagrad"):
    options = {"tau": 1e-3, "beta1": 0.9, **({} if mode == "adagrad" else {"beta2": 0.99})}
    own = {"mode": mode, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    value = run(FedOptServer(Model(start), None, clients, lr=0.1, **own))
    C.add(
        "FedOpt",
        f"{mode}, 4 rounds as it is",
        "server_rounds",
        value,
        plugin=f"fed{mode}",
        options={"lr": 0.1, **options},
        start=start,
        means=means,
        differs="learning rate twice",
    )
    server = FedOptServer(Model(start), None, clients, lr=1.0, **own)
    server.v_t["w"] += 1e-6
    C.add(
        "FedOpt",
        f"{mode}, 4 rounds, rate 1, v_-1 = tau^2 given to fluke",
        "server_rounds",
        run(server),
        plugin=f"fed{mode}",
        options={"lr": 1.0, **options},
        start=start,
        means=means,
        tolerance=1e-9,
    )

N = "FedNova"


def a_norm(steps: int, rho: float) -> float:
    """Return fluke's line for |a_i|_1."""
    return (steps - rho * (1.0 - rho**steps) / (1.0 - rho)) / (1.0 - rho)


for steps in (1, 2, 5, 30):
    for rho in (0.0, 0.5, 0.9):
        C.add(
            N,
            f"|a_i|_1 of {steps} steps, momentum {rho}",
            "fednova_norm",
            a_norm(steps, rho),
            steps=steps,
            momentum=rho,
            tolerance=1e-9,
            source="the line of its client",
        )
for steps in ([4, 4, 4], [1, 3, 9]):
    server = FedNovaServer(Model(start), None, clients, weighted=True)
    for client, count in zip(clients, steps):
        server.channel.send(Message(a_norm(count, 0.0), "local_a", client.index, inmemory=True), "server")
    server.aggregate(clients, [Model(model) for model in rounds[0]])
    differs = "" if len(set(steps)) == 1 else "weights that do not add up to 1"
    C.add(
        N,
        f"steps {steps}",
        "fednova_round",
        server.model.w,
        start=start,
        models=rounds[0],
        steps=steps,
        samples=sizes,
        differs=differs,
    )
paper = start - sum(s * t for s, t in zip(shares, [1, 3, 9])) * sum(
    s * (start - y) / t for s, y, t in zip(shares, rounds[0], [1, 3, 9])
)
C.add(
    N,
    "steps [1, 3, 9] by the paper's Eq. 7",
    "fednova_round",
    paper,
    start=start,
    models=rounds[0],
    steps=[1, 3, 9],
    samples=sizes,
    tolerance=1e-12,
    source="Eq. 7 in NumPy",
)

changes = numbers(7, 3, 4)
for lr in (1.0, 0.5):
    server = SCAFFOLDServer(Model(start), None, clients, weighted=False, global_step=lr)
    for client, change in zip(clients, changes):
        server.channel.send(Message({"w": torch.tensor(change)}, "control", client.index, inmemory=True), "server")
    server.aggregate(clients, [Model(model) for model in rounds[0]])
    differs = "" if lr == 1 else "step times the models' mean"
    C.add(
        "SCAFFOLD",
        f"model and c after a round, global step {lr}",
        "scaffold_round",
        torch.stack([server.model.w, server.control["w"]]),
        start=start,
        models=rounds[0],
        changes=changes,
        clients=3,
        lr=lr,
        differs=differs,
        tolerance=1e-9,
    )
value = FedProxClient._proximal_loss(None, Model(start), Model(rounds[0][0]))
C.add(
    "FedProx",
    "mu/2 |w - w_t|^2, mu .3",
    "proximal",
    0.15 * value,
    parameters=start,
    reference=rounds[0][0],
    weight=0.3,
    tolerance=1e-9,
)

# losses
counts, y, z = [30, 1, 7, 0, 100], [0, 1, 2, 4] * 4, numbers(8, 16, 5)
logits, labels, present = torch.tensor(z), torch.tensor(y), torch.tensor(counts)
loss = {"logits": z, "labels": y, "counts": counts}
for tau in (1.0, 0.5):
    C.add(
        "FedLC",
        f"calibrated loss, tau {tau}, an absent class",
        "fedlc_loss",
        CalibratedLoss(tau, present.double()[None])(logits, labels),
        tau=tau,
        tolerance=1e-5,
        **loss,
    )
for alpha in (0.5, 0.9):
    C.add(
        "FedRS",
        f"restricted softmax, alpha {alpha}",
        "fedrs_loss",
        RSLoss(torch.where(present > 0, 1.0, alpha)[None])(logits, labels),
        alpha=alpha,
        **loss,
    )
C.add(
    "FedRoD",
    "balanced softmax, an absent class",
    "balanced_softmax",
    BalancedSoftmaxLoss(present.double())(labels, logits),
    tolerance=1e-5,
    **loss,
)
h = numbers(9, 3, 16, 8)
cosine = nn.CosineSimilarity(dim=-1)
pull, push = (torch.exp(cosine(torch.tensor(h[0]), torch.tensor(other)) / 0.5) for other in h[1:])
C.add(
    "MOON",
    "contrastive term, temperature .5",
    "moon_loss",
    -torch.log(pull / (pull + push)).mean(),
    anchor=h[0],
    positive=h[1],
    negative=h[2],
    tolerance=1e-5,
    source="the line of its client",
)

# FedAMP, FedProto
models = numbers(10, 4, 4, scale=0.2)
peers = [SimpleNamespace(index=number) for number in range(4)]
server = FedAMPServer(Model(np.zeros(4)), None, peers, sigma=2.0, alpha=0.3)
server.aggregate(peers, [Model(model) for model in models])
clouds = [server.channel.receive(number, "server", "model").payload.w for number in range(4)]
C.add("FedAMP", "cloud models of 4 clients", "fedamp_models", torch.stack(clouds), models=models, alpha=0.3, sigma=2.0)
server = FedProtoServer(None, None, [], n_protos=3)
server.aggregate(
    [], [{0: torch.ones(3), 1: None, 2: torch.zeros(3)}, {0: 3 * torch.ones(3), 1: torch.full((3,), 5.0), 2: None}]
)
C.add(
    "FedProto",
    "prototypes: the mean over the holders",
    "prototype_means",
    torch.stack(server.prototypes),
    features=[[[1.0] * 3, [0.0] * 3], [[3.0] * 3, [5.0] * 3]],
    labels=[[0, 2], [0, 1]],
    classes=3,
)

# CCVR
held = [(numbers(11, 2, 3), [0, 0]), (numbers(12, 3, 3), [0, 0, 1]), (numbers(13, 6, 3), [0, 1, 1, 1, 0, 0])]
server = CCVRServer.__new__(CCVRServer)
server.clients = [SimpleNamespace(index=number, compute_mean_cov=lambda: None) for number in range(3)]
server.n_clients, server._channel = 3, Channel()
for number, (features, known) in enumerate(held):
    own = [torch.tensor(features)[torch.tensor(known) == one] for one in range(2)]
    mean = [part.mean(0) if len(part) else torch.zeros(3).double() for part in own]
    covariance = [part.t().cov(correction=0) if len(part) else torch.zeros(3, 3).double() for part in own]
    server._channel.send(
        Message((mean, covariance, [len(part) for part in own]), "mean_cov", number, inmemory=True), "server"
    )
pooled, covariances = server._compute_mean_cov()
inputs = {"features": [features for features, _ in held], "labels": [known for _, known in held], "classes": 2}
together = np.concatenate([features[np.array(known) == 0] for features, known in held])
C.add("CCVR", "pooled means", "ccvr_statistics", torch.stack(pooled), figure="means", tolerance=1e-5, **inputs)
C.add(
    "CCVR",
    "pooled covariance of class 0: that of all samples together",
    "ccvr_statistics",
    np.cov(together.T),
    figure="covariance",
    tolerance=1e-9,
    source="numpy.cov",
    **inputs,
)
C.add(
    "CCVR",
    "pooled covariance of class 0",
    "ccvr_statistics",
    covariances[0],
    figure="covariance",
    differs="biased covariances",
    **inputs,
)

# FedSAM
for seed in range(3):
    for adaptive in (False, True):
        generator = np.random.default_rng(seed)
        network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(torch.tensor(np.round(generator.standard_normal(parameter.shape) * 0.4, 3)))
        x, target = torch.tensor(numbers(seed, 8, 5)), torch.tensor(generator.integers(0, 3, 8))
        optimizer = SAMOptimizer(network.parameters(), rho=0.3, adaptive=adaptive, lr=0.1)
        before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
        nn.functional.cross_entropy(network(x), target).backward()
        slopes = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
        optimizer.first_step()
        value = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
        said = f"worst point, rho .3{', adaptive with T = |w|' if adaptive else ''}, seed {seed}"
        C.add("FedSAM", said, "sam_point", value, weights=before, gradients=slopes, rho=0.3, adaptive=adaptive)

# FedNH
classes, width = 4, 6
for seed in range(2):
    torch.manual_seed(seed)
    server = FedNHServer.__new__(FedNHServer)
    server.hyper_params = SimpleNamespace(n_protos=classes, rho=0.3, weighted=True)
    server.model = ProtoNet(nn.Linear(width, width), classes, width)
    prototypes = server.model.prototypes.data.clone()
    sent, own, known = [], [], []
    for number, sizes_of_classes in enumerate(([5, 3, 0, 9], [1, 8, 2, 0])):
        features = numbers(20 + 2 * seed + number, sum(sizes_of_classes), width)
        y = np.repeat(np.arange(classes), sizes_of_classes)
        model = ProtoNet(nn.Linear(width, width), classes, width)
        client = FedNHClient.__new__(FedNHClient)
        type(client).model = model
        client._update_protos({one: torch.tensor(features[y == one], dtype=torch.float32) for one in range(classes)})
        sent.append((SimpleNamespace(count_by_class=torch.tensor(sizes_of_classes)), model))
        own.append(features)
        known.append(y)
    server.aggregate([client for client, _ in sent], [model for _, model in sent])
    C.add(
        "FedNH",
        f"two clients, rho .3, seed {seed}",
        "fednh_prototypes",
        server.model.prototypes.data,
        prototypes=prototypes,
        features=own,
        labels=known,
        rho=0.3,
        tolerance=1e-5,
    )

# Per-FedAvg
for seed in range(2):
    network = nn.Sequential()
    network.add_module("0", nn.Linear(5, 4))
    network.add_module("0-tanh", nn.Tanh())
    network.add_module("1", nn.Linear(4, 3))
    network.double()
    generator = np.random.default_rng(30 + seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.tensor(np.round(generator.standard_normal(parameter.shape) * 0.4, 3)))
    x, y = numbers(40 + seed, 8, 5), generator.integers(0, 3, 8)
    direction = {name: np.round(generator.standard_normal(p.shape), 3) for name, p in network.named_parameters()}
    client = PerFedAVGClient.__new__(PerFedAVGClient)
    client.device, client.hyper_params = "cpu", SimpleNamespace(loss_fn=nn.CrossEntropyLoss())
    product = client._compute_grad(
        copy.deepcopy(network),
        (torch.tensor(x), torch.tensor(y)),
        v=[torch.tensor(part) for part in direction.values()],
    )
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    C.add(
        "Per-FedAvg",
        f"Hessian times a vector by differences of 1e-3, seed {seed}",
        "hessian_vector",
        torch.cat([part.flatten() for part in product]),
        weights=weights,
        x=x,
        y=y,
        direction=direction,
        delta=1e-3,
        tolerance=1e-7,
    )

# partitions
y = torch.arange(1000) % 10
x = torch.zeros(1000, 1)
known = y.numpy()
np.random.seed(0)
(parts, _) = DataSplitter.label_pathological_skew(x, y, None, None, 10, 2)
figures = ["sizes", "at most two classes", "every sample once"]
C.add(
    "partitions",
    "pathological: 2 shards each",
    "partition",
    partition_figures(parts, known, figures),
    scheme="shards",
    labels=known,
    clients=10,
    figures=figures,
    classes_per_client=2,
)
(parts, _) = DataSplitter.iid(x[:997], y[:997], None, None, 10)
C.add(
    "partitions",
    "iid of 997",
    "partition",
    partition_figures(parts, known[:997], ["sizes"]),
    scheme="iid",
    labels=known[:997],
    clients=10,
    figures=["sizes"],
)
(parts, _) = DataSplitter.label_quantity_skew(x, y, None, None, 10, 3)
figures = ["at most three classes", "every sample once"]
C.add(
    "partitions",
    "label quantity: at most 3 classes each",
    "partition",
    partition_figures(parts, known, figures),
    scheme="classes",
    labels=known,
    clients=10,
    figures=figures,
    classes_per_client=3,
)

# whole runs of its federation


def whole_run(
    algorithm: Any, rounds: int = whole.ROUNDS, client: dict[str, Any] | None = None, **options: Any
) -> torch.Tensor:
    """Return the weights after fluke's own rounds, clients with their optimizer kept or not."""
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    loaders = [
        FastDataLoader(*whole.samples(number), num_labels=3, batch_size=1000, shuffle=False, skip_singleton=False)
        for number in range(len(whole.parts))
    ]
    container = DummyDataContainer(loaders, [None] * len(loaders), None, 3)
    chosen = {"name": "SGD", "lr": whole.LR, "momentum": 0.0, "weight_decay": 0.0}
    hyper = {
        "batch_size": 1000,
        "local_epochs": whole.EPOCHS,
        "loss": nn.CrossEntropyLoss,
        "persistency": True,
        "optimizer": {**chosen, **(client or {}).pop("optimizer", {})},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
        **(client or {}),
    }

    class Quiet(algorithm):
        def _compute_evaluation(self, *_: Any) -> None:
            """Evaluate nothing."""

        def finalize(self) -> None:
            """Send nobody the last model."""
            FlukeENV().close_cache()

    choices = DDict(client=DDict(**hyper), server=DDict(**{"weighted": True, **options}), model=whole.model())
    made = Quiet(len(loaders), DataSplitter(container, distribution="iid"), choices)
    made.run(rounds, 1.0)
    return whole.final(made.server.model)


for said, value, plugins, more, differs in (
    ("FedAvg", whole_run(FedAVG), {}, {}, ""),
    (
        "FedAvg, weight decay .1",
        whole_run(FedAVG, client={"optimizer": {"weight_decay": 0.1}}),
        {},
        {"weight_decay": 0.1},
        "",
    ),
    ("FedProx, mu .1", whole_run(FedProx, client={"mu": 0.1}), {"fedprox": {"mu": 0.1}}, {}, ""),
    (
        "FedAvgM, beta .5, a round more",
        whole_run(FedAVGM, whole.ROUNDS + 1, momentum=0.5),
        {"fedavgm": {"beta": 0.5}},
        {},
        "",
    ),
    (
        "FedAvg, momentum .5",
        whole_run(FedAVG, client={"optimizer": {"momentum": 0.5}}),
        {},
        {"momentum": 0.5},
        "buffer kept",
    ),
    (
        "FedAvg, momentum .5, no client kept",
        whole_run(FedAVG, client={"optimizer": {"momentum": 0.5}, "persistency": False}),
        {},
        {"momentum": 0.5},
        "",
    ),
    (
        "SCAFFOLD, global step 1",
        whole_run(SCAFFOLD, weighted=False, global_step=1.0),
        {"scaffold": {"weighting": "uniform"}},
        {},
        "",
    ),
):
    C.add(
        "whole run",
        said,
        "whole_run",
        value,
        plugins=plugins,
        options=more,
        differs=differs,
        tolerance=2e-6,
        source="run of the library's federation",
        **whole.inputs,
    )
C.write()
