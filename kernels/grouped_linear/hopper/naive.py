# SPDX-License-Identifier: Apache-2.0
"""linear.grouped_mma_chain/1 on sm90: rows `offsets[e]` to `offsets[e + 1]` are linear.mma_chain/1 with expert e's weight.

So are the gradients: that of a weight is a chain over its expert's rows, in their order and from its first; an expert without
rows gets zeros. Rows after the last offset are of no expert. As in `linear/hopper/naive.py` a step's last bit is the tensor
core's, and `kernel.reference` has it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.linear.hopper import naive
from isoexec.kernels.linear.hopper.naive import STEP

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["STEP", "forward", "input_gradient", "weight_gradient"]


def _cuts(offsets: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(offsets.tolist())]


def forward(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    acc: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """X [R, K] by w [E, N, K] -> [rows of experts, N], going on from acc [R, N]."""
    parts = [
        naive.chain(x[cut], w[e], None if acc is None else acc[cut]) for e, cut in enumerate(_cuts(offsets))
    ]
    return torch.cat(parts).to(out_dtype)


def input_gradient(
    dy: Tensor,
    w: Tensor,
    offsets: Tensor,
    acc: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Dy [R, N] by w [E, N, K] -> [rows of experts, K], going on from acc [R, K]."""
    return forward(dy, w.transpose(1, 2), offsets, acc, out_dtype=out_dtype)


def weight_gradient(
    dy: Tensor, x: Tensor, offsets: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Dy [R, N] and x [R, K] -> [E, N, K]."""
    parts = [naive.weight_gradient(dy[cut], x[cut], out_dtype=out_dtype) for cut in _cuts(offsets)]
    return torch.stack(parts)
