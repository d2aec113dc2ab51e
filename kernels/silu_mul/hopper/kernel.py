# SPDX-License-Identifier: Apache-2.0
"""SiLU times up in Triton, element by element; the block and its warps are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper import spec
from isoexec.kernels.hopper.arithmetic import exp, power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch"]

_MANY = 2**21  # elements from which occupancy counts more than latency
_EXP_HIGH = tl.constexpr(spec.EXP_HIGH)


@triton.jit
def silu_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    g_row: tl.tensor,
    u_row: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    HARDWARE_EXP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < width
    g = tl.load(gate + row * g_row + col, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + row * u_row + col, mask=live, other=0.0).to(tl.float32)
    e = tl.exp(-g) if HARDWARE_EXP else exp(-g)
    e = tl.where(-g > _EXP_HIGH, float("inf"), e)
    y = tl.div_rn(g, 1.0 + e) * u
    tl.store(out + row * width + col, y.to(out.dtype.element_ty), mask=live)


def launch(
    gate: Tensor,
    up: Tensor,
    out: Tensor,
    *,
    block: int | None = None,
    num_warps: int | None = None,
    hardware_exp: bool = False,
) -> None:
    """Write `silu(gate) * up` of `[rows, width]` views to contiguous `out`.

    `hardware_exp=True` is another function: the gates use it to see that they can fail.
    """
    rows, width = gate.shape
    if not rows:
        return
    block = block or min(1024, power_of_two(width))
    silu_kernel[(rows, -(-width // block))](
        gate,
        up,
        out,
        gate.stride(0),
        up.stride(0),
        width,
        BLOCK=block,
        HARDWARE_EXP=hardware_exp,
        num_warps=num_warps or (2 if rows * width >= _MANY else 8),
        enable_fp_fusion=False,
    )
