# SPDX-License-Identifier: Apache-2.0
"""The sharding-invariant sum of squares on sm90: the CPU function's bits, and no wait of the host for the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from isoexec.kernels.domain import require
from isoexec.kernels.grad_norm.hopper.kernel import launch_greatest, launch_sums, programs_for
from isoexec.kernels.grad_norm.naive import BITS
from isoexec.kernels.hopper.library import define, require_model_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["exact_sq_sum"]


def _greatest(tensors: Sequence[Tensor]) -> Tensor:
    flat = [t.reshape(-1) for t in tensors]
    parts = torch.empty(
        sum(programs_for(t.numel()) for t in flat), dtype=torch.float32, device=flat[0].device
    )
    for t, part in zip(flat, parts.split([programs_for(t.numel()) for t in flat]), strict=True):
        if len(part):
            launch_greatest(t, part)
    most = parts.amax() if len(parts) else parts.new_zeros(())
    return most.double().square()


def _sums(tensors: Sequence[Tensor], factors: Tensor) -> Tensor:
    flat = [t.reshape(-1) for t in tensors]
    parts = torch.empty(sum(programs_for(t.numel()) for t in flat), dtype=torch.int64, device=factors.device)
    for t, part in zip(flat, parts.split([programs_for(t.numel()) for t in flat]), strict=True):
        if len(part):
            launch_sums(t, factors, part)
    return parts.sum()


def _scalar(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=tensors[0].device)


def _sums_fake(tensors: Sequence[Tensor], factors: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=factors.device)


_greatest_op = define("sm90_grad_norm_greatest(Tensor[] tensors) -> Tensor", _greatest, _scalar)
_sums_op = define("sm90_grad_norm_sums(Tensor[] tensors, Tensor factors) -> Tensor", _sums, _sums_fake)


def _power(exponent: Tensor) -> Tensor:
    """float64 2**exponent of int64 exponents from -1022 to 1023, by its bits."""
    return ((exponent + 1023) << 52).view(torch.float64)


def exact_sq_sum(
    tensors: Sequence[Tensor], groups: ProcessGroup | Sequence[ProcessGroup] | None = None
) -> Tensor:
    """float64 scalar on the GPU: the sum of squares of every element of `tensors` on every rank of `groups`.

    `groups` together must count each element once: pass the axes that shard (TP, PP), and leave replicas out of `tensors`; a
    rank without elements passes an empty tensor. A non-finite element makes the result NaN.
    """
    if groups is None:
        several: list[ProcessGroup] = []
    elif isinstance(groups, dist.ProcessGroup):
        several = [groups]
    else:
        several = list(groups)
    several = [g for g in several if g.size() > 1]
    require(
        bool(tensors), "sm90_grad_norm", "no tensor", "at least one, which may be empty: it names the GPU"
    )
    own = [t.detach() for t in tensors]
    require_model_dtype("sm90_grad_norm", *(t.reshape(-1) for t in own))
    most = _greatest_op(own)
    count = torch.full((), sum(t.numel() for t in own), dtype=torch.int64, device=most.device)
    broken = (~torch.isfinite(most)).to(torch.int64)
    greatest = torch.where(broken > 0, 0.0, most)
    for group in several:
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(count, group=group)
        dist.all_reduce(broken, group=group)
    # `naive.exponent`, on the GPU: 2**e takes all squares together below 2**BITS
    room = torch.frexp(greatest)[1].to(torch.int64) + torch.frexp((count - 1).double())[1].to(torch.int64)
    e = torch.where(greatest > 0, BITS - room - 1, 0)
    half = e >> 1  # two exact factors: 2**e itself can be outside float64
    total = _sums_op(own, _power(torch.stack([half, e - half])))
    for group in several:
        dist.all_reduce(total, group=group)
    result = total.double() * _power(-half) * _power(half - e)
    return torch.where(broken > 0, torch.nan, result)
