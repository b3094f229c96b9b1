#!/usr/bin/env bash
# Clients that train as one under torch.func.vmap train the padding row of their embeddings, all but the first client.
#
# Seen with torch 2.13.0. nn.Embedding(padding_idx=0) promises that row 0 has no gradient. One would guess that vmap keeps
# this, or refuses. Tables of K clients become one table of K blocks, and the padding row is left out in the first block
# alone. Nothing is said. A text model of several clients drifts from the one that trains alone.
#
# Output seen:
#   alone: gradients of the padding rows [0.0, 0.0, 0.0]
#   as one: gradients of the padding rows [0.0, 1.0, 2.0]
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import torch
from torch.func import vmap
from torch.nn import functional as F

tables = torch.randn(3, 4, 1, requires_grad=True)  # of 3 clients
texts = torch.tensor([[0, 1, 2], [0, 2, 3], [0, 0, 1]])


def rows(table, text):
    return F.embedding(text, table, padding_idx=0)


def padding(name, outputs):
    (gradient,) = torch.autograd.grad(outputs.sum(), tables)
    print(f"{name}: gradients of the padding rows {gradient[:, 0, 0].tolist()}")
    return gradient[:, 0]


assert not padding("alone", torch.stack([rows(table, text) for table, text in zip(tables, texts)])).any()
together = padding("as one", vmap(rows)(tables, texts))
assert not together[0].any()
if not together[1:].any():
    raise SystemExit("no client trains its padding row: the behaviour has changed")
PY
