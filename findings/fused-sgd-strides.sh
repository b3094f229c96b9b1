#!/usr/bin/env bash
# Fused SGD pairs the numbers of a parameter with gradients of others if their strides differ.
#
# Seen with torch 2.13.0 on a CPU. One would guess: an optimizer that takes a parameter and its gradient, both (3, 2),
# adds number by number, or refuses them. fused=True goes through the memory of both in order and looks at no strides.
# A parameter that is a part of a larger tensor, such as nn.Parameter(table[:, :2]), gets a contiguous gradient from
# autograd, so each of its rows but the first is wrong, as are numbers of the table beside it. Nothing warns. Without
# fused the step is right.
#
# Output seen:
#   fused=False: the parameter loses [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], the rest of its table 0.0
#   fused=True: the parameter loses [[0.0, 1.0], [4.0, 5.0], [0.0, 0.0]], the rest of its table 5.0
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import torch
from torch import nn


def lost(fused):
    table = torch.zeros(3, 4)
    weight = nn.Parameter(table[:, :2])
    (weight * torch.arange(6.0).view(3, 2)).sum().backward()
    torch.optim.SGD([weight], lr=1.0, fused=fused).step()
    rest = 0 - float(table[:, 2:].sum())
    print(f"fused={fused}: the parameter loses {(0 - weight).tolist()}, the rest of its table {rest}")
    return (0 - weight).tolist()


right = lost(fused=False)
assert right == torch.arange(6.0).view(3, 2).tolist()
if lost(fused=True) == right:
    raise SystemExit("fused SGD takes strides into account: the behaviour has changed")
PY
