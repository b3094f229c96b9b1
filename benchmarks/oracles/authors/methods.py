"""Authors' code of single methods: FedDC, FedDecorr, FPL, FedTGP and FedGen."""

from __future__ import annotations

import contextlib
import io
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import whole
from cases import Fixture, numbers
from torch import nn

from authors import CHECKOUTS, modules
from authors.pfllib import flat

EPOCHS = whole.EPOCHS


def write() -> None:
    """Run the cases and write the fixtures."""
    feddc()
    feddecorr()
    fpl()
    fedtgp()
    fedgen()


def labels_of(seed: int, count: int, classes: int) -> torch.Tensor:
    """Return drawn labels."""
    return torch.tensor([int(one) for one in np.random.default_rng(seed).integers(0, classes, count)])


def feddc() -> None:
    """Whole runs of the authors' training, also with some of the clients."""
    unused = (
        "matplotlib", "matplotlib.pyplot", "torchvision", "torchvision.transforms", "torchvision.models", "IPython",
        "IPython.core", "IPython.core.debugger", "torchsummary", "tensorboardX", "torch.utils.tensorboard", "PIL",
    )  # fmt: skip
    (methods,) = modules("gaoliang13/FedDC", "13440c2", ".", "utils_methods_FedDC", without=unused)
    fixture = Fixture("feddc_authors", "FedDC's authors", of="git 13440c2", source="run of their training")
    x, y = zip(*[whole.samples(client) for client in range(len(whole.parts))], strict=True)
    held = [np.asarray(one) for one in x], [np.asarray(one).reshape(-1, 1) for one in y]
    data = SimpleNamespace(
        n_client=len(whole.parts), clnt_x=held[0], clnt_y=held[1], dataset="synt", name="",
        tst_x=held[0][0], tst_y=held[1][0],
    )  # fmt: skip
    rounds = 4
    for alpha, share, seed in ((0.1, 1.0, 0), (0.6, 1.0, 0), (0.1, 0.6, 2), (0.6, 0.6, 3)):
        cohorts = []
        for number in range(rounds):
            np.random.seed(number + seed)
            cohorts.append([int(one) for one in np.flatnonzero(np.random.uniform(size=4) <= share)])
        assert all(cohorts), "their loop would draw again"
        with contextlib.redirect_stdout(io.StringIO()):
            answer = methods.train_FedDC(
                data, share, EPOCHS, whole.LR, 1000, EPOCHS, rounds, 10**6, 0.0, whole.model, whole.model(), alpha,
                1, 1, rounds, rand_seed=seed,
            )  # fmt: skip
        said = "all clients" if share == 1 else f"clients {', then '.join(str(some) for some in cohorts)}"
        whole.add(
            fixture, f"FedDC, alpha {alpha}, {said}", flat(answer[1][0]), {"feddc": {"alpha": alpha}}, cohorts=cohorts
        )
    fixture.write()


def feddecorr() -> None:
    """Their loss."""
    (loss,) = modules("bytedance/FedDecorr", "973e4af", ".", "loss")
    fixture = Fixture("feddecorr_authors", "FedDecorr's authors", of="git 973e4af", source="run of their loss")
    for seed, (count, width) in enumerate(((16, 4), (9, 7), (64, 12), (5, 8), (2, 3), (32, 2))):
        features = torch.tensor(numbers(1000 + seed, count, width, scale=1.0 + seed))
        value = loss.FedDecorrLoss()(features)
        said = f"{count} samples, {width} features"
        fixture.add("losses", said, "decorrelation", value, features=features, form="off-diagonal", relative=1e-5)
    fixture.write()


def fpl() -> None:
    """Their clusters and contrast."""
    base, parser, bar = (ModuleType(name) for name in ("federated_model", "args", "tqdm"))
    base.FederatedModel, parser.ArgumentParser, bar.tqdm = object, object, iter  # type: ignore[attr-defined]
    package = ModuleType("models")  # the repository's imports all methods
    package.__path__ = [str(CHECKOUTS / "RethinkFL" / "models")]
    instead = {
        "models": package,
        "models.utils": ModuleType("models.utils"),
        "models.utils.federated_model": base,
        "utils.args": parser,
        "tqdm": bar,
    }
    clusters, theirs = modules("WenkeHuang/RethinkFL", "74201b3", ".", "utils.finch", "models.fpl", instead=instead)
    fixture = Fixture("fpl_authors", "FPL's authors (RethinkFL)", of="git 74201b3", source="run of their code")
    for seed in range(6):
        points = numbers(1020 + seed, 12 + 4 * seed, 5)
        groups, *_ = clusters.FINCH(points, verbose=False, ensure_early_exit=False)

        def listed(groups: Any) -> list[list[int]]:
            return sorted([int(one) for one in np.flatnonzero(groups == group)] for group in set(groups.tolist()))

        for place, call in ((0, "first_groups"), (-1, "last_groups")):
            value = [0] * len(points)
            for number, group in enumerate(listed(groups[:, place])):
                for one in group:
                    value[one] = number
            said = f"FINCH's {'first' if place == 0 else 'last'} partition of {len(points)} points"
            fixture.add("FPL", said, call, value, points=points)
    for seed, temperature in enumerate((0.02, 0.5, 1.0)):
        model = SimpleNamespace(device="cpu", infoNCET=temperature)
        features = torch.tensor(numbers(1040 + seed, 8, 5)).float()
        prototypes, classes = torch.tensor(numbers(1050 + seed, 7, 5)).float(), [0, 0, 1, 1, 1, 2, 3]
        y = labels_of(seed, 8, 4)
        known = torch.tensor(classes)
        losses = [
            theirs.FPL.calculate_infonce(model, z.unsqueeze(0), prototypes[known == one], prototypes[known != one])
            for z, one in zip(features, y, strict=True)
        ]
        fixture.add(
            "FPL", f"contrast with clusters, tau {temperature}", "cluster_contrast", torch.stack(losses).mean(),
            features=features, labels=y, clusters=prototypes, classes=classes, temperature=temperature,
            tolerance=2e-6, relative=1e-5,
        )  # fmt: skip
    fixture.write()


def fedtgp() -> None:
    """The server of the authors' library."""
    items: dict[str, Any] = {}
    client = ModuleType("flcore.clients.clienttgp")
    client.clientTGP = object  # type: ignore[attr-defined]
    (server,) = modules(
        "TsingZ0/HtFLlib", "e959261", "system", "flcore.servers.servertgp", without=("h5py", "ujson"),
        instead={
            "flcore.clients.clienttgp": client,
            "flcore.servers.serverbase": SimpleNamespace(Server=object),
            "flcore.clients.clientbase": SimpleNamespace(load_item=None, save_item=None),
        },
    )  # fmt: skip
    fixture = Fixture("fedtgp_authors", "FedTGP's authors (HtFLlib)", of="git e959261", source="run of their server")
    for seed, threshold in enumerate((100.0, 0.5, 2.0)):
        classes, width = 4, 5
        protos = [
            {c: torch.tensor(row).float() for c, row in enumerate(numbers(1060 + 3 * seed + k, 4, 5))} for k in range(3)
        ]
        clients = [SimpleNamespace(id=k, role=f"client{k}", save_folder_name="") for k in range(3)]
        torch.manual_seed(seed)
        start = server.Trainable_Global_Prototypes(classes, width, width, "cpu")
        items = {f"client{k} protos": own for k, own in enumerate(protos)} | {"Server TGP": start}
        server.load_item = lambda role, name, _, items=items: items[f"{role} {name}"]
        server.save_item = lambda item, role, name, _, items=items: items.update({f"{role} {name}": item})
        made = SimpleNamespace(
            selected_clients=clients, num_classes=classes, device="cpu", role="Server", save_folder_name="",
            server_learning_rate=0.1, server_epochs=1, batch_size=100, margin_threthold=threshold,
            CEloss=MagicMock(wraps=nn.CrossEntropyLoss()),
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            server.FedTGP.receive_protos(made)
        means = torch.stack([torch.stack([own[c] for own in protos]).mean(dim=0) for c in range(classes)])
        given = {"means": means, "known": [True] * classes, "threshold": threshold}
        margin = min(float(made.max_gap), threshold)
        fixture.add("FedTGP", f"margin, threshold {threshold}", "tgp_margin", margin, **given)
        sent = torch.stack([proto for proto, _ in made.uploaded_protos])
        y = [int(one) for _, one in made.uploaded_protos]
        parameters = {
            "embedding": start.embedings.weight, "hidden.weight": start.middle[0][0].weight,
            "hidden.bias": start.middle[0][0].bias, "output.weight": start.fc.weight, "output.bias": start.fc.bias,
        }  # fmt: skip
        parameters = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        prototypes = start(list(range(classes))).detach()
        made.server_epochs = 4
        with contextlib.redirect_stdout(io.StringIO()):
            server.FedTGP.update_TGP(made)
        first = made.CEloss.call_args_list[0]
        value = nn.functional.cross_entropy(*first.args)
        fixture.add(
            "FedTGP", f"contrast, margin {margin:.3g}", "tgp_loss", value, sent=sent, labels=y, prototypes=prototypes,
            margin=margin, tolerance=2e-6, relative=1e-5,
        )  # fmt: skip
        after = start(list(range(classes)))
        fixture.add(
            "FedTGP", f"prototypes after 4 epochs, margin {margin:.3g}", "tgp_trained", after.detach(), sent=sent,
            labels=y, parameters=parameters, margin=margin, epochs=4, lr=0.1, tolerance=2e-6, relative=1e-5,
        )  # fmt: skip
    fixture.write()


def fedgen() -> None:
    """Their generator, its diversity and the clients' weights."""
    (theirs,) = modules("zhuangdizhu/FedGen", "dd5807c", ".", "FLAlgorithms.trainmodel.generator")
    fixture = Fixture(
        "fedgen_authors", "FedGen's authors", of="git dd5807c", source="run of their generator and losses"
    )
    for seed, (count, noise, width) in enumerate(((6, 4, 5), (16, 8, 3), (32, 2, 9))):
        eps, rows = numbers(1080 + seed, count, noise), numbers(1090 + seed, count, width)
        value = theirs.DiversityLoss(metric="l1")(torch.tensor(eps), torch.tensor(rows))
        fixture.add("FedGen", f"diversity of {count} features", "generated_diversity", value, noise=eps, features=rows)
    for seed, train in ((0, True), (1, False)):
        theirs.GENERATORCONFIGS = {"ours": (6, 5, 1, 3, 4)}
        torch.manual_seed(seed)
        with contextlib.redirect_stdout(io.StringIO()):
            made = theirs.Generator(dataset="ours").train(train)
        linear, norm = made.fc_layers[0], made.fc_layers[1]
        norm.running_mean.copy_(torch.tensor(numbers(1100, 6)))
        norm.running_var.copy_(torch.tensor(np.abs(numbers(1101, 6)) + 0.5))
        tensors = {
            "hidden.weight": linear.weight, "hidden.bias": linear.bias, "norm.weight": norm.weight,
            "norm.bias": norm.bias, "out.weight": made.representation_layer.weight,
            "out.bias": made.representation_layer.bias, "norm.mean": norm.running_mean,
            "norm.variance": norm.running_var,
        }  # fmt: skip
        tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        y = labels_of(seed, 9, 3)
        answer = made(y)
        said = "in training" if train else "on a client"
        fixture.add(
            "FedGen", f"generated features, {said}", "generated", answer["output"].detach(), generator=tensors,
            noise=answer["eps"], labels=y, train=train, tolerance=2e-6,
        )  # fmt: skip
    fixture.write()
