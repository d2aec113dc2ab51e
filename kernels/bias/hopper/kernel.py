# SPDX-License-Identifier: Apache-2.0
"""The bias in Triton, and its gradient: a halving tree over each 64 tokens, then the trees in token order from zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from isoexec.kernels.bias.naive import TOKEN_BLOCK
from isoexec.kernels.hopper.arithmetic import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch", "launch_gradient"]

_AHEAD = 16  # trees that are read before they are added


@triton.jit(do_not_specialize=["rows"])
def add_kernel(
    x: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    x_row: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    live = (row < rows) & (col < width)
    b = tl.load(bias + col, mask=col < width, other=0.0).to(tl.float32)
    v = tl.load(x + row * x_row + col, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * width + col, (v + b).to(out.dtype.element_ty), mask=live)


@triton.jit
def _halve(v: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """[ROWS, COLUMNS] -> [COLUMNS]: the upper half of the rows added to the lower until one is left."""
    if ROWS == 1:
        return tl.sum(v, axis=0)
    else:  # noqa: RET505 - Triton compiles both branches unless the condition decides
        return _halve(tl.sum(tl.reshape(v, (2, ROWS // 2, COLUMNS)), axis=0), ROWS // 2, COLUMNS)


@triton.jit(do_not_specialize=["rows"])
def trees_kernel(
    grad: tl.tensor,
    trees: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    TREE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    tree = tl.program_id(0).to(tl.int64)
    row = tree * TREE + tl.arange(0, TREE)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = (row < rows)[:, None] & (col < width)[None, :]
    v = tl.load(grad + row[:, None] * width + col[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(trees + tree * width + col, _halve(v, TREE, COLUMNS), mask=col < width)


@triton.jit(do_not_specialize=["count"])
def total_kernel(
    trees: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    at = trees + col
    for first in tl.range(0, count, AHEAD):
        for i in tl.static_range(AHEAD):
            tree = tl.zeros((COLUMNS,), tl.int32) + (first + i)
            total += tl.load(at, mask=(tree < count) & (col < width), other=0.0)
            at += width
    tl.store(out + col, total.to(out.dtype.element_ty), mask=col < width)


def launch(
    x: Tensor, bias: Tensor, out: Tensor, *, rows_per_program: int = 4, block: int = 512, num_warps: int = 4
) -> None:
    """Write `x [rows, width]` plus `bias [width]` to contiguous `out`."""
    rows, width = x.shape
    cut = min(block, power_of_two(max(1, width)))
    if rows and width:
        add_kernel[(-(-rows // rows_per_program), -(-width // cut))](
            x,
            bias,
            out,
            rows,
            x.stride(0),
            width,
            ROWS=rows_per_program,
            BLOCK=cut,
            num_warps=num_warps,
            enable_fp_fusion=False,
        )


def launch_gradient(grad: Tensor, out: Tensor, *, columns: int = 64) -> None:
    """Write the sum over rows of contiguous `grad [rows, width]` to `out [width]`, rounded once to its dtype."""
    rows, width = grad.shape
    count = -(-rows // TOKEN_BLOCK)
    trees = torch.empty((count, width), dtype=torch.float32, device=grad.device)
    if rows and width:
        trees_kernel[(count, -(-width // columns))](
            grad, trees, rows, width, TREE=TOKEN_BLOCK, COLUMNS=columns, num_warps=4, enable_fp_fusion=False
        )
    if width:
        total_kernel[(-(-width // 32),)](
            trees, out, count, width, AHEAD=_AHEAD, COLUMNS=32, num_warps=1, enable_fp_fusion=False
        )
