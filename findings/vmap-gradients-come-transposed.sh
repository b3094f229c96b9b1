#!/usr/bin/env bash
# Clients that train as one under torch.func.vmap get the gradients of their linear layers transposed, and then copied.
#
# Seen with torch 2.13.0. One would guess: vmap turns the products of K clients into batched ones, and a gradient has the
# memory format of its weight, as it has without vmap. It is not so. Without vmap autograd looks at the strides of a
# weight's transpose and multiplies such that the gradient fits. The batched product's rule does not: gradients
# (K, out, in) are views of (K, in, out). backward() copies each into the weight's format, which takes as long as a
# product of a small batch. Written as (weight @ rows.mT).mT, the same layer has gradients that fit.
#
# Output seen:
#   without vmap: strides (5, 1), fits
#   linear under vmap: strides (15, 1, 3), does not fit
#   .grad after backward: strides (15, 5, 1), fits
#   (weight @ rows.mT).mT under vmap: strides (15, 5, 1), fits
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import torch
from torch.func import vmap
from torch.nn import functional as F

weights = torch.randn(4, 3, 5, requires_grad=True)  # of 4 clients
rows = torch.randn(4, 6, 5)


def fits(name, gradient):
    print(f"{name}: strides {gradient.stride()}, {'fits' if gradient.is_contiguous() else 'does not fit'}")
    return gradient.is_contiguous()


def linear(weight, x):
    return F.linear(x, weight)


def turned(weight, x):
    return (weight @ x.mT).mT


def gradient_of(layer):
    return torch.autograd.grad(vmap(layer)(weights, rows).square().sum(), weights)[0]


alone = weights[0].detach().requires_grad_()
assert fits("without vmap", torch.autograd.grad(linear(alone, rows[0]).square().sum(), alone)[0])
changed = fits("linear under vmap", gradient_of(linear))
vmap(linear)(weights, rows).square().sum().backward()
assert fits(".grad after backward", weights.grad)
assert fits("(weight @ rows.mT).mT under vmap", gradient_of(turned))
torch.testing.assert_close(gradient_of(linear), gradient_of(turned))
if changed:
    raise SystemExit("gradients under vmap fit: the behaviour has changed")
PY
