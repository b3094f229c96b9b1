"""FEDn's server optimizers over five rounds."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from cases import Fixture, numbers
from fedn.network.combiner.aggregators.fedopt import Aggregator
from fedn.utils.helpers.plugins.numpyhelper import Helper

C = Fixture("fedn", "FEDn", "fedn", source="run of the library's aggregator on these pseudo-gradients")
helper = Helper()
for kind in ("adam", "yogi", "adagrad"):
    for seed in range(2):
        for tau, lr in ((1e-3, 0.1), (0.1, 0.5)):
            moves, start = numbers(10 * seed, 5, 4), numbers(10 * seed + 1, 4)
            state, model, models = SimpleNamespace(v=None, m=None), [start.copy()], []
            parameters = {"beta1": 0.9, "beta2": 0.99, "learning_rate": lr, "tau": tau}
            for move in moves:  # FEDn's pseudo-gradient leads towards the clients
                model = getattr(Aggregator, f"serveropt_{kind}")(state, helper, [-move], model, parameters)
                models.append(np.array(model[0]))
            options = {"lr": lr, "tau": tau, "beta1": 0.9, **({} if kind == "adagrad" else {"beta2": 0.99})}
            C.add(
                "FedOpt",
                f"{kind}, 5 rounds, tau {tau}, rate {lr}, seed {seed}",
                "server_moves",
                models,
                plugin=f"fed{kind}",
                options=options,
                start=start,
                gradients=moves,
                tolerance=1e-9,
            )
C.write()
