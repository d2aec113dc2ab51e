# SPDX-License-Identifier: Apache-2.0
"""SiLU times up in Triton, and its gradients, element by element; rows, the block and its warps are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper import spec
from isoexec.kernels.hopper.arithmetic import exp, power_of_two, sigmoid

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch", "launch_gradient"]

_MANY = 2**21  # elements from which occupancy counts more than latency
_EXP_HIGH = tl.constexpr(spec.EXP_HIGH)


@triton.jit(do_not_specialize=["rows"])
def silu_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    g_row: tl.tensor,
    u_row: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
    HARDWARE_EXP: tl.constexpr,
) -> None:
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    live = (row < rows) & (col < width)
    g = tl.load(gate + row * g_row + col, mask=live, other=0.0, eviction_policy=EVICT).to(tl.float32)
    u = tl.load(up + row * u_row + col, mask=live, other=0.0, eviction_policy=EVICT).to(tl.float32)
    e = tl.exp(-g) if HARDWARE_EXP else exp(-g)
    e = tl.where(-g > _EXP_HIGH, float("inf"), e)
    y = tl.div_rn(g, 1.0 + e) * u
    tl.store(out + row * width + col, y.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def gradient_kernel(
    grad: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    dgate: tl.tensor,
    dup: tl.tensor,
    rows: tl.tensor,
    d_row: tl.tensor,
    g_row: tl.tensor,
    u_row: tl.tensor,
    out_row: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
) -> None:
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    live = (row < rows) & (col < width)
    d = tl.load(grad + row * d_row + col, mask=live, other=0.0, eviction_policy=EVICT).to(tl.float32)
    g = tl.load(gate + row * g_row + col, mask=live, other=0.0, eviction_policy=EVICT).to(tl.float32)
    u = tl.load(up + row * u_row + col, mask=live, other=0.0, eviction_policy=EVICT).to(tl.float32)
    s = sigmoid(g)
    to = row * out_row + col
    tl.store(dgate + to, (d * u * (s * (1.0 + g * (1.0 - s)))).to(dgate.dtype.element_ty), mask=live)
    tl.store(dup + to, (d * (g * s)).to(dup.dtype.element_ty), mask=live)


def _grid(rows: int, width: int, per: int | None, block: int | None) -> tuple[tuple[int, int], int, int]:
    """Programs, rows of one, and columns of one."""
    cut = block or min(1024, power_of_two(width))
    per = per or 1
    return (-(-rows // per), -(-width // cut)), per, cut


def launch(
    gate: Tensor,
    up: Tensor,
    out: Tensor,
    *,
    rows_per_program: int | None = None,
    block: int | None = None,
    num_warps: int | None = None,
    evict: str = "",
    hardware_exp: bool = False,
) -> None:
    """Write `silu(gate) * up` of `[rows, width]` views to contiguous `out`.

    `hardware_exp=True` is another function: the gates use it to see that they can fail.
    """
    rows, width = gate.shape
    if not rows:
        return
    grid, per, cut = _grid(rows, width, rows_per_program, block)
    silu_kernel[grid](
        gate,
        up,
        out,
        rows,
        gate.stride(0),
        up.stride(0),
        width,
        ROWS=per,
        BLOCK=cut,
        EVICT=evict,
        HARDWARE_EXP=hardware_exp,
        num_warps=num_warps or (2 if rows * width >= _MANY else 8),
        enable_fp_fusion=False,
    )


def launch_gradient(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    dgate: Tensor,
    dup: Tensor,
    *,
    rows_per_program: int | None = None,
    block: int | None = None,
    num_warps: int | None = None,
    evict: str = "",
) -> None:
    """Write the gradients to `dgate` and `dup`, `[rows, width]` views of equal row strides."""
    rows, width = gate.shape
    if not rows:
        return
    grid, per, cut = _grid(rows, width, rows_per_program, block)
    gradient_kernel[grid](
        grad,
        gate,
        up,
        dgate,
        dup,
        rows,
        grad.stride(0),
        gate.stride(0),
        up.stride(0),
        dgate.stride(0),
        width,
        ROWS=per,
        BLOCK=cut,
        EVICT=evict,
        num_warps=num_warps or 4,
        enable_fp_fusion=False,
    )
