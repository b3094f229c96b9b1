"""Sparsification (Stich, Cordonnier, Jaggi, NeurIPS 2018) and quantisation (Alistarh et al., NeurIPS 2017)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def keep_count(size: int, fraction: float) -> int:
    """Return k: this part of ``size`` entries, rounded up.

    >>> keep_count(1000, 0.01), keep_count(10, 0.01), keep_count(3, 1.0)
    (10, 1, 3)
    """
    return min(size, math.ceil(fraction * size - 1e-9))


def largest(values: Tensor, count: int) -> Tensor:
    """Return the positions of the entries of largest magnitude, ascending, (count,) int64; ties go to the first.

    :source: Stich et al., arXiv 1809.07599, Definition 2.1, top_k.

    >>> largest(torch.tensor([1.0, -3.0, 2.0, 3.0]), 2).tolist()
    [1, 3]
    """
    return values.abs().argsort(descending=True, stable=True)[:count].sort().values


def quantise(values: Tensor, chances: Tensor, levels: int, bucket: int) -> tuple[Tensor, Tensor]:
    """Return whole numbers z (n,) int16 in -s..s and the buckets' norms (b,): Q(v_i) = norm z_i / s, without bias.

    :param values: v (n,); ``chances`` uniform in [0, 1), (n,). ``levels`` s.
    :param bucket: entries that share one norm.
    :source: Alistarh, Grubic, Li, Tomioka, Vojnovic, arXiv 1610.02132, Section 3.1, with buckets (Section 4).
    """
    rows = F.pad(values, (0, -len(values) % bucket)).view(-1, bucket)
    norms = rows.norm(dim=1)
    unit = rows.abs() / torch.where(norms > 0, norms, 1.0).unsqueeze(1)  # |v_i| / norm, in [0, 1]
    position = (unit.clamp(max=1.0) * levels).flatten()[: len(values)]
    below = position.floor()
    level = below + (chances < position - below)  # xi_i: up with the chance that keeps the mean
    return (level * values.sign()).to(torch.int16), norms


def dequantise(numbers: Tensor, norms: Tensor, levels: int, bucket: int) -> Tensor:
    """Return norm z_i / s, (n,), in the dtype of ``norms`` (b,)."""
    return numbers.to(norms.dtype) * norms.repeat_interleave(bucket)[: len(numbers)] / levels


def pack_bits(numbers: Tensor, bits: int) -> Tensor:
    """Return whole numbers in -s..s, s = 2^(bits-1) - 1, in so many bits each: uint8.

    >>> unpack_bits(pack_bits(torch.tensor([-1, 0, 1, 1, -1]), 2), 2, 5).tolist()
    [-1, 0, 1, 1, -1]
    """
    each = 8 // bits
    codes = (numbers + (1 << (bits - 1)) - 1).to(torch.uint8)
    columns = F.pad(codes, (0, -len(codes) % each)).view(-1, each)
    packed = torch.zeros(len(columns), dtype=torch.uint8, device=numbers.device)
    for place in range(each):
        packed |= columns[:, place] << (place * bits)
    return packed


def unpack_bits(packed: Tensor, bits: int, size: int) -> Tensor:
    """Return what :func:`pack_bits` packed, (size,) int16."""
    mask = (1 << bits) - 1
    columns = [(packed >> (place * bits)) & mask for place in range(8 // bits)]
    return torch.stack(columns, dim=1).flatten()[:size].to(torch.int16) - ((1 << (bits - 1)) - 1)
