#!/usr/bin/env bash
# torch.autocast trains with the first weights of a run where another autocast, also a disabled one, is around the loop.
#
# Seen with torch 2.13.0. A federated framework trains clients in bf16, each step in an autocast of its own, and puts
# autocast(enabled=False) around the rounds, so that what the calling program has set has no effect. One would guess that
# a disabled autocast changes nothing in the ones within it. torch keeps the bf16 copies of the weights until the outermost
# autocast ends, disabled or not: each step computes with the copies from the first step, the optimizer moves weights that
# no forward pass reads again, and no error or warning tells. cache_enabled=False on either context helps.
#
# Output seen (accuracy after 60 steps):
#   each step's autocast alone: 0.98
#   within autocast(enabled=False): 0.70
#   within autocast(enabled=False, cache_enabled=False): 0.98
#   distinct losses of the 60 steps, alone and within: 60 1
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import functools
from contextlib import nullcontext

import torch
from torch import nn

torch.manual_seed(0)
y = torch.arange(64) % 2
x = torch.randn(64, 8) + 2.0 * y.unsqueeze(1)


def trained(around):
    torch.manual_seed(1)
    network, losses = nn.Linear(8, 2), []
    with torch.no_grad():  # a network that is wrong at first: all weights of the first class point at the second
        network.weight.copy_(torch.stack([torch.ones(8), -torch.ones(8)]) * 0.01)
        network.bias.copy_(torch.tensor([1.0, -1.0]))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    with around():
        for _ in range(60):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = network(x)
            loss = nn.functional.cross_entropy(logits.float(), y)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return (network(x).argmax(dim=1) == y).float().mean().item(), len(set(losses))


disabled = functools.partial(torch.autocast, "cpu", enabled=False)
alone, within, without_cache = trained(nullcontext), trained(disabled), trained(lambda: disabled(cache_enabled=False))
print(f"each step's autocast alone: {alone[0]:.2f}")
print(f"within autocast(enabled=False): {within[0]:.2f}")
print(f"within autocast(enabled=False, cache_enabled=False): {without_cache[0]:.2f}")
print(f"distinct losses of the 60 steps, alone and within: {alone[1]} {within[1]}")
assert alone[0] > 0.9 < without_cache[0], (alone, without_cache)
assert within[1] == 1 < alone[1], (alone, within)
PY
