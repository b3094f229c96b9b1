"""declearn's optimizer modules on vectors."""

from __future__ import annotations

import warnings

import numpy as np
from cases import Fixture, numbers
from declearn.model.sklearn import NumpyVector
from declearn.optimizer.modules import (
    AdaGradModule,
    AdamModule,
    EWMAModule,
    MomentumModule,
    ScaffoldClientModule,
    ScaffoldServerModule,
    YogiModule,
)

warnings.simplefilter("ignore")
C = Fixture("declearn", "declearn", "declearn", source="run of the library's modules on these vectors")
moves = numbers(0, 4, 5)


def run(module: object) -> np.ndarray:
    """Return what a module makes of each vector in turn."""
    return np.array([module.run(NumpyVector({"w": move})).coefs["w"] for move in moves])


for said, module, variant in (
    ("momentum", MomentumModule(0.9), "heavy-ball"),
    ("Nesterov", MomentumModule(0.9, nesterov=True), "nesterov"),
    ("EWMA", EWMAModule(0.9), "ema"),
):
    C.add(
        "FedAvgM",
        f"{said} .9, 4 steps",
        "momentum_steps",
        run(module),
        variant=variant,
        beta=0.9,
        moves=moves,
        tolerance=1e-12,
    )
for kind, module in (
    ("adagrad", AdaGradModule(1e-7)),
    ("adam", AdamModule(0.9, 0.99)),
    ("yogi", YogiModule(0.9, 0.99)),
):
    C.add(
        "FedOpt",
        f"{kind} from v 0{'' if kind == 'adagrad' else ', with the correction of its bias'}",
        "adaptive_steps",
        run(module),
        kind=kind,
        moves=moves,
        tau=1e-7,
        tolerance=1e-9,
    )

# SCAFFOLD: the mean gradient of the local steps is Option II without momentum
client, server, start, lr = ScaffoldClientModule(), ScaffoldServerModule(), np.zeros(5), 0.1
client.process_aux_var(server.collect_aux_var())
trained = start.copy()
for move in moves:
    trained = trained - lr * client.run(NumpyVector({"w": move})).coefs["w"]
sent = client.collect_aux_var()
first = sent.delta.coefs["w"]
zero = np.zeros(5)
C.add(
    "SCAFFOLD",
    "the first round's c_i",
    "scaffold_local",
    [trained, first],
    start=start,
    gradients=moves,
    lr=lr,
    control=zero,
    own=zero,
    tolerance=1e-12,
)
server.process_aux_var(sent)
server.clients.add("other")
client.process_aux_var(server.collect_aux_var())
trained, again = start.copy(), np.round(moves[::-1] * 2, 3)
for move in again:
    trained = trained - lr * client.run(NumpyVector({"w": move})).coefs["w"]
change = client.collect_aux_var().delta.coefs["w"]
C.add(
    "SCAFFOLD",
    "the second round's change of c_i, c = c_i / 2",
    "scaffold_local",
    [trained, change],
    start=start,
    gradients=again,
    lr=lr,
    control=first / 2,
    own=first,
    tolerance=1e-9,
)
C.write()
