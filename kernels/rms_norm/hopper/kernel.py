# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in Triton: some rows a program, a row's squares summed by index. Rows and warps a program are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import fold, power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch"]

_PROGRAM = 2048  # elements a program takes where rows are short
_MANY = 8192  # rows from which occupancy counts more than latency


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    w: tl.tensor,
    y: tl.tensor,
    h: tl.tensor,
    rows: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    r_token: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, PADDED)
    live = (row < rows)[:, None] & (col < WIDTH)[None, :]
    start = row * x_token if HEADS == 1 else (row // HEADS) * x_token + (row % HEADS) * x_head
    v = tl.load(x + start[:, None] + col[None, :], mask=live, other=0.0).to(tl.float32)
    out = row[:, None] * WIDTH + col[None, :]
    if ADD:
        r = tl.load(residual + (row * r_token)[:, None] + col[None, :], mask=live, other=0.0)
        rounded = (v + r.to(tl.float32)).to(h.dtype.element_ty)
        tl.store(h + out, rounded, mask=live)
        v = rounded.to(tl.float32)
    total = fold(v * v, ROWS, PADDED)
    mean = tl.div_rn(total, tl.full((ROWS,), WIDTH, tl.float32))
    scale = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    weight = tl.load(w + col, mask=col < WIDTH, other=0.0).to(tl.float32)
    tl.store(y + out, (v * scale[:, None] * weight[None, :]).to(y.dtype.element_ty), mask=live)


def launch(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor,
    y: Tensor,
    h: Tensor | None,
    eps: float,
    *,
    rows_per_program: int | None = None,
    num_warps: int | None = None,
    fused_multiply_add: bool = False,
) -> None:
    """Write the norm of `x [tokens, width]` or `[tokens, heads, width]` to contiguous `y` (and the sum to `h`).

    `fused_multiply_add=True` is another function: the gates use it to see that they can fail.
    """
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * heads
    if not rows:
        return
    padded = power_of_two(width)
    per = rows_per_program or max(1, min(_PROGRAM // padded, power_of_two(-(-rows // 264))))
    warps = num_warps or max(1, min(8, per * padded // (256 if rows < _MANY else 512)))
    norm_kernel[(-(-rows // per),)](
        x,
        x if residual is None else residual,
        w,
        y,
        y if h is None else h,
        rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        eps,
        HEADS=heads,
        WIDTH=width,
        PADDED=padded,
        ROWS=per,
        ADD=residual is not None,
        num_warps=warps,
        enable_fp_fusion=fused_multiply_add,
    )
