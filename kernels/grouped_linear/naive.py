# SPDX-License-Identifier: Apache-2.0
"""linear.grouped_chain/1: rows `offsets[e]` to `offsets[e + 1]` are linear.chain/1 with expert e's weight, gradients too.

A weight's gradient adds its expert's rows in their order, in blocks of m_block padded with zeros; an expert without rows gets
zeros.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.linear import naive

if TYPE_CHECKING:
    from torch import Tensor


def _cuts(offsets: Tensor) -> list[slice]:
    ends = offsets.tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


def grouped_linear(
    x: Tensor, w: Tensor, offsets: Tensor, *, k_block: int, out_dtype: torch.dtype | None = None
) -> Tensor:
    """X [R, K], w [E, N, K], offsets [E + 1] -> [R, N], rounded once."""
    parts = [
        naive.linear(x[cut], w[e], k_block=k_block, out_dtype=out_dtype)
        for e, cut in enumerate(_cuts(offsets))
    ]
    return torch.cat(parts)


def dgrad(g: Tensor, w: Tensor, offsets: Tensor, *, n_block: int, interleave: int = 1) -> Tensor:
    """fp32 [R, K]: `linear.naive.dgrad` of each expert's rows."""
    return torch.cat(
        [
            naive.dgrad(g[cut], w[e], n_block=n_block, interleave=interleave)
            for e, cut in enumerate(_cuts(offsets))
        ]
    )


def wgrad(g: Tensor, x: Tensor, offsets: Tensor, *, m_block: int) -> Tensor:
    """fp32 [E, N, K]: `linear.naive.wgrad` of each expert's rows."""
    none = torch.zeros(g.shape[1], x.shape[1], dtype=torch.float32)
    return torch.stack(
        [
            naive.wgrad(g[cut], x[cut], m_block=m_block) if cut.start < cut.stop else none
            for cut in _cuts(offsets)
        ]
    )
