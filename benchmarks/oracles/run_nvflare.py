"""NVIDIA FLARE's weighted mean and its helper for SCAFFOLD."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from cases import Fixture, numbers
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
from nvflare.app_opt.pt.scaffold import PTScaffoldHelper

warnings.simplefilter("ignore")
C = Fixture("nvflare", "NVIDIA FLARE", "nvflare", source="run of the library's helpers on these inputs")
rows = np.array([[2.0, 3.0, 1.1, 0.1], [1.0, 1.0, 2.1, 0.5]])
for shares in ([0.5, 1.0], [2.0, 4.0], [1.0, 3.0]):
    helper = WeightedAggregationHelper()
    for name, row, share in zip("ab", rows, shares):
        helper.add({"v": row}, share, name, 0)
    C.add(
        "weighted mean",
        f"test_aggregate, {shares[0]:g}:{shares[1]:g}",
        "weighted_mean",
        helper.get_result()["v"],
        models=rows,
        shares=shares,
    )

model, start, lr = torch.nn.Linear(3, 2, bias=False).double(), numbers(1, 2, 3), 0.1
with torch.no_grad():
    model.weight.copy_(torch.tensor(start))
before = torch.nn.Linear(3, 2, bias=False).double()
before.load_state_dict(model.state_dict())
control, own, gradients = numbers(2, 2, 3), numbers(3, 2, 3), numbers(4, 4, 2, 3)
helper = PTScaffoldHelper()
helper.init(model)
helper.load_global_controls({"weight": torch.tensor(control)})
helper.c_local.load_state_dict({"weight": torch.tensor(own)})
of_all, of_one = helper.get_params()
for gradient in gradients:
    with torch.no_grad():
        model.weight.add_(torch.tensor(gradient), alpha=-lr)
    helper.model_update(model, lr, of_all, of_one)
helper.terms_update(model, lr, of_all, of_one, before)
change = helper.get_delta_controls()["weight"]
inputs = {"start": start, "lr": lr, "control": control, "own": own}
C.add(
    "SCAFFOLD",
    "4 local steps and the change of c_i",
    "scaffold_local",
    torch.stack([model.weight, torch.as_tensor(change)]),
    gradients=gradients,
    tolerance=1e-9,
    **inputs,
)
C.write()
