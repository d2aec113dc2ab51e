# SPDX-License-Identifier: Apache-2.0
"""Many attention tiles at once: what the trainer's and the engine's attention have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.attention.naive import QUERY_TILE
from isoexec.kernels.domain import DomainError, require_float
from isoexec.kernels.sums import halving_tree

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attend", "check_heads", "weights"]


def check_heads(q: Tensor, heads: int, kv_heads: int, head_dim: int, kv_segment: int) -> int:
    """Query heads to a KV head; raises `DomainError` outside the function's domain."""
    require_float("attention", q)
    if not (kv_heads > 0 and heads % kv_heads == 0 and heads // kv_heads <= QUERY_TILE and head_dim >= 16):
        raise DomainError(
            "attention",
            f"{heads} query heads, {kv_heads} KV heads of {head_dim}",
            f"whole groups of at most {QUERY_TILE} query heads, head_dim of at least 16",
        )
    if kv_segment < 16 or kv_segment.bit_count() != 1:
        raise DomainError("attention", f"kv_segment {kv_segment}", "a power of two from 16")
    return heads // kv_heads


def weights(q: Tensor, k: Tensor, limit: Tensor, visible: int, rows: int) -> tuple[Tensor, Tensor]:
    """exp(score - row maximum), fp32 [n, S, rows], and the maxima [n, 1, rows].

    q [n, D, M] scaled, M whole tiles of which the first `rows` rows count; k [n, S, D]; limit [n or 1, rows]: keys a row
    sees, none fewer than `visible`.
    """
    s = torch.bmm(k, q)
    S = s.shape[1]
    if rows < s.shape[2]:
        # few rows of a tile: side by side in memory they are quicker to work on, and come back as a view
        s = s[:, :, :rows].transpose(1, 2).contiguous().transpose(1, 2)
    if visible < S:
        place = torch.arange(visible, S).unsqueeze(1)
        s[:, visible:].masked_fill_(place >= limit.unsqueeze(1), float("-inf"))
    top = s.amax(1, keepdim=True)
    return s.sub_(top).exp_(), top


def attend(
    q: Tensor, k: Tensor, v: Tensor, limit: Tensor, visible: int, rows: int, kv_segment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs fp32 [n, rows, D], row maxima and row sums [n, rows]; arguments as `weights`, v [n, S, D].

    Segments past a row's limit add exact zeros.
    """
    p, top = weights(q, k, limit, visible, rows)
    n, D, M = q.shape
    ns = k.shape[1] // kv_segment
    segments = p.unflatten(1, (ns, kv_segment))
    if rows < M:
        sums = halving_tree(segments.transpose(2, 3))
        whole = torch.zeros(n, ns, M, kv_segment, dtype=torch.float32)
        whole[:, :, :rows] = segments.transpose(2, 3)
        values = v.unflatten(1, (ns, kv_segment)).flatten(0, 1)
        parts = torch.bmm(whole.view(n * ns, M, kv_segment), values).view(n, ns, M, D)[:, :, :rows]
        out = parts[:, 0] + 0.0
    else:
        sums = halving_tree(segments, 2)
        out = torch.zeros(n, M, D, dtype=torch.float32)
        for j in range(ns):
            here = slice(j * kv_segment, (j + 1) * kv_segment)
            out.baddbmm_(p[:, here].transpose(1, 2), v[:, here])
    total = sums[:, 0]
    for j in range(1, ns):
        total = total + sums[:, j]
        if rows < M:
            out.add_(parts[:, j])
    return out.div_(total.unsqueeze(2)), top.squeeze(1), total
