# SPDX-License-Identifier: Apache-2.0
"""Sums over a token's places in Triton, in their order, and the gradients of a weighed sum; blocks and warps are free.

Rows are read by slot, or through a map from slots to rows where they lie in the experts' order; a slot without a row is skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import fold, power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch_gradient", "launch_sum"]

_WIDE = 2048  # elements of a row that one program takes


@triton.jit
def sum_kernel(
    y: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    shared: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    MAPPED: tl.constexpr,
    WEIGHED: tl.constexpr,
    SHARED: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < width
    acc = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PLACES):
        slot = token * PLACES + place
        row = tl.load(rows + slot).to(tl.int64) if MAPPED else slot
        there = col < tl.where(row >= 0, width, 0)
        v = tl.load(y + row * width + col, mask=there, other=0.0).to(tl.float32)
        if WEIGHED:
            v = tl.load(weights + slot) * v
        acc = acc + v
    if SHARED:
        acc = acc + tl.load(shared + token * width + col, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * width + col, acc.to(out.dtype.element_ty), mask=live)


@triton.jit
def gradient_kernel(
    grad: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    dy: tl.tensor,
    dw: tl.tensor,
    width: tl.tensor,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    MAPPED: tl.constexpr,
) -> None:
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + slot).to(tl.int64) if MAPPED else slot
    col = tl.arange(0, PADDED)
    live = col < tl.where(row >= 0, width, 0)
    g = tl.load(grad + slot // PLACES * width + col, mask=live, other=0.0).to(tl.float32)
    v = tl.load(y + row * width + col, mask=live, other=0.0).to(tl.float32)
    term = tl.load(weights + slot) * g
    tl.store(dy + row * width + col, term.to(dy.dtype.element_ty), mask=live)
    total = fold(tl.reshape(g * v, (1, PADDED)), 1, PADDED)
    tl.store(dw + slot + tl.arange(0, 1), total)


def launch_sum(
    y: Tensor,
    rows: Tensor | None,
    weights: Tensor | None,
    shared: Tensor | None,
    out: Tensor,
    places: int,
    *,
    block: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Write the sums `[T, H]` of `places` rows a token to contiguous `out`.

    `y` is contiguous, by slot or, with int32 or int64 `rows [T * places]`, in any order; `weights` are contiguous fp32
    `[T, places]`, `shared` contiguous `[T, H]`.
    """
    tokens, width = out.shape
    if not out.numel():
        return
    block = block or min(_WIDE, power_of_two(width))
    sum_kernel[(tokens, -(-width // block))](
        y,
        y if rows is None else rows,
        y if weights is None else weights,
        y if shared is None else shared,
        out,
        width,
        PLACES=places,
        BLOCK=block,
        MAPPED=rows is not None,
        WEIGHED=weights is not None,
        SHARED=shared is not None,
        num_warps=num_warps or max(1, min(8, block // 256)),
        enable_fp_fusion=False,
    )


def launch_gradient(
    grad: Tensor,
    y: Tensor,
    rows: Tensor | None,
    weights: Tensor,
    dy: Tensor,
    dw: Tensor,
    *,
    num_warps: int | None = None,
) -> None:
    """Write the gradients of y, laid out as y is, and of the weights `[T, places]`; all contiguous."""
    tokens, places = weights.shape
    width = grad.shape[1]
    if not weights.numel():
        return
    padded = power_of_two(width)
    gradient_kernel[(tokens * places,)](
        grad,
        y,
        y if rows is None else rows,
        weights,
        dy,
        dw,
        width,
        PLACES=places,
        PADDED=padded,
        MAPPED=rows is not None,
        num_warps=num_warps or max(1, min(8, padded // 512)),
        enable_fp_fusion=False,
    )
