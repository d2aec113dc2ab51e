# SPDX-License-Identifier: Apache-2.0
"""Squares as integers in Triton: the greatest magnitude first, then each program's sum in int64, which has no order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import top

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BLOCK", "launch_greatest", "launch_sums", "programs_for"]

BLOCK = 8192  # elements of a program; changes no bit


@triton.jit
def greatest_kernel(x: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    most = top(tl.reshape(tl.abs(v), (1, BLOCK)))
    tl.store(out + tl.program_id(0) + tl.arange(0, 1), most)


@triton.jit
def sums_kernel(
    x: tl.tensor, factors: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32).to(tl.float64)
    # exact but for the last rounding, to the nearest integer and ties to even
    scaled = v * v * tl.load(factors) * tl.load(factors + 1)
    whole = scaled.to(tl.int64)
    rest = scaled - whole.to(tl.float64)
    up = (rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))
    total = tl.sum(whole + up.to(tl.int64), axis=0)
    tl.store(out + tl.program_id(0), total)


def programs_for(count: int, block: int = BLOCK) -> int:
    """How many partial results `count` elements have."""
    return -(-count // block)


def launch_greatest(x: Tensor, out: Tensor, *, block: int = BLOCK, num_warps: int = 8) -> None:
    """Write each program's greatest magnitude of flat `x` to fp32 `out`; NaN where it read one."""
    greatest_kernel[(len(out),)](x, out, x.numel(), BLOCK=block, num_warps=num_warps, enable_fp_fusion=False)


def launch_sums(x: Tensor, factors: Tensor, out: Tensor, *, block: int = BLOCK, num_warps: int = 8) -> None:
    """Write each program's int64 sum of round(square * factors[0] * factors[1]), two exact powers of two in float64."""
    sums_kernel[(len(out),)](
        x, factors, out, x.numel(), BLOCK=block, num_warps=num_warps, enable_fp_fusion=False
    )
