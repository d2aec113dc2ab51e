# SPDX-License-Identifier: Apache-2.0
"""linear.mma_chain/1 on sm90: acc = step(acc, x[k : k + 16], w[k : k + 16]) for k = 0, 16, ... ; one rounding at the end.

A step is what a Hopper tensor core does with 16 bf16 products and an fp32 accumulator. Its adder is not documented, so plain
torch can state the chain and not its last bit: here a step is the exact sum rounded once to fp32. That is the order of the
additions, enough to tell one chain from split-K and from another order. The bits themselves are those of `kernel.reference`,
one tile for every shape; providers are certified against it as integers and against fp64 by error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

STEP = 16


def linear(x: Tensor, w: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """X [M, K] bf16 @ w [N, K]^T bf16 -> [M, N] bf16 or fp32; K a multiple of 16."""
    acc = torch.zeros(len(x), len(w), dtype=torch.float32, device=x.device)
    for k in range(0, x.shape[1], STEP):
        exact = x[:, k : k + STEP].double() @ w[:, k : k + STEP].double().t()
        acc = (acc.double() + exact).float()
    return acc.to(out_dtype)
