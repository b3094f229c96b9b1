#!/usr/bin/env bash
# torch.nn.functional.linear_cross_entropy in chunks has no gradient under torch.func.vmap.
#
# Seen with torch 2.13.0, in which the function is new. One would guess that vmap gives each client the gradient that it has
# alone, as without chunks, or refuses. The loss is right, and no gradient goes to the weights. Nothing is said: next to a
# second loss, such as a proximal term, the step goes on without the first.
#
# Output seen:
#   alone, whole: norm of the gradient 0.92
#   alone, in chunks: norm of the gradient 0.92
#   as one, whole: norm of the gradient 0.92
#   as one, in chunks: norm of the gradient none
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

torch.manual_seed(0)
features, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
weight = torch.randn(3, 4)


def loss(own, options):
    return F.linear_cross_entropy(features, own, labels, options=options)


def norm(name, clients, options):
    weights = weight.expand(clients, 3, 4).clone().requires_grad_()
    losses = vmap(lambda own: loss(own, options))(weights) if clients > 1 else loss(weights[0], options)
    (gradient,) = torch.autograd.grad(losses.sum(), weights, allow_unused=True)
    found = "none" if gradient is None else f"{gradient[0].norm().item():.2f}"
    print(f"{name}: norm of the gradient {found}")
    return found


chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
alone = norm("alone, whole", 1, None)
assert norm("alone, in chunks", 1, chunks) == norm("as one, whole", 3, None) == alone
if norm("as one, in chunks", 3, chunks) == alone:
    raise SystemExit("the gradient is there: the behaviour has changed")
PY
