"""Opacus' accountants, its clipping and its noise, and whole runs in which it trains the clients."""

from __future__ import annotations

import warnings

import torch
import whole
from cases import Fixture, numbers
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier

warnings.simplefilter("ignore")
C = Fixture("opacus", "Opacus", "opacus", source="run of the library's accountants")
C.difference(
    "fractional orders",
    "decision",
    "Opacus sums a series at fractional orders; dp-accounting 0.6.0, which fedcore's accountant rdp uses, "
    "over-estimates the divergence there, or leaves the order out. Both are valid bounds.",
    follows="Opacus (closer to Mironov et al.'s series); fedcore's default accountant pld is not touched",
    where="opacus/accountants/analysis/rdp.py",
    option="none; dp.accountant=pld, the default, is not touched",
)


def spent(accountant: object, noise: float, rate: float, steps: int, delta: float, **options: float) -> float:
    """Return what an accountant says after so many steps."""
    accountant.history = [(noise, rate, steps)]
    return float(accountant.get_epsilon(delta=delta, **options))


for noise, rate, steps, delta in (
    (1.5, 0.04, 2250, 1e-5),
    (0.7, 0.05, 200, 1e-5),
    (4.0, 0.01, 10000, 1e-5),
    (2.0, 0.1, 500, 1e-6),
    (1.1, 0.02, 500, 1e-6),
):
    said = f"z {noise}, q {rate}, {steps} steps, delta {delta}"
    inputs = {"noise": noise, "rate": rate, "rounds": steps, "delta": delta}
    value = spent(RDPAccountant(), noise=noise, rate=rate, steps=steps, delta=delta)
    differs = "fractional orders" if noise in (0.7, 1.5, 2.0) else ""  # the best order is a fraction there
    C.add(
        "RDP epsilon",
        f"RDPAccountant: {said}",
        "epsilon",
        value,
        accountant="rdp",
        tolerance=1e-6,
        relative=1e-5,
        differs=differs,
        **inputs,
    )
    value = spent(PRVAccountant(), noise, rate, steps, delta, eps_error=0.005)
    C.add("PLD epsilon", f"PRVAccountant: {said}", "epsilon", value, accountant="pld", tolerance=0.02, **inputs)
for target, steps, kind in ((8.0, 2250, "rdp"), (8.0, 2000, "rdp"), (8.0, 2250, "prv"), (8.0, 2000, "prv")):
    noise = get_noise_multiplier(
        target_epsilon=target, target_delta=1e-5, sample_rate=0.04, steps=steps, accountant=kind
    )
    mine = "pld" if kind == "prv" else "rdp"
    C.add(
        f"{mine.upper()} epsilon",
        f"get_noise_multiplier of epsilon 8, {steps} steps, {kind}",
        "epsilon",
        target,
        noise=float(noise),
        rate=0.04,
        rounds=steps,
        delta=1e-5,
        accountant=mine,
        tolerance=0.03,
    )
rows = numbers(1, 6, 8)
for bound in (0.5, 2.0, 100.0):
    norms = torch.tensor(rows).norm(dim=1)
    factors = (bound / (norms + 1e-6)).clamp(max=1.0)  # the line of its DPOptimizer.clip_and_accumulate
    C.add(
        "DP clipping",
        f"per-sample gradients clipped to {bound:g}",
        "norm_clipping",
        torch.tensor(rows) * factors[:, None],
        rows=rows,
        bound=bound,
        tolerance=1e-5,
        source="the line of its optimizer",
    )
C.add(
    "DP noise",
    "z 1.1, C 2, lot 8",
    "noise_of_mean",
    1.1 * 2.0 / 8,
    multiplier=1.1,
    bound=2.0,
    clients=8.0,
    source="the line of its optimizer",
)

for bound in (0.1, 0.5, 100.0):
    received = whole.model()
    for cohort in whole.COHORTS:
        states, total = [], sum(len(whole.parts[client]) for client in cohort)
        for client in cohort:
            own, data = whole.model(), torch.utils.data.TensorDataset(*whole.samples(client))
            own.load_state_dict(received.state_dict())
            module, sgd, loader = PrivacyEngine().make_private(
                module=own,
                optimizer=torch.optim.SGD(own.parameters(), lr=whole.LR),
                data_loader=torch.utils.data.DataLoader(data, batch_size=len(data)),
                noise_multiplier=0.0,
                max_grad_norm=bound,
                poisson_sampling=False,
            )
            for x, y in [batch for _ in range(whole.EPOCHS) for batch in loader]:
                sgd.zero_grad()
                torch.nn.functional.cross_entropy(module(x), y).backward()
                sgd.step()
            states.append({key: len(data) / total * value for key, value in module._module.state_dict().items()})
        received.load_state_dict({key: sum(state[key] for state in states) for key in states[0]})
    plugins = {"dp-sgd": {"noise_multiplier": 0.0, "clip": bound}}
    whole.add(C, f"DP-SGD without noise, C {bound}, by the mean of samples", whole.final(received), plugins)
C.write()
