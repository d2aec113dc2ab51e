# SPDX-License-Identifier: Apache-2.0
"""Many attention tiles at once: what the trainer's and the engine's attention have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.attention.naive import QUERY_TILE
from isoexec.kernels.domain import require, require_float
from isoexec.kernels.sums import halving_tree

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attend", "check_heads", "scores"]


def check_heads(q: Tensor, heads: int, kv_heads: int, head_dim: int, kv_segment: int) -> int:
    """Query heads to a KV head; raises `DomainError` outside the function's domain."""
    require_float("attention", q)
    require(
        kv_heads > 0 and heads % kv_heads == 0 and heads // kv_heads <= QUERY_TILE and head_dim >= 16,
        "attention",
        f"{heads} query heads, {kv_heads} KV heads of {head_dim}",
        f"whole groups of at most {QUERY_TILE} query heads, head_dim of at least 16",
    )
    require(
        kv_segment >= 16 and kv_segment & (kv_segment - 1) == 0,
        "attention",
        f"kv_segment {kv_segment}",
        "a power of two from 16",
    )
    return heads // kv_heads


def scores(q: Tensor, k: Tensor, limit: Tensor, scale: float, rows: int) -> Tensor:
    """fp32 [n, ns, h, seg, rows]: masked, scaled products of k [n, ns, h, seg, D] and q [n, h, QUERY_TILE, D].

    limit [n, 1 or h, rows]: how many keys a row sees.
    """
    n, ns, h, seg, D = k.shape
    qt = q.unsqueeze(1).expand(n, ns, h, QUERY_TILE, D).reshape(n * ns * h, QUERY_TILE, D).transpose(1, 2)
    s = torch.bmm(k.reshape(n * ns * h, seg, D), qt).view(n, ns, h, seg, QUERY_TILE)
    s = s[..., :rows] * scale
    place = torch.arange(ns * seg).view(1, ns, 1, seg, 1)
    return s.masked_fill_(place >= limit.unsqueeze(1).unsqueeze(3), float("-inf"))


def attend(
    q: Tensor, k: Tensor, v: Tensor, limit: Tensor, scale: float, rows: int = QUERY_TILE
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs fp32 [n, h, rows, D], row maxima and row sums [n, h, rows] of n tiles with h KV heads each.

    q [n, h, QUERY_TILE, D]; k and v [n, ns, h, seg, D]. The products always have QUERY_TILE rows; the element-wise
    middle runs on the first `rows` only. Segments past a row's limit add exact zeros.
    """
    n, ns, h, seg, D = k.shape
    p = scores(q, k, limit, scale, rows)
    top = p.amax((1, 3), keepdim=True)
    p = p.sub_(top).exp_()
    sums = halving_tree(p, 3)
    if rows != QUERY_TILE:
        whole = p.new_zeros((n, ns, h, seg, QUERY_TILE))
        whole[..., :rows] = p
        p = whole
    o = torch.bmm(p.view(n * ns * h, seg, QUERY_TILE).transpose(1, 2), v.reshape(n * ns * h, seg, D))
    o = o.view(n, ns, h, QUERY_TILE, D)[:, :, :, :rows]
    out, total = o[:, 0] + 0.0, sums[:, 0]
    for j in range(1, ns):
        out.add_(o[:, j])
        total = total + sums[:, j]
    return out.div_(total.unsqueeze(-1)), top[:, 0, :, 0], total
