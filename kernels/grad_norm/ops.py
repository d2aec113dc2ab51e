# SPDX-License-Identifier: Apache-2.0
"""The sharding-invariant sum of squares over tensors and process groups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from isoexec.kernels.domain import require_float
from isoexec.kernels.grad_norm.naive import exponent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["exact_sq_sum"]


def exact_sq_sum(
    tensors: Sequence[Tensor], groups: ProcessGroup | Sequence[ProcessGroup] | None = None
) -> Tensor:
    """float64 scalar: the sum of squares of every element of `tensors` on every rank of `groups`.

    `groups` together must count each element once: pass the axes that shard (TP, PP), and leave replicas out of `tensors`.
    A non-finite element makes the result NaN.
    """
    if groups is None:
        several: list[ProcessGroup] = []
    elif isinstance(groups, dist.ProcessGroup):
        several = [groups]
    else:
        several = list(groups)
    several = [g for g in several if g.size() > 1]
    require_float("grad_norm", *tensors)
    squares = [t.detach().reshape(-1).to(torch.float64).square_() for t in tensors if t.numel()]
    top = torch.stack([s.amax() for s in squares]).amax() if squares else torch.zeros((), dtype=torch.float64)
    finite = bool(torch.isfinite(top))
    greatest = top if finite else torch.zeros((), dtype=torch.float64)
    counts = torch.tensor([sum(s.numel() for s in squares), int(not finite)])
    for group in several:
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(counts, group=group)
    count, broken = counts.tolist()
    if broken:
        return torch.tensor(math.nan, dtype=torch.float64)
    if float(greatest) == 0.0:
        return torch.zeros((), dtype=torch.float64)
    e = exponent(float(greatest), count)
    # two exact factors: 2**e itself can be outside float64
    half = e // 2
    first, second = math.ldexp(1.0, half), math.ldexp(1.0, e - half)
    total = torch.zeros((), dtype=torch.int64)
    for s in squares:
        total += s.mul_(first).mul_(second).round_().to(torch.int64).sum()
    for group in several:
        dist.all_reduce(total, group=group)
    return torch.tensor(math.ldexp(float(int(total)), -e), dtype=torch.float64)
