#!/usr/bin/env bash
# A model whose hooks change gradients trains without these hooks when torch.func.vmap trains several clients as one.
#
# Seen with torch 2.13.0. One would guess: functional_call under vmap is the model that it is alone, with its hooks, or it
# refuses what it cannot do. It is not so. Inside of vmap no tensor says that it requires a gradient, also where the
# weights outside of it do. A module's full backward hook, and the usual `if output.requires_grad: output.register_hook`,
# then register nothing. Nothing is said, and the clients have the gradients of a model without hooks.
#
# Output seen:
#   one client after the other: 4 calls of hooks, gradient of the first layer 0
#   under vmap: 0 calls of hooks, gradient of the first layer not 0, output.requires_grad False
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import torch
from torch import nn
from torch.func import functional_call, vmap

network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
calls, required = [], []


def stop(module, of_inputs, of_outputs):
    calls.append("module")
    return (torch.zeros_like(of_inputs[0]),)


def watch(module, inputs, output):
    required.append(output.requires_grad)
    if output.requires_grad:
        output.register_hook(lambda gradient: calls.append("output"))


network[1].register_full_backward_hook(stop)
network[0].register_forward_hook(watch)
weights = {name: torch.stack([p.detach()] * 2) for name, p in network.named_parameters()}  # of 2 clients
rows = torch.randn(2, 6, 5)


def loss(own, x):
    return functional_call(network, own, (x,)).square().sum()


def trained(name, objectives):
    calls.clear()
    required.clear()
    leaves = {key: weight.clone().requires_grad_() for key, weight in weights.items()}
    sum(objectives(leaves)).backward()
    is_zero = not leaves["0.weight"].grad.any()
    says = "" if all(required) else f", output.requires_grad {required[0]}"
    print(f"{name}: {len(calls)} calls of hooks, gradient of the first layer {'0' if is_zero else 'not 0'}{says}")
    return len(calls), is_zero


alone = trained(
    "one client after the other",
    lambda leaves: [loss({key: own[k] for key, own in leaves.items()}, rows[k]) for k in range(2)],
)
assert alone == (4, True)
if trained("under vmap", lambda leaves: vmap(loss)(leaves, rows)) != (0, False):
    raise SystemExit("hooks run under vmap: the behaviour has changed")
PY
