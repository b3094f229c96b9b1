#!/usr/bin/env bash
# Averaging clients whose layers have torch's spectral normalisation gives a server whose layers do not have it.
#
# Seen with torch 2.13.0. One would guess: each client's weight has the largest singular value 1, so the averaged model
# has at most 1, by convexity. It is not so. `parametrizations.spectral_norm` keeps the raw weight and two unit vectors
# u, v in buffers, and FedAvg averages both. The mean of unit vectors is shorter than 1. In eval mode they are not
# renewed, so the weight is divided by u'Wv, which is too small. torch says nothing: shapes, dtypes and values fit.
# In training mode each forward pass renews them, so a client that goes on from the average does not notice either.
#
# Output seen (one CPU thread):
#   clients: [1.0, 1.0]
#   average of all tensors: 1.95 with u and v of length {'_u': 0.746, '_v': 0.698}
#   the same weight with renewed vectors: 1.0
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import copy

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.set_num_threads(1)
torch.manual_seed(0)
start = nn.Sequential(spectral_norm(nn.Linear(64, 48)), nn.ReLU(), nn.Linear(48, 4))


def trained(labels):
    """A client whose samples have two of four classes: the label skew of most papers."""
    model, drawn = copy.deepcopy(start).train(), torch.Generator().manual_seed(labels[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(200):
        y = torch.tensor(labels)[torch.randint(2, (32,), generator=drawn)]
        x = torch.randn(32, 64, generator=drawn) + 2 * nn.functional.one_hot(y, 64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def largest(model):
    return float(torch.linalg.matrix_norm(model[0].weight.detach(), 2))


clients = [trained([0, 1]), trained([2, 3])]
states = [client.state_dict() for client in clients]
server = copy.deepcopy(start).eval()
server.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})
vectors = dict(server[0].parametrizations.weight[0].named_buffers())
lengths = {name: round(float(vector.norm()), 3) for name, vector in vectors.items()}
averaged = largest(server)
server.train()
with torch.no_grad():
    for _ in range(100):
        server[0].weight  # in training mode each access takes a power iteration
renewed = largest(server.eval())
print("clients:", [round(largest(client), 3) for client in clients])
print("average of all tensors:", round(averaged, 3), "with u and v of length", lengths)
print("the same weight with renewed vectors:", round(renewed, 3))
assert all(abs(largest(client) - 1) < 0.1 for client in clients)
assert averaged > 1.2, "the average is normalised: the behaviour has changed"
assert abs(renewed - 1) < 0.05
PY
