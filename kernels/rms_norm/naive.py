# SPDX-License-Identifier: Apache-2.0
"""rms_norm.tree/1: x * (1 / sqrt(tree(x * x) / width + eps)) * w in fp32, rounded once.

The residual is added in fp32 and rounded to the model dtype first; the norm reads the rounded sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.sums import halving_tree

if TYPE_CHECKING:
    from torch import Tensor


def residual_add(x: Tensor, residual: Tensor) -> Tensor:
    return (x.float() + residual.float()).to(residual.dtype)


def reciprocal_root(mean: Tensor) -> Tensor:
    """fp32 1 / sqrt(mean), each of the two correctly rounded: not every CPU's fp32 vector root is, the fp64 one rounded is."""
    return 1.0 / torch.sqrt(mean.double()).float()


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    xf = x.float()
    r = reciprocal_root(halving_tree(xf * xf).unsqueeze(-1) / x.shape[-1] + eps)
    return (xf * r * w.float()).to(x.dtype)


def dx(g: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Row-local: r * (gw - xh * tree(gw * xh) / width) with xh = x * r and gw = g * w."""
    xf, gw = x.float(), g.float() * w.float()
    r = reciprocal_root(halving_tree(xf * xf).unsqueeze(-1) / x.shape[-1] + eps)
    xh = xf * r
    return (r * (gw - xh * (halving_tree(gw * xh).unsqueeze(-1) / x.shape[-1]))).to(x.dtype)


def dgamma(g: Tensor, x: Tensor, eps: float) -> Tensor:
    """fp32 [width] of x [s, b, heads, width] (heads 1 for a hidden-state norm).

    A halving tree over b, then places of s in order from zero, then heads in order from zero: zero rows at the end of s
    change nothing, and ranks that share s or heads hand the accumulator on.
    """
    xf, gf = x.float(), g.float()
    r = reciprocal_root(halving_tree(xf * xf).unsqueeze(-1) / x.shape[-1] + eps)
    per_head = torch.zeros(x.shape[2:], dtype=torch.float32)
    for place in gf * (xf * r):
        per_head = per_head + halving_tree(place, 0)
    total = torch.zeros(x.shape[-1], dtype=torch.float32)
    for head in per_head:
        total = total + head
    return total
