"""PFLlib: whole runs of its servers, some of the clients in each round, and its losses."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import whole
from cases import Fixture, numbers
from torch import nn

from authors import modules

COMMIT = "d832e76"
UNUSED = ("h5py", "matplotlib", "matplotlib.pyplot")
COHORTS = whole.COHORTS
METHODS = ("avg", "prox", "ditto", "per", "rep", "lg", "babu", "moon", "ntd", "lc", "rod", "scaffold", "dyn", "amp")

C = Fixture("pfllib", "PFLlib", of=f"git {COMMIT}", source="run of the library's servers, clients and losses")
C.difference(
    "tau squared",
    "decision",
    "PFLlib, as FedNTD's authors, multiplies the distillation by tau^2; fedcore has no such factor. At tau 1, the "
    "paper's value, they agree.",
    follows="both (the factor is not in the paper's equation; it is usual in distillation)",
    where="system/flcore/clients/clientntd.py: clientNTD._ntd_loss",
    option="fedntd.beta times tau^2",
)
C.difference(
    "length, not its square",
    "library",
    "PFLlib's FedDyn adds alpha / 2 times the distance from the received model, the paper alpha / 2 times its square.",
    follows="fedcore (Acar et al., Eq. 1)",
    where="system/flcore/clients/clientdyn.py: clientDyn.train",
)
C.difference(
    "attentive term without gradient",
    "library",
    "PFLlib's FedAMP computes the distance from u_i on detached weights, so that it has no gradient: clients train "
    "without the pull to u_i, which the paper's objective has.",
    follows="fedcore (Huang et al., Eq. 4)",
    where="system/flcore/clients/clientamp.py: clientAMP.train",
    option="--set fedamp.lambda=0",
    tracker="closed: FedAMP client loss; and FedAMP, in which a user saw the curve of local training",
)
C.difference(
    "margins of all clients together",
    "library",
    "PFLlib's FedLC takes the margins tau n_c^(-1/4) from the samples of all clients together, so that all have the "
    "same; in the paper each client calibrates by its own counts.",
    follows="fedcore (Zhang et al., Eq. 4: the label distribution of the client)",
    where="system/flcore/servers/serverlc.py: FedLC.__init__",
)
C.difference(
    "clients the same",
    "decision",
    "PFLlib's FedNTD counts clients the same, fedcore by their samples, as in its FedAvg.",
    follows="both (the weights of the mean are FedAvg's)",
    where="system/flcore/servers/serverntd.py: FedNTD.add_parameters",
    option="a plugin whose hook weight returns 1",
)


class Split(nn.Module):
    """The network of ``whole``, as PFLlib splits it."""

    def __init__(self) -> None:
        super().__init__()
        layers = whole.model()
        self.base, self.head = nn.Sequential(layers[0], layers[1]), layers[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.base(x))


def flat(*parts: Any) -> torch.Tensor:
    """Return the weights of modules, flat."""
    return torch.cat([parameter.detach().double().flatten() for part in parts for parameter in part.parameters()])


def server_of(
    loaded: dict[str, Any], name: str, epochs: int, cohorts: list[list[int]] = COHORTS, **options: Any
) -> Any:
    """Return the server of a method after a whole run."""
    given = {
        "model": Split(), "device": "cpu", "dataset": "", "num_classes": 3, "global_rounds": len(cohorts) - 1,
        "local_epochs": epochs, "batch_size": 1, "local_learning_rate": whole.LR, "num_clients": len(whole.parts),
        "join_ratio": 1.0, "random_join_ratio": False, "few_shot": 0, "algorithm": "", "time_select": False, "goal": "",
        "time_threthold": 1e9, "save_folder_name": "", "top_cnt": 1, "auto_break": False, "eval_gap": 1,
        "client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 1,
        "batch_num_per_client": 1, "num_new_clients": 0, "fine_tuning_epoch_new": 0, "learning_rate_decay": False,
        "learning_rate_decay_gamma": 1.0,
    }  # fmt: skip
    module = loaded[f"server{name}"]
    (kind,) = [
        one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__
        and issubclass(one, loaded["serverbase"].Server)
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        server = kind(SimpleNamespace(**{**given, **options}), 0)
        rounds = iter(cohorts)

        def select() -> list[Any]:
            cohort = next(rounds)
            server.num_join_clients = server.current_num_join_clients = len(cohort)
            return [server.clients[number] for number in cohort]

        server.select_clients = select
        server.evaluate = server.evaluate_personalized = lambda *_: server.rs_test_acc.append(0.0)
        server.save_results = server.save_global_model = lambda: None
        server.train()
    return server


whole_run = partial(whole.add, C)


def write() -> None:
    """Run the cases and write the fixture."""
    names = [f"flcore.servers.server{name}" for name in ("base", *METHODS)]
    names += ["flcore.clients.clientbase", "flcore.clients.clientcp", "flcore.clients.clientpac", "utils.ALA"]
    names += ["flcore.servers.serverproto", "flcore.servers.serverpac"]
    loaded = {
        module.__name__.rpartition(".")[2]: module
        for module in modules("TsingZ0/PFLlib", COMMIT, "system", *names, without=UNUSED)
    }

    def read(dataset: str, client: int, **_: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(*whole.samples(client), strict=True))

    loaded["serverbase"].read_client_data = loaded["clientbase"].read_client_data = read
    loaded["clientbase"].Client.load_train_data = lambda self, batch_size=None: [whole.samples(self.id)]

    def run(name: str, epochs: int = 3, **options: Any) -> Any:
        return server_of(loaded, name, epochs, **options)

    def heads(server: Any, of: Callable[[Any], Any]) -> torch.Tensor:
        return flat(*[of(client) for client in server.clients])

    whole_run("FedAvg", flat(run("avg").global_model), {})
    for mu in (0.5, 1.5):
        whole_run(f"FedProx, mu {mu}", flat(run("prox", mu=mu).global_model), {"fedprox": {"mu": mu}})
    for mu in (0.2, 1.0):
        server = run("ditto", mu=mu, plocal_epochs=3)
        value = torch.cat([flat(server.global_model), heads(server, lambda client: client.model_per)])
        whole_run(f"Ditto, lambda {mu}, w and each v_k", value, {"ditto": {"lambda": mu}}, kept="ditto")
    server = run("per")
    value = torch.cat([flat(server.global_model), heads(server, lambda client: client.model.head)])
    whole_run("FedPer, base and heads", value, {"fedper": {}}, kept="fedcore")
    server = run("rep", epochs=1, plocal_epochs=2)
    value = torch.cat([flat(server.global_model), heads(server, lambda client: client.model.head)])
    whole_run("FedRep, base and heads", value, {"fedrep": {}}, kept="fedcore")
    server = run("rep", epochs=2, plocal_epochs=1)
    value = torch.cat([flat(server.global_model), heads(server, lambda client: client.model.head)])
    plugins = {"fedrep": {"representation_epochs": 2}}
    whole_run("FedRep, two epochs of the base, base and heads", value, plugins, kept="fedcore")
    server = run("lg")
    value = torch.cat([flat(server.global_model), heads(server, lambda client: client.model.base)])
    whole_run("LG-FedAvg, head and bases", value, {"lg-fedavg": {}}, kept="fedcore")
    server = run("babu", fine_tuning_epochs=0)
    whole_run("FedBABU, base and fixed head", flat(server.global_model, Split().head), {"fedbabu": {}})
    for mu, tau in ((1.0, 0.5), (5.0, 1.0)):
        plugins = {"moon": {"mu": mu, "temperature": tau, "projection": False}}
        whole_run(f"MOON, mu {mu}, tau {tau}", flat(run("moon", mu=mu, tau=tau).global_model), plugins)
    for tau, beta, differs in ((1.0, 0.7, ""), (3.0, 0.7, "tau squared"), (3.0, 0.7 * 9, "")):
        value = flat(run("ntd", beta=0.7, tau=tau).global_model)
        plugins = {"fedntd": {"beta": beta, "temperature": tau}}
        said = f"FedNTD, beta .7, tau {tau}, clients the same" + (", fedcore with beta tau^2" if beta > 1 else "")
        whole_run(said, value, plugins, equal=True, differs=differs)
    value = flat(run("ntd", beta=0.7, tau=1.0).global_model)
    whole_run("FedNTD, beta .7, tau 1.0", value, {"fedntd": {"beta": 0.7}}, differs="clients the same")
    server = run("rod")
    value = torch.cat([flat(server.global_model), heads(server, lambda client: client.head)])
    whole_run("FedROD, the model and the personal heads", value, {"fedrod": {}}, kept="fedrod")
    for lr in (1.0, 0.5):
        value = flat(run("scaffold", server_learning_rate=lr).global_model)
        whole_run(f"SCAFFOLD, eta_g {lr}", value, {"scaffold": {"server_lr": lr, "weighting": "uniform"}})
    plugins = {"feddyn": {"alpha": 0.3, "weighting": "uniform"}}
    whole_run("FedDyn, alpha .3", flat(run("dyn", alpha=0.3).global_model), plugins, differs="length, not its square")
    with patch.object(torch, "norm", lambda apart, _: apart.square().sum()):
        value = flat(run("dyn", alpha=0.3).global_model)
    whole_run("FedDyn, alpha .3, with the square put in", value, plugins)
    everyone = [[0, 1, 2, 3]] * 4
    server = run("amp", cohorts=everyone, alphaK=1.0, lamda=1.0, sigma=5.0)
    value = heads(server, lambda client: client.model)
    for said, lam, differs in (("", 1.0, "attentive term without gradient"), (", fedcore with lambda 0", 0.0, "")):
        plugins = {"fedamp": {"lambda": lam, "alpha": 1.0, "sigma": 5.0}}
        whole_run(
            f"FedAMP, sigma 5, the clients' models{said}",
            value,
            plugins,
            kept="fedcore",
            differs=differs,
            cohorts=everyone,
        )

    value = flat(run("lc", tau=1.0).global_model)
    whole_run("FedLC, tau 1", value, {"fedlc": {}}, differs="margins of all clients together")
    kind = loaded["serverlc"].clientLC
    own = property(lambda client: client.sample_per_class**-0.25, lambda client, _: None)
    with patch.object(kind, "calibration", own, create=True):
        value = flat(run("lc", tau=1.0).global_model)
    whole_run("FedLC, tau 1, with each client's own counts put in", value, {"fedlc": {}})
    units(loaded)
    C.write()


def units(loaded: dict[str, Any]) -> None:
    """Add single terms."""
    of_ntd, of_rod = loaded["serverntd"].clientNTD, loaded["serverrod"]
    for seed, tau in enumerate((1.0, 2.0, 3.0)):
        local, received = (torch.tensor(numbers(900 + 2 * seed + one, 9, 5, scale=2.0)) for one in (0, 1))
        y = torch.tensor([int(one) for one in np.random.default_rng(seed).integers(0, 5, 9)])
        client = SimpleNamespace(tau=tau, num_classes=5, KLDiv=nn.KLDivLoss(reduction="batchmean"))
        value = of_ntd._ntd_loss(client, local, received, y)
        given = {"local": local, "received": received, "labels": y, "temperature": tau}
        C.add(
            "losses", f"FedNTD's term, tau {tau}", "not_true_distillation", value, **given,
            differs="" if tau == 1 else "tau squared",
        )  # fmt: skip
        C.add("losses", f"FedNTD's term over tau^2, tau {tau}", "not_true_distillation", value / tau**2, **given)
    balanced = of_rod.clientROD.train.__globals__["balanced_softmax_loss"]
    for seed in range(3):
        s = torch.tensor(numbers(920 + seed, 8, 4, scale=2.0))
        y = torch.tensor([int(one) for one in np.random.default_rng(seed).integers(0, 4, 8)])
        counts = [int(one) for one in np.random.default_rng(seed + 9).integers(1, 40, 4)]
        value = balanced(y, s, torch.tensor(counts))
        C.add(
            "losses", f"FedROD's balanced softmax, seed {seed}", "balanced_softmax", value, logits=s, labels=y,
            counts=counts,
        )  # fmt: skip
    discrepancy, context = loaded["clientcp"].MMD, loaded["clientcp"].clientCP
    for seed in range(3):
        x, y = (torch.tensor(numbers(930 + 2 * seed + one, 7, 4, scale=1.0 + 3 * one)) for one in (0, 1))
        C.add(
            "losses", f"FedCP's MMD, seed {seed}", "mean_discrepancy", discrepancy(x.float(), y.float(), "rbf"), x=x,
            y=y, tolerance=2e-6,
        )  # fmt: skip
        own, received = (torch.tensor(numbers(940 + 2 * seed + one, 3, 6)).float() for one in (0, 1))
        made = [nn.Linear(6, 3), nn.Linear(6, 3)]
        for layer, weight in zip(made, (own, received), strict=True):
            layer.weight.data.copy_(weight)
        client = SimpleNamespace(model=SimpleNamespace(model=SimpleNamespace(head=made[0]), head_g=made[1]))
        context.set_head_g(client, copy.deepcopy(made[1]))
        direction = nn.functional.normalize(client.context, p=2, dim=1)[0]
        C.add("FedCP", f"context of a head, seed {seed}", "head_context", direction, head=own)
        context.generate_upload_head(client)
        C.add("FedCP", f"uploaded head, seed {seed}", "halved_head", made[1].weight.data, own=own, received=received)
    for seed in range(2):
        features = torch.tensor(numbers(950 + seed, 10, 4))
        y = torch.tensor([int(one) for one in np.random.default_rng(seed).integers(0, 3, 10)])
        client = SimpleNamespace(
            model=SimpleNamespace(base=nn.Identity()), load_train_data=lambda f=features, y=y: [(f, y)],
            device="cpu", num_classes=4, train_samples=10,
        )  # fmt: skip
        variance, means = loaded["clientpac"].clientPAC.statistics_extraction(client)
        value = [variance, *means.flatten().tolist()]
        C.add("FedPAC", f"V and h, seed {seed}", "head_statistics", value, features=features, labels=y, classes=4)
        several = [(float(one), h) for one, h in zip(np.abs(numbers(990 + seed, 4)), numbers(994 + seed, 4, 3, 5))]
        variances, all_h = [one for one, _ in several], np.stack([h for _, h in several])
        shares = loaded["serverpac"].solve_quadratic(4, variances, [torch.tensor(h).float() for h in all_h])
        C.add(
            "FedPAC", f"shares of heads, seed {seed}", "head_shares", np.array(shares, dtype=float),
            variances=variances, means=all_h, tolerance=1e-3,
        )  # fmt: skip
    gathered = loaded["serverproto"].proto_aggregation
    for seed in range(3):
        labels = [[0, 0, 1, 2], [1, 1, 2], [0, 2, 2, 2, 1]][: 2 + seed % 2]
        features = [numbers(960 + 3 * seed + one, len(some), 5) for one, some in enumerate(labels)]
        own = [
            {c: torch.tensor(f[np.array(y) == c].mean(axis=0)) for c in sorted(set(y))}
            for f, y in zip(features, labels, strict=True)
        ]
        means = gathered(own)
        value = torch.stack([means[c] for c in range(3)])
        C.add(
            "FedProto", f"global prototypes, seed {seed}", "prototype_means", value, features=features, labels=labels,
            classes=3,
        )  # fmt: skip
    share = loaded["serveramp"].FedAMP.e
    for seed, sigma in enumerate((2.0, 8.0)):
        models = numbers(970 + seed, 3, 5)
        clouds = []
        for number, own in enumerate(models):
            others = [
                0.0 if other == number else 0.9 * share(SimpleNamespace(sigma=sigma), float(((own - one) ** 2).sum()))
                for other, one in enumerate(models)
            ]
            clouds.append((1 - sum(others)) * own + sum(part * one for part, one in zip(others, models, strict=True)))
        C.add(
            "FedAMP", f"clouds, sigma {sigma}", "fedamp_models", np.stack(clouds), models=models, alpha=0.9, sigma=sigma
        )
    adapt = loaded["ALA"].ALA
    for seed, eta in enumerate((0.5, 2.0)):
        x, y = torch.tensor(numbers(980 + seed, 12, 4)).float(), torch.arange(12) % 3
        own, received = (torch.tensor(numbers(984 + 2 * seed + one, 3, 4)).float() for one in (0, 1))
        layers = [nn.Linear(4, 3, bias=False) for _ in range(3)]
        for layer, weight in zip(layers, (own, received, own), strict=True):
            layer.weight.data.copy_(weight)
        made = adapt(0, nn.CrossEntropyLoss(), list(zip(x, y, strict=True)), 12, 100, 1, eta, "cpu")
        made.start_phase = False
        with contextlib.redirect_stdout(io.StringIO()):
            made.adaptive_local_aggregation(layers[1], layers[0])
        nn.functional.cross_entropy(layers[1](x), y).backward()  # the weights start at 1: at the received model
        slope = layers[1].weight.grad
        given = {"share": torch.ones(3, 4), "gradient": slope, "own": own, "received": received, "eta": eta}
        C.add("FedALA", f"share after a step, eta {eta}", "ala_share", made.weights[0], **given, tolerance=2e-6)
        C.add(
            "FedALA", f"start after a step, eta {eta}", "ala_mixture", layers[0].weight.data, own=own,
            received=received, share=made.weights[0], tolerance=2e-6,
        )  # fmt: skip
