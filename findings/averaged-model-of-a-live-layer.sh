#!/usr/bin/env bash
# torch.optim.swa_utils.AveragedModel computes with layers of the live network where the network holds a function of itself.
#
# Seen with torch 2.13.0. One would guess that the average, a teacher of many federated methods, is apart from the network
# that it averages: it lists a tensor of its own for each layer, and they are averaged. A network that keeps a lambda over
# self has that lambda in its copy, too, bound to the first network: the average computes with the live first layer. Its
# own first layer is averaged, saved and loaded, and takes no part in any output.
#
# Output seen:
#   by a method: the average changes with the live network: False
#   by a lambda: the average changes with the live network: True
#   by a lambda: the average changes with its own first layer: False
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class ByMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def bent(self, x):
        return self.first(x).tanh()

    def forward(self, x):
        return self.last(self.bent(x))


class ByLambda(ByMethod):
    def __init__(self):
        super().__init__()
        self.bent = lambda x: self.first(x).tanh()


def changes(network, layer):
    live = network()
    average = AveragedModel(live, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(live)
    x = torch.ones(1, 4)
    with torch.no_grad():
        before = average(x)
        (live if layer == "live" else average.module).first.weight.zero_()
        return not torch.equal(average(x), before)


found = changes(ByMethod, "live"), changes(ByLambda, "live"), changes(ByLambda, "own")
print(f"by a method: the average changes with the live network: {found[0]}")
print(f"by a lambda: the average changes with the live network: {found[1]}")
print(f"by a lambda: the average changes with its own first layer: {found[2]}")
assert found == (False, True, False), found
PY
