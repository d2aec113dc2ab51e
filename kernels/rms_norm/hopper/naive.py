# SPDX-License-Identifier: Apache-2.0
"""rms_norm.pairs/1 on sm90: x * (1 / sqrt(pairs(x * x) / width + eps)) * w in fp32, rounded once; and its gradients.

`pairs` adds neighbours (the CPU function adds halves): neighbours lie in one thread, then one warp, so the same sum is cheap
on a GPU. The residual is added in fp32 and rounded to the model dtype first; the norm reads the rounded sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from isoexec.kernels.hopper.spec import pair_sum

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 16  # of one chain of the scale's gradient
CHAINS = 64  # of one tree of them; both are part of the function


def inverse_root(xf: Tensor, eps: float, *, mean: bool = True) -> Tensor:
    """fp32 [..., 1]: 1 / sqrt(pairs(x * x) / width + eps), each step correctly rounded; without `mean`, of the sum."""
    total = pair_sum(xf * xf).unsqueeze(-1)
    if mean:
        total = total / torch.full_like(
            total, xf.shape[-1]
        )  # a Python divisor would become a reciprocal on CUDA
    # fp32 square roots of a CPU library need not be the nearest
    root = torch.sqrt((total + eps).double()).float()
    return torch.ones_like(root) / root


def residual_add(x: Tensor, residual: Tensor) -> Tensor:
    return (x.float() + residual.float()).to(residual.dtype)


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    xf = x.float()
    return (xf * inverse_root(xf, eps) * w.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of h, h), h = x + residual."""
    h = residual_add(x, residual)
    return rms_norm(h, w, eps), h


def input_gradient(gw: Tensor, xf: Tensor, eps: float, *, mean: bool = True) -> Tensor:
    """fp32, row-local: r * (gw - xh * (pairs(gw * xh) / width)), xh = x * r; gw is the gradient of xh. `mean`: / width."""
    r = inverse_root(xf, eps, mean=mean)
    xh = xf * r
    c = pair_sum(gw * xh).unsqueeze(-1)
    if mean:
        c = c / torch.full_like(c, xf.shape[-1])
    return r * (gw - xh * c)


def dx(g: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    return input_gradient(g.float() * w.float(), x.float(), eps).to(x.dtype)


def add_dx(g: Tensor, g_h: Tensor, h: Tensor, w: Tensor, eps: float) -> Tensor:
    """Gradient of x and of the residual: that of the norm, rounded, plus that of the sum, rounded again, as unfused ops do."""
    return residual_add(dx(g, h, w, eps), g_h)


def over_tokens(terms: Tensor) -> Tensor:
    """fp32 [width] of terms [tokens, heads, width] (heads 1 for a hidden-state norm).

    Chains of 16 tokens from zero by absolute index, a pair tree over each 64 chains, trees in order from zero, then a pair
    tree over heads. Zero rows at the end change nothing, and ranks that share tokens by whole chains, or heads, have the sums.
    """
    tokens, heads, width = terms.shape
    terms = F.pad(terms, (0, 0, 0, 0, 0, -tokens % (TOKENS * CHAINS)))
    chains = torch.zeros(len(terms) // TOKENS, heads, width, dtype=torch.float32, device=terms.device)
    for place in terms.view(-1, TOKENS, heads, width).unbind(1):
        chains = chains + place
    total = torch.zeros(heads, width, dtype=torch.float32, device=terms.device)
    for tree in pair_sum(chains.view(-1, CHAINS, heads, width).movedim(1, -1)):
        total = total + tree
    return pair_sum(total.t())


def dgamma(g: Tensor, x: Tensor, eps: float) -> Tensor:
    """fp32 [width] of x [tokens, heads, width] or [tokens, width]."""
    xf, gf = x.float(), g.float()
    terms = gf * (xf * inverse_root(xf, eps))
    return over_tokens(terms if x.dim() == 3 else terms.unsqueeze(1))
