# SPDX-License-Identifier: Apache-2.0
"""linear.mma_chain/1 on sm90: acc = step(acc, x[k : k + 16], w[k : k + 16]) for k = 0, 16, ... ; one rounding at the end.

A step is what a Hopper tensor core does with 16 bf16 products and an fp32 accumulator. Its adder is not documented, so plain
torch can state the chain and not its last bit: here a step is the exact sum rounded once to fp32. That is the order of the
additions, enough to tell one chain from split-K and from another order. The bits themselves are those of `kernel.reference`
and `chains.reference`, one tile for every shape; providers are certified against them as integers and against fp64 by error.

Gradients are chains of the same steps. A gradient that arrives in fp32 (of logits) is rounded to bf16 first.

- Input gradient: one chain over N, in the order of the whole weight's rows.
- Weight gradient: one chain over tokens, in their order; what is missing to a multiple of 16 counts as zeros, which change no
  accumulator, so padding at the end changes no bit.

Over ranks. K of a row-parallel linear, and N of a column-parallel one's input gradient, are sharded in rank order: each rank
goes on from the accumulator of the one before, which is the chain of one rank, since a shard is whole steps. A weight merged of
parts (gate and up) is [gate; up] on one rank and [gate_r; up_r] on each of several, so the chain of one rank, which is a plain
product there and costs nothing, visits all ranks once a part: all gate rows in rank order, then all up rows. `laps` is the number
of parts, which may differ in width, and the accumulator makes that many laps around the ranks. The other order, rank by rank,
would be another function for every degree; taking turns in blocks, as on the CPU, would cost one rank its library.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

STEP = 16


def chain(x: Tensor, w: Tensor, acc: Tensor | None = None) -> Tensor:
    """Fp32 [M, N]: x [M, K] bf16 @ w [N, K]^T bf16, going on from `acc`; K is padded with zeros to a multiple of 16."""
    total = torch.zeros(len(x), len(w), dtype=torch.float32, device=x.device) if acc is None else acc
    for k in range(0, x.shape[1], STEP):
        exact = x[:, k : k + STEP].double() @ w[:, k : k + STEP].double().t()
        total = (total.double() + exact).float()
    return total


def linear(x: Tensor, w: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """X [M, K] bf16 @ w [N, K]^T bf16 -> [M, N] bf16 or fp32; K a multiple of 16."""
    return chain(x, w).to(out_dtype)


def input_gradient(
    dy: Tensor, w: Tensor, acc: Tensor | None = None, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Dy [M, N] @ w [N, K] -> [M, K]."""
    return chain(dy.bfloat16(), w.t(), acc).to(out_dtype)


def weight_gradient(dy: Tensor, x: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Dy [M, N]^T @ x [M, K] -> [N, K]."""
    return chain(dy.bfloat16().t(), x.t()).to(out_dtype)


def shard_rows(parts: Sequence[int], rank: int, size: int) -> Tensor:
    """The rows of a whole weight merged of `parts` of so many rows that one of `size` ranks holds, in its order."""
    ends = accumulate(parts)
    return torch.cat(
        [torch.arange(end - N, end).chunk(size)[rank] for N, end in zip(parts, ends, strict=True)]
    )
