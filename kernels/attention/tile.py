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

__all__ = ["attend", "check_heads", "weights"]


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


def weights(q: Tensor, k: Tensor, limit: Tensor, visible: int, rows: int) -> tuple[Tensor, Tensor]:
    """exp(score - row maximum), fp32 [n, M, S], of its first `rows` rows, and those rows' maxima [n, rows, 1].

    q [n, M, D] scaled, M whole tiles; k [n, S, D]; limit [n or 1, rows] keys a row sees, none fewer than `visible`.
    Rows past `rows` hold plain scores: finite, and nothing reads what comes of them.
    """
    s = torch.bmm(q, k.transpose(1, 2))
    live = s[:, :rows]
    S = s.shape[2]
    if visible < S:
        place = torch.arange(visible, S)
        live[:, :, visible:].masked_fill_(place >= limit.unsqueeze(2), float("-inf"))
    top = live.amax(2, keepdim=True)
    live.sub_(top).exp_()
    return s, top


def attend(
    q: Tensor, k: Tensor, v: Tensor, limit: Tensor, visible: int, rows: int, kv_segment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs fp32 [n, rows, D], row maxima and row sums [n, rows, 1]; arguments as `weights`, v [n, S, D].

    Segments past a row's limit add exact zeros.
    """
    p, top = weights(q, k, limit, visible, rows)
    n, M, S = p.shape
    ns = S // kv_segment
    sums = halving_tree(p[:, :rows].unflatten(2, (ns, kv_segment)))
    out = torch.zeros(n, M, q.shape[2], dtype=torch.float32)
    total = sums[:, :, 0]
    for j in range(ns):
        here = slice(j * kv_segment, (j + 1) * kv_segment)
        out.baddbmm_(p[:, :, here], v[:, here])
        if j:
            total = total + sums[:, :, j]
    total = total.unsqueeze(2)
    return out[:, :rows].div_(total), top, total
