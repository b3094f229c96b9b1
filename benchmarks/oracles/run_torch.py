"""torch's own SGD as the server's optimizer of FedAvgM: heavy ball and Nesterov, as FL-bench has it."""

from __future__ import annotations

import torch
from cases import Fixture, numbers

C = Fixture(
    "torch", "torch's SGD (FL-bench's server)", "torch", source="run of torch.optim.SGD on these pseudo-gradients"
)
start, gradients = [1.0, -2.0, 0.5, 3.0], numbers(0, 5, 4)
for beta in (0.5, 0.9):
    for nesterov in (False, True):
        w = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
        optimizer, models = torch.optim.SGD([w], lr=0.7, momentum=beta, nesterov=nesterov), []
        for gradient in gradients:
            w.grad = torch.tensor(gradient)
            optimizer.step()
            models.append(w.detach().clone())
        options = {"beta": beta, "lr": 0.7, "variant": "nesterov" if nesterov else "heavy-ball"}
        said = f"5 rounds, momentum {beta}{', Nesterov' if nesterov else ''}"
        C.add(
            "FedAvgM",
            said,
            "server_moves",
            torch.stack(models),
            plugin="fedavgm",
            options=options,
            start=start,
            gradients=gradients,
            tolerance=1e-12,
        )
for momentum in (0.0, 0.5, 0.9):
    for steps in (1, 5, 12):
        w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        optimizer = torch.optim.SGD([w], lr=1.0, momentum=momentum)
        for _ in range(steps):
            w.grad = torch.ones((), dtype=torch.float64)
            optimizer.step()
        C.add(
            "FedNova",
            f"how far {steps} steps lead, momentum {momentum}",
            "fednova_norm",
            -w.detach(),
            steps=steps,
            momentum=momentum,
            tolerance=1e-12,
        )
C.write()
