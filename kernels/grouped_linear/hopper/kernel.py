# SPDX-License-Identifier: Apache-2.0
"""The grouped chain in Triton: from zero or from fp32 accumulators, to bf16 or fp32; and the chain over an expert's rows.

A program finds its expert by the offsets on the device, so neither the host nor a CUDA graph has to know how many rows an expert
has. Tiles, warps, stages and the order of tiles change no bit: each tile walks its chain once in order, and what is masked is a
step of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["REFERENCE", "Tile", "launch", "launch_idle", "launch_weight", "reference", "weight_reference"]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a product is cut: free of bits, tuned for time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


REFERENCE = Tile(rows=64, columns=128, depth=64, warps=4, stages=3)


@triton.jit(do_not_specialize=["experts"])
def rows_kernel(
    a: tl.tensor,
    b: tl.tensor,
    acc: tl.tensor,
    out: tl.tensor,
    offsets: tl.tensor,
    experts: tl.tensor,
    columns: tl.tensor,
    length: tl.tensor,
    a_row: tl.tensor,
    b_expert: tl.tensor,
    b_chain: tl.tensor,
    b_column: tl.tensor,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    CONTINUE: tl.constexpr,
) -> None:
    """One tile of one expert's rows: `out [R, columns] = acc + sum over the chain`."""
    own = tl.arange(0, EXPERTS)
    starts = tl.load(offsets + own, mask=own < experts, other=0)
    ends = tl.load(offsets + own + 1, mask=own < experts, other=0)
    tiles = (ends - starts + ROWS - 1) // ROWS
    upto = tl.cumsum(tiles, 0)
    tile = tl.program_id(1)
    expert = tl.sum((upto <= tile).to(tl.int32), axis=0)
    if expert < experts:
        here = own == expert
        first = tl.sum(tl.where(here, upto - tiles, 0), axis=0)
        start = tl.sum(tl.where(here, starts, 0), axis=0) + (tile - first) * ROWS
        end = tl.sum(tl.where(here, ends, 0), axis=0)
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        col = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        k = tl.arange(0, DEPTH)
        real_row = (row < end)[:, None]
        real_col = (col < columns)[None, :]
        a_at = a + row[:, None] * a_row + k[None, :]
        b_at = (
            b + expert.to(tl.int64) * b_expert + k[:, None].to(tl.int64) * b_chain + col[None, :] * b_column
        )
        at = row[:, None] * columns + col[None, :]
        if CONTINUE:  # noqa: SIM108 - Triton compiles both sides of an expression
            total = tl.load(acc + at, mask=real_row & real_col, other=0.0)
        else:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(0, length, DEPTH):
            if EVEN:
                left = tl.load(a_at, mask=real_row, other=0.0)
                right = tl.load(b_at, mask=real_col, other=0.0)
            else:
                left = tl.load(a_at, mask=real_row & (step + k < length)[None, :], other=0.0)
                right = tl.load(b_at, mask=real_col & (step + k < length)[:, None], other=0.0)
            total = tl.dot(left, right, total)
            a_at += DEPTH
            b_at += DEPTH * b_chain
        tl.store(out + at, total.to(out.dtype.element_ty), mask=real_row & real_col)


@triton.jit(do_not_specialize=["tall"])
def weight_kernel(
    dy: tl.tensor,
    x: tl.tensor,
    out: tl.tensor,
    offsets: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    dy_row: tl.tensor,
    x_row: tl.tensor,
    tall: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """One tile of one expert's gradient: a chain over its rows; a short last step ends in zeros."""
    expert = tl.program_id(1)
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    n = tl.program_id(0) % tall * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) // tall * COLUMNS + tl.arange(0, COLUMNS)
    some = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(start, end, DEPTH):
        row = (step + some).to(tl.int64)
        real = row < end
        left = tl.load(
            dy + row[None, :] * dy_row + n[:, None], mask=real[None, :] & (n < N)[:, None], other=0.0
        )
        right = tl.load(
            x + row[:, None] * x_row + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0
        )
        total = tl.dot(left, right, total)
    at = (expert.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit
def idle_kernel(out: tl.tensor, offsets: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Zeros in the gradients of experts that have no row."""
    expert = tl.program_id(1)
    if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
        zero = tl.zeros((BLOCK,), tl.float32).to(out.dtype.element_ty)
        for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(out + expert.to(tl.int64) * size + at, zero, mask=at < size)


def launch(
    a: Tensor, b: Tensor, offsets: Tensor, acc: Tensor | None, out: Tensor, tile: Tile, *, down: bool = False
) -> None:
    """Write each expert's rows of the product of `a [R, K]` and `b [E, N, K]` to contiguous `out [R, N]`.

    With `down`, of `a [R, N]` and `b [E, N, K]`, to `[R, K]`: the chain goes down the weight's rows. It goes on from contiguous
    fp32 `acc` where given, which may be `out`. Rows of no expert are not written.
    """
    R, length = a.shape
    columns = out.shape[1]
    if not R or not columns:
        return
    experts = len(b)
    # no expert ends within another's tile, so there are at most as many tiles more as experts
    grid = (-(-columns // tile.columns), min(-(-R // tile.rows) + experts, R + experts))
    chain, column = (b.stride(1), b.stride(2)) if down else (b.stride(2), b.stride(1))
    rows_kernel[grid](
        *(a, b, out if acc is None else acc, out, offsets),
        *(experts, columns, length, a.stride(0), b.stride(0), chain, column),
        EXPERTS=power_of_two(experts),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        EVEN=length % tile.depth == 0,
        CONTINUE=acc is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


def launch_weight(dy: Tensor, x: Tensor, offsets: Tensor, out: Tensor, tile: Tile) -> None:
    """Write `dy^T x` of each expert's rows, `dy [R, N]` and `x [R, K]`, to contiguous `out [E, N, K]`; zeros for one without."""
    E, N, K = out.shape
    if not out.numel():
        return
    tall = -(-N // tile.rows)
    weight_kernel[(tall * -(-K // tile.columns), E)](
        *(dy, x, out, offsets, N, K, dy.stride(0), x.stride(0), tall),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


def launch_idle(out: Tensor, offsets: Tensor, *, block: int = 4096) -> None:
    """Write zeros to `out[e]` of each expert e without rows; few programs, since most experts have some."""
    size = out[0].numel()
    idle_kernel[(min(16, -(-size // block)), len(out))](out, offsets, size, BLOCK=block, num_warps=8)


def reference(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    acc: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    down: bool = False,
) -> Tensor:
    """The chain of each row by one tile for every shape: what providers are certified against."""
    out = torch.empty(len(a), b.shape[2] if down else b.shape[1], dtype=out_dtype, device=a.device)
    launch(a, b, offsets, acc, out, REFERENCE, down=down)
    return out


def weight_reference(
    dy: Tensor, x: Tensor, offsets: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The weights' gradients by one tile for every shape."""
    out = torch.empty(len(offsets) - 1, dy.shape[1], x.shape[1], dtype=out_dtype, device=x.device)
    launch_weight(dy, x, offsets, out, REFERENCE)
    return out
