#!/usr/bin/env bash
# A checkpoint under torch.func.functional_call computes its gradient with the module's own weights.
#
# Seen with torch 2.13.0. functional_call runs a module with other weights: those of a client, of a sample, of an inner step.
# torch.utils.checkpoint with use_reentrant=False, which torch recommends, repeats the forward pass in the backward pass. By
# then functional_call has ended, so that the module has its own weights again, and the activations are those of another
# model. One would guess that the two go together, or that the check of recomputed tensors finds it: it looks at shapes and
# types. A wrong gradient comes out. Nothing is said.
#
# Output seen:
#   without a checkpoint: gradient 4.0
#   with a checkpoint: gradient 2.0
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


class Squares(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.weight, self.checkpointed = nn.Parameter(torch.tensor(1.0)), checkpointed

    def square(self, x):
        return (x * self.weight) ** 2

    def forward(self, x):
        return checkpoint(self.square, x, use_reentrant=False) if self.checkpointed else self.square(x)


def gradient(checkpointed):
    weight = torch.tensor(2.0, requires_grad=True)  # of a client; the module's own is 1
    loss = functional_call(Squares(checkpointed), {"weight": weight}, (torch.tensor(1.0),))
    loss.backward()
    print(f"with{'' if checkpointed else 'out'} a checkpoint: gradient {weight.grad.item()}")
    return weight.grad.item()


assert gradient(checkpointed=False) == 4.0  # 2 w
if gradient(checkpointed=True) == 4.0:
    raise SystemExit("the checkpoint remembers the weights: the behaviour has changed")
PY
