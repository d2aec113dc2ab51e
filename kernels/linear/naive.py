# SPDX-License-Identifier: Apache-2.0
"""linear.chain/1: y = ((0 + p_0) + p_1) + ..., p_i = x[:, block i] @ w[:, block i]^T in fp32, one rounding at the end.

Each p_i is a matrix product of one fixed shape, [ROW_TILE, k_block] @ [k_block, N]; rows are padded with zeros, and so are
columns where there are fewer than COLUMNS, since a BLAS has other code for narrow products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

ROW_TILE = 16
COLUMNS = 16


def pack_weight(w: Tensor, *, k_block: int) -> Tensor:
    """[N, K] -> fp32 [K / k_block, k_block, N]."""
    return torch.stack([block.t() for block in w.float().split(k_block, 1)])


def chain(x: Tensor, packed: Tensor, acc: Tensor | None = None) -> Tensor:
    """fp32 [..., N]; `acc` is the accumulator another rank hands over."""
    blocks, k_block, N = packed.shape
    packed = F.pad(packed, (0, max(0, COLUMNS - N)))
    rows = x.reshape(-1, blocks * k_block).float()
    y = torch.zeros(len(rows), N, dtype=torch.float32) if acc is None else acc.reshape(-1, N).clone()
    for start in range(0, len(rows), ROW_TILE):
        count = min(ROW_TILE, len(rows) - start)
        tile = torch.zeros(ROW_TILE, blocks * k_block, dtype=torch.float32)
        tile[:count] = rows[start : start + count]
        for i in range(blocks):
            p = tile[:, i * k_block : (i + 1) * k_block] @ packed[i]
            y[start : start + count] = y[start : start + count] + p[:count, :N]
    return y.reshape(*x.shape[:-1], N)


def linear(x: Tensor, w: Tensor, *, k_block: int, out_dtype: torch.dtype | None = None) -> Tensor:
    """X [..., K] @ w[N, K]^T, rounded once."""
    return chain(x, pack_weight(w, k_block=k_block)).to(out_dtype or x.dtype)


def dgrad(g: Tensor, w: Tensor, *, n_block: int, interleave: int = 1) -> Tensor:
    """fp32 [..., K]: the same chain over N; `interleave` equal parts of N (gate, up) take turns block by block."""
    order = torch.arange(w.shape[0]).view(interleave, -1, n_block).transpose(0, 1).reshape(-1)
    return chain(g[..., order], pack_weight(w[order].t(), k_block=n_block))


def wgrad(g: Tensor, x: Tensor, *, m_block: int) -> Tensor:
    """fp32 [N, K]: the same chain over tokens, in blocks of m_block padded with zeros."""
    g2, x2 = g.reshape(-1, g.shape[-1]).float(), x.reshape(-1, x.shape[-1]).float()
    pad = -len(g2) % m_block
    g2, x2 = (torch.cat([t, torch.zeros(pad, t.shape[1], dtype=torch.float32)]) for t in (g2, x2))
    return chain(g2.t(), pack_weight(x2.t(), k_block=m_block))
