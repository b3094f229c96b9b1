#!/usr/bin/env bash
# Fused SGD on a CPU leaves parameters of bfloat16 and float16 as they are, all but a few numbers.
#
# Seen with torch 2.13.0. One would guess: fused=True takes the step of fused=False, but for rounding. Of each
# parameter the numbers in whole groups of 32 do not change, whatever the gradient; those behind the last whole group
# do. The momentum of these numbers is wrong, too. Nothing warns, and a bias of ten numbers is trained, so that the loss
# falls. float32, float64, fused Adam and fused AdamW are right.
#
# Output seen:
#   torch.float32 fused=False: of 40 numbers 40 moved
#   torch.float32 fused=True: of 40 numbers 40 moved
#   torch.bfloat16 fused=False: of 40 numbers 40 moved
#   torch.bfloat16 fused=True: of 40 numbers 8 moved
#   torch.float16 fused=False: of 40 numbers 40 moved
#   torch.float16 fused=True: of 40 numbers 8 moved
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import torch
from torch import nn


def moved(dtype, fused):
    weight = nn.Parameter(torch.ones(40, dtype=dtype))
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.5, fused=fused).step()
    number = int((weight == 0.5).sum())
    print(f"{dtype} fused={fused}: of 40 numbers {number} moved")
    return number


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    assert moved(dtype, fused=False) == 40
    fused = moved(dtype, fused=True)
    if dtype != torch.float32 and fused == 40:
        raise SystemExit("fused SGD takes the step: the behaviour has changed")
PY
