# SPDX-License-Identifier: Apache-2.0
"""A product with a sigmoid in Triton, and its gradients, element by element; rows, the block and its warps are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import power_of_two, sigmoid

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch", "launch_gradient"]

_PROGRAM = 1024  # elements of one program


@triton.jit(do_not_specialize=["rows"])
def sigmoid_kernel(
    grad: tl.tensor,
    x: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    dgate: tl.tensor,
    rows: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    width: tl.tensor,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr,
    EVICT: tl.constexpr,
) -> None:
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    live = (row < rows) & (col < width)
    token, head = row // HEADS, row % HEADS
    v = tl.load(x + token * x_token + head * x_head + col, mask=live, other=0.0, eviction_policy=EVICT)
    g = tl.load(gate + token * g_token + head * g_head + col, mask=live, other=0.0, eviction_policy=EVICT)
    s = sigmoid(g.to(tl.float32))
    to = row * width + col
    if GRADIENT:
        d = tl.load(grad + to, mask=live, other=0.0, eviction_policy=EVICT).to(tl.float32)
        tl.store(out + to, (d * s).to(out.dtype.element_ty), mask=live)
        dg = d * v.to(tl.float32) * (s * (1.0 - s))
        tl.store(dgate + to, dg.to(dgate.dtype.element_ty), mask=live)
    else:
        tl.store(out + to, (v.to(tl.float32) * s).to(out.dtype.element_ty), mask=live)


def _strides(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0


def _launch(
    grad: Tensor | None,
    x: Tensor,
    gate: Tensor,
    out: Tensor,
    dgate: Tensor | None,
    rows_per_program: int | None,
    block: int | None,
    num_warps: int,
    evict: str,
) -> None:
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * heads
    if not rows:
        return
    cut = block or min(_PROGRAM, power_of_two(width))
    per = rows_per_program or max(1, _PROGRAM // cut)
    sigmoid_kernel[(-(-rows // per), -(-width // cut))](
        x if grad is None else grad,
        x,
        gate,
        out,
        out if dgate is None else dgate,
        rows,
        *_strides(x),
        *_strides(gate),
        width,
        HEADS=heads,
        ROWS=per,
        BLOCK=cut,
        GRADIENT=grad is not None,
        EVICT=evict,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )


def launch(
    x: Tensor,
    gate: Tensor,
    out: Tensor,
    *,
    rows_per_program: int | None = None,
    block: int | None = None,
    num_warps: int = 4,
    evict: str = "",
) -> None:
    """Write `x * sigmoid(gate)` of `[tokens, width]` or `[tokens, heads, width]` views to contiguous `out`."""
    _launch(None, x, gate, out, None, rows_per_program, block, num_warps, evict)


def launch_gradient(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    dx: Tensor,
    dgate: Tensor,
    *,
    rows_per_program: int | None = None,
    block: int | None = None,
    num_warps: int = 4,
    evict: str = "",
) -> None:
    """Write both gradients, contiguous as `grad` is."""
    _launch(grad, x, gate, dx, dgate, rows_per_program, block, num_warps, evict)
