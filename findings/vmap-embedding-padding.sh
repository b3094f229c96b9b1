#!/usr/bin/env bash
# Under torch.func.vmap an embedding's padding row has gradients at all clients but the first.
#
# Seen with torch 2.13.0. One would guess: with padding_idx=0, row 0 of each client's table has gradient 0, as it has
# without vmap. It is not so where tables and indices are both batched. The rule joins the K tables (K, E, D) to one of
# K * E rows, adds k * E to the indices of client k, and passes padding_idx on as it is: that is the first client's row.
# Nothing warns. The rows that a client looks up are right.
#
# Output seen:
#   gradients of the padding rows without vmap: [0.0, 0.0, 0.0]
#   gradients of the padding rows under vmap: [0.0, 2.0, 2.0]
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import torch
from torch.func import vmap
from torch.nn import functional as F

words = torch.tensor([[0, 1], [0, 2], [0, 3]])  # of 3 clients; 0 is padding


def gradients(looked_up):
    tables = torch.ones(3, 4, 2, requires_grad=True)
    rows = looked_up(tables)
    assert torch.equal(rows, torch.ones(3, 2, 2))
    return torch.autograd.grad(rows.sum(), tables)[0][:, 0].sum(dim=1).tolist()


def lookup(table, indices):
    return F.embedding(indices, table, padding_idx=0)


alone = gradients(lambda tables: torch.stack([lookup(*client) for client in zip(tables, words)]))
together = gradients(lambda tables: vmap(lookup)(tables, words))
print("gradients of the padding rows without vmap:", alone)
print("gradients of the padding rows under vmap:", together)
assert alone == [0.0, 0.0, 0.0]
if together == alone:
    raise SystemExit("the padding rows have no gradients: the behaviour has changed")
PY
