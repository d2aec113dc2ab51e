# SPDX-License-Identifier: Apache-2.0
"""attention.segments/1: causal softmax attention over absolute key segments of kv_segment, in fp32, rounded once.

A tile holds QUERY_TILE rows: the heads of one KV group at neighbouring tokens, token-major. Keys of segment j are
[kv_segment * j, kv_segment * (j + 1)). Queries are scaled before the product. A row's max runs over all its visible keys;
a masked key weighs exactly zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.sums import halving_tree

if TYPE_CHECKING:
    from torch import Tensor

QUERY_TILE = 16


def attend(q: Tensor, k: Tensor, v: Tensor, limit: Tensor, scale: float, *, kv_segment: int) -> Tensor:
    """One tile: q [QUERY_TILE, D], k and v [segments * kv_segment, D], row i sees keys below limit[i]; fp32 [QUERY_TILE, D]."""
    scores = torch.cat([segment @ (q * scale).t() for segment in k.split(kv_segment)])  # [keys, QUERY_TILE]
    scores = scores.masked_fill(torch.arange(len(k)).unsqueeze(1) >= limit, float("-inf"))
    weights = torch.exp(scores - scores.amax(0))
    out, total = (
        torch.zeros(QUERY_TILE, q.shape[1], dtype=torch.float32),
        torch.zeros(QUERY_TILE, dtype=torch.float32),
    )
    for p, values in zip(weights.split(kv_segment), v.split(kv_segment), strict=True):
        out = out + p.t() @ values
        total = total + halving_tree(p, 0)
    return out / total.unsqueeze(1)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, kv_segment: int) -> Tensor:
    """Q [b, s, H, D], k and v [b, s, KV, D], positions 0 to s - 1."""
    b, s, H, D = q.shape
    group = H // k.shape[2]
    per = QUERY_TILE // group
    padded = -(-s // kv_segment) * kv_segment
    out = torch.zeros(b, s, H, D, dtype=torch.float32)
    for i in range(b):
        for kv in range(k.shape[2]):
            keys, values = (
                torch.zeros(padded, D, dtype=torch.float32),
                torch.zeros(padded, D, dtype=torch.float32),
            )
            keys[:s], values[:s] = k[i, :, kv].float(), v[i, :, kv].float()
            heads = slice(kv * group, (kv + 1) * group)
            for a in range(0, s, per):
                n = min(per, s - a)
                tile, limit = (
                    torch.zeros(QUERY_TILE, D, dtype=torch.float32),
                    torch.ones(QUERY_TILE, dtype=torch.long),
                )
                tile[: n * group] = q[i, a : a + n, heads].float().reshape(n * group, D)
                limit[: n * group] = torch.arange(a + 1, a + n + 1).repeat_interleave(group)
                o = attend(tile, keys, values, limit, scale, kv_segment=kv_segment)
                out[i, a : a + n, heads] = o[: n * group].view(n, group, D)
    return out.to(q.dtype)
