# SPDX-License-Identifier: Apache-2.0
"""Token logprobs in Triton: every (row, block) on its own, then one small merge. Rows a program and warps are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import exp, fold, log, power_of_two, top

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["blocks_of", "launch_merge", "launch_partials"]

_FEW = 16  # rows below which latency counts more than occupancy


@triton.jit(do_not_specialize=["rows"])
def partials_kernel(
    logits: tl.tensor,
    m: tl.tensor,
    s: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    LEAF: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HARDWARE_EXP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    count = tl.num_programs(1)
    inside = (part % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    col = (part // BLOCKS) * LEAF + inside
    live = (row < rows)[:, None] & (inside < LEAF)[None, :]
    x = tl.load(logits + (row * stride)[:, None] + col[None, :], mask=live, other=float("-inf")).to(
        tl.float32
    )
    high = top(x)
    d = x - tl.where(high == float("-inf"), 0.0, high)[:, None]
    e = tl.exp(d) if HARDWARE_EXP else exp(d)
    total = fold(e, ROWS, BLOCK)
    tl.store(m + row * count + part, high, mask=row < rows)
    tl.store(s + row * count + part, total, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    picked: tl.tensor,
    target: tl.tensor,
    m: tl.tensor,
    s: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    LEAVES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    GATHER: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, LEAVES * PADDED)
    block = place % PADDED
    at = row[:, None] * (LEAVES * BLOCKS) + ((place // PADDED) * BLOCKS + block)[None, :]
    live = (row < rows)[:, None] & (block < BLOCKS)[None, :]
    mb = tl.load(m + at, mask=live, other=float("-inf"))
    sb = tl.load(s + at, mask=live, other=0.0)
    high = top(mb)
    weighted = tl.where(live, sb * exp(mb - high[:, None]), 0.0)
    total = fold(weighted, ROWS, LEAVES * PADDED)
    if GATHER:
        t = tl.load(target + row, mask=row < rows, other=0).to(tl.int64)
        # a target outside the vocabulary gives NaN: refusing it here would need the host to wait for the GPU
        known = (row < rows) & (t >= 0) & (t < vocab)
        x = tl.load(picked + row * stride + t, mask=known, other=float("nan")).to(tl.float32)
    else:
        x = tl.load(picked + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row, (x - high) - log(total), mask=row < rows)


def blocks_of(width: int, leaves: int, block: int) -> int:
    """Blocks a leaf."""
    return -(-(width // leaves) // block)


def launch_partials(
    logits: Tensor,
    m: Tensor,
    s: Tensor,
    *,
    block: int,
    rows_per_program: int | None = None,
    num_warps: int | None = None,
    hardware_exp: bool = False,
) -> None:
    """Write the partials of `logits [rows, V]` to contiguous `m`, `s` `[rows, leaves, blocks]`.

    `hardware_exp=True` is another function: the gates use it to see that they can fail.
    """
    rows, width = logits.shape
    if not rows:
        return
    leaves, blocks = m.shape[1:]
    per = rows_per_program or 1
    partials_kernel[(-(-rows // per), leaves * blocks)](
        logits,
        m,
        s,
        rows,
        logits.stride(0),
        LEAF=width // leaves,
        BLOCKS=blocks,
        BLOCK=block,
        ROWS=per,
        HARDWARE_EXP=hardware_exp,
        num_warps=num_warps or (8 if rows < _FEW else 2),
        enable_fp_fusion=False,
    )


def launch_merge(
    picked: Tensor,
    target: Tensor | None,
    m: Tensor,
    s: Tensor,
    out: Tensor,
    *,
    rows_per_program: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Write `out [rows]`: with a target, `picked` is the logits `[rows, V]`; without, the target's logit `[rows]`."""
    rows, leaves, blocks = m.shape
    if not rows:
        return
    per = rows_per_program or (1 if rows < _FEW else 2)
    merge_kernel[(-(-rows // per),)](
        picked,
        picked if target is None else target,
        m,
        s,
        out,
        rows,
        picked.stride(0),
        0 if target is None else picked.shape[1],
        LEAVES=leaves,
        BLOCKS=blocks,
        PADDED=power_of_two(blocks),
        ROWS=per,
        GATHER=target is not None,
        num_warps=num_warps or 1,
        enable_fp_fusion=False,
    )
