#!/usr/bin/env bash
# Clients that train as one under torch.func.vmap get gradients that are too large through torch.select_scatter.
#
# Seen with torch 2.13.0. torch.select_scatter(x, part, dim, index) is x with one slice replaced. One would guess that the
# gradient of the part is that of the slice, under vmap as without. With x and part of each client it is n times as large,
# where n is the length of the dimension. The values are right, so a loss looks as it should at first. That of a model of
# ten classes grew from 15 to 50,000 in a round. Nothing is said.
#
# Output seen:
#   alone: gradients of the parts [[0.0, 0.0], [10.0, 10.0], [20.0, 20.0]]
#   as one: gradients of the parts [[0.0, 0.0], [40.0, 40.0], [80.0, 80.0]]
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import torch
from torch.func import vmap

tables = torch.zeros(3, 2, 4)  # of 3 clients
parts = torch.zeros(3, 2, requires_grad=True)
factors = torch.arange(3.0).view(3, 1, 1) * 10 + torch.arange(4.0) - 2  # of column 2: 0, 10 and 20


def with_part(table, part):
    return torch.select_scatter(table, part, 1, 2)


def gradients(name, outputs):
    (found,) = torch.autograd.grad((outputs * factors).sum(), parts)
    print(f"{name}: gradients of the parts {found.tolist()}")
    return found


alone = gradients("alone", torch.stack([with_part(table, part) for table, part in zip(tables, parts)]))
together = gradients("as one", vmap(with_part)(tables, parts))
if torch.equal(alone, together):
    raise SystemExit("the gradients are the same: the behaviour has changed")
PY
