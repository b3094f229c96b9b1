"""FedML's defences, its FedAvg and its FedNova."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cases import Fixture, numbers, spread
from fedml.core.security.common.bucket import Bucket
from fedml.core.security.defense.bulyan_defense import BulyanDefense
from fedml.core.security.defense.cclip_defense import CClipDefense
from fedml.core.security.defense.coordinate_wise_median_defense import CoordinateWiseMedianDefense
from fedml.core.security.defense.coordinate_wise_trimmed_mean_defense import CoordinateWiseTrimmedMeanDefense
from fedml.core.security.defense.krum_defense import KrumDefense
from fedml.core.security.defense.norm_diff_clipping_defense import NormDiffClippingDefense
from fedml.core.security.defense.RFA_defense import RFADefense
from fedml.ml.aggregator.agg_operator import FedMLAggOperator
from fedml.simulation.sp.fednova.fednova import FedNova
from fedml.simulation.sp.fednova.fednova_trainer import FedNovaTrainer

warnings.simplefilter("ignore")
C = Fixture("fedml", "FedML", "fedml", source="run of the library's defences and optimizers on these inputs")
D = "fedml/core/security/defense"
C.difference(
    "lower middle value",
    "decision",
    "Of an even number of clients FedML takes torch.median, the lower of the two middle values, fedcore their mean, as "
    "NumPy.",
    follows="convention",
    where=f"{D}/coordinate_wise_median_defense.py",
)
C.difference(
    "plain distances to n less f",
    "library",
    "FedML's Bulyan adds up the n - f least plain distances, the paper the n - f - 2 least squared ones, so other "
    "clients are chosen.",
    follows="fedcore (El Mhamdi et al., Section 4, with Krum of Blanchard et al.)",
    where=f"{D}/bulyan_defense.py: BulyanDefense._bulyan",
)
C.difference(
    "one value less",
    "library",
    "FedML averages theta - 2f - 1 values around the median, the paper theta - 2f.",
    follows="fedcore (El Mhamdi et al., Section 4)",
    where=f"{D}/bulyan_defense.py: BulyanDefense._bulyan",
)
C.difference(
    "weights in a set",
    "library",
    "FedML keeps the clients' weights in a set: clients of equal sizes become one weight, and one client is left.",
    follows="fedcore (Pillutla et al., Algorithm 2)",
    where=f"{D}/RFA_defense.py",
)
C.difference(
    "trimmed by samples",
    "library",
    "FedML's coordinate-wise trimmed mean leaves out the clients with the fewest and the most samples, not the least "
    "and largest values of each coordinate.",
    follows="fedcore (Yin et al., Definition 2)",
    where=f"{D}/coordinate_wise_trimmed_mean_defense.py",
)
C.difference(
    "recursion of a_i",
    "decision",
    "With momentum and a proximal term together the authors' code, which FedML has, mixes two recursions for |a_i|; "
    "fedcore sums the impulse response. Impulses sent through FedML's own optimizer measure fedcore's value.",
    follows="fedcore (Wang et al., Section 4: a_i are the weights of the gradients)",
    where="fedml/simulation/sp/fednova/fednova.py: FedNova.step",
)

base, bias = [[0.1, 0.2, 0.2, 0.1], [0.15, 0.12, 0.02, 0.2], [0.3, 0.01, 0.21, 0.11]], [0.01, 0.19, 0.21]
fake = [(20 + i, {"w": (i + 1) * torch.tensor(base), "b": (i + 1) * torch.tensor(bias)}) for i in range(20)]
rows = np.round(np.array([[*np.array(base).ravel(), *bias]]) * np.arange(1, 21)[:, None], 4)
for keep in (1, 2):
    kept = KrumDefense(SimpleNamespace(byzantine_client_num=1, krum_param_m=keep)).defend_before_aggregation(
        copy.deepcopy(fake)
    )
    apart = ((rows[:, None] - rows) ** 2).sum(2)
    scores = np.sort(apart, axis=1)[:, 1:18].sum(1)
    chosen = [round(float(model["b"][0]) / bias[0]) - 1 for _, model in kept]
    C.add(
        "Krum",
        f"its test's 20 models, keeps {keep}: scores of the chosen",
        "krum_best_scores",
        scores[chosen],
        rows=rows,
        attackers=1,
        keep=keep,
        tolerance=1e-5,
    )
n, f = 12, 2
for seed in range(3):
    rows = spread(600 + seed, n, 10, hostile=f, shift=3.0)
    given, said, exact = torch.tensor(rows), f"12 clients, f 2, seed {seed}", {"rows": rows, "tolerance": 1e-9}
    models = [(10 + i, {"w": given[i].clone()}) for i in range(n)]
    equal = [(1, {"w": row.clone()}) for row in given]
    for keep in (1, 3):
        kept = KrumDefense(SimpleNamespace(byzantine_client_num=f, krum_param_m=keep)).defend_before_aggregation(
            copy.deepcopy(models)
        )
        C.add(
            "Krum",
            f"{said}: keeps {keep}",
            "krum",
            torch.stack([model["w"] for _, model in kept]).mean(0),
            attackers=f,
            keep=keep,
            **exact,
        )
    value = CoordinateWiseMedianDefense(None).defend_on_aggregation(copy.deepcopy(models[:11]))["w"]
    C.add("median", f"{said}: 11 of them", "median", value, rows=rows[:11], tolerance=1e-9)
    value = CoordinateWiseMedianDefense(None).defend_on_aggregation(copy.deepcopy(models))["w"]
    C.add("median", said, "median", value, differs="lower middle value", **exact)
    middle = np.round(rows.mean(axis=0), 3)
    kept = NormDiffClippingDefense(SimpleNamespace(norm_bound=2.0)).defend_before_aggregation(
        copy.deepcopy(models), {"w": torch.tensor(middle)}
    )
    C.add(
        "norm clipping",
        f"{said}: bound 2",
        "norm_clipping",
        torch.stack([model["w"] for _, model in kept]),
        bound=2.0,
        centre=middle,
        **exact,
    )
    value = torch.stack([model["w"] for _, model in Bucket.bucketization(equal, 5)])
    C.add("bucketing", f"{said}: size 5 in order", "bucketing", value, order=list(range(n)), size=5, **exact)
    np.random.seed(seed)
    defence = CClipDefense(SimpleNamespace(tau=1.5, bucket_size=1))
    kept = defence.defend_before_aggregation(copy.deepcopy(equal))
    value = defence.defend_after_aggregation({"w": torch.stack([model["w"] for _, model in kept]).mean(0)})["w"]
    np.random.seed(seed)
    centre = rows[np.random.randint(0, n)]
    C.add(
        "centred clipping",
        f"{said}: one step from its drawn centre, tau 1.5",
        "centred_clipping",
        value,
        centre=centre,
        radius=1.5,
        iterations=1,
        rows=rows,
        tolerance=1e-6,
    )
    chosen, _, value = BulyanDefense.__new__(BulyanDefense)._bulyan(rows, n, f)
    left, paper = list(range(n)), []
    for _ in range(n - 2 * f):
        apart = np.sort(((rows[left][:, None] - rows[left]) ** 2).sum(2), axis=1)[:, 1 : 1 + max(1, len(left) - f - 2)]
        paper.append(left.pop(int(apart.sum(1).argmin())))
    differs = "" if sorted(chosen) == sorted(paper) else "plain distances to n less f"
    C.add(
        "Bulyan",
        f"{said}: who is chosen",
        "bulyan_choice",
        sorted(int(one) for one in chosen),
        rows=rows,
        attackers=f,
        differs=differs,
    )
    few = rows[sorted(chosen)]
    C.add(
        "Bulyan",
        f"{said}: mean around the median of FedML's choice",
        "mean_around_median",
        value,
        rows=few,
        count=len(few) - 2 * f,
        differs="one value less",
    )
    C.add(
        "Bulyan",
        f"{said}: the same with its one value less",
        "mean_around_median",
        value,
        rows=few,
        count=len(few) - 2 * f - 1,
        tolerance=1e-9,
    )
    value = FedMLAggOperator.agg(
        SimpleNamespace(federated_optimizer="FedAvg", ml_engine="torch"), copy.deepcopy(models)
    )["w"]
    C.add(
        "weighted mean",
        f"{said}: FedAvg by samples",
        "weighted_mean",
        value,
        models=rows,
        shares=[10 + i for i in range(n)],
    )
    value = RFADefense.__new__(RFADefense).defend_on_aggregation([(10, {"w": row.clone()}) for row in given])["w"]
    C.add(
        "RFA", f"{said}: equal sizes", "geometric_median", value, rows=rows, tolerance=1e-4, differs="weights in a set"
    )
    kept = CoordinateWiseTrimmedMeanDefense(SimpleNamespace(beta=2 / 12 + 1e-9)).defend_before_aggregation(
        copy.deepcopy(models)
    )
    C.add(
        "trimmed mean",
        f"{said}: beta 2/12",
        "trimmed_mean",
        torch.stack([model["w"] for _, model in kept]).mean(0),
        trim=2,
        differs="trimmed by samples",
        **exact,
    )


def local(steps: int, momentum: float, mu: float, gradients: Any) -> tuple[Any, torch.Tensor]:
    """Return FedML's optimizer after these gradients, and the weights."""
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = FedNova([w], ratio=1.0, gmf=0.0, mu=mu, lr=0.1, momentum=momentum)
    for step in range(steps):
        w.grad = torch.tensor(gradients[step], dtype=torch.float64)
        optimizer.step()
    return optimizer, w.detach()


N, gradients = "FedNova", numbers(9, 12, 2)
for steps, momentum, mu in (
    (1, 0.0, 0.0),
    (7, 0.0, 0.0),
    (5, 0.9, 0.0),
    (12, 0.5, 0.0),
    (5, 0.0, 0.5),
    (12, 0.0, 2.0),
    (5, 0.9, 0.5),
    (12, 0.5, 1.0),
):
    value = float(local(steps, momentum, mu, gradients)[0].local_normalizing_vec)
    said, both = f"|a_i|_1 of {steps} steps, momentum {momentum}, mu {mu}, rate .1", momentum > 0 and mu > 0
    inputs = {"steps": steps, "momentum": momentum, "shrinkage": 0.1 * mu, "tolerance": 1e-9}
    C.add(N, said, "fednova_norm", value, differs="recursion of a_i" if both else "", **inputs)
    if both:
        total = 0.0
        for place in range(steps):
            impulse = np.zeros((steps, 2))
            impulse[place] = 1.0
            total += abs(float((local(steps, momentum, mu, impulse)[1][0] - 1.0) / -0.1))
        C.add(N, f"{said}: measured by impulses through its optimizer", "fednova_norm", total, **inputs)
start, sizes = np.array([1.0, -2.0, 0.5, 3.0]), [10, 30, 20]
for number, steps in enumerate(([4, 4, 4], [1, 3, 9])):
    models = np.round(start + numbers(20 + number, 3, 4, scale=0.3), 4)
    trainer = FedNovaTrainer.__new__(FedNovaTrainer)
    trainer.args = SimpleNamespace(gmf=0.0, learning_rate=0.1)
    moves = [{"w": torch.tensor((start - y) * size / 60 / count)} for y, size, count in zip(models, sizes, steps)]
    value = trainer.aggregate(
        {"w": torch.tensor(start)}, moves, [count * size / 60 for count, size in zip(steps, sizes)]
    )["w"]
    C.add(
        N,
        f"server step, steps {steps}, sizes {sizes}",
        "fednova_round",
        value,
        start=start,
        models=models,
        steps=steps,
        samples=sizes,
        tolerance=1e-9,
    )
C.write()
