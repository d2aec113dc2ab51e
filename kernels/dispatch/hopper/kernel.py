# SPDX-License-Identifier: Apache-2.0
"""A dispatch plan made on the device, and rows moved by it, in Triton.

A counting sort: slots of each expert in each block of slots are counted, counts become places, and each slot takes its own. All
of it is integers and nothing is added atomically; no size depends on what the experts hold, so a CUDA graph can replay it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch_plan", "launch_rows"]

_SLOTS = 128  # slots a block
_CHUNK = 32  # experts whose totals a slot adds up at a time
_BLOCKS = 128  # blocks whose counts it adds up at a time
_EXPERTS = 16  # experts whose counts one program adds up


@triton.jit
def _local(
    experts: tl.tensor, slot: tl.tensor, total: tl.tensor, first: tl.tensor, count: tl.tensor
) -> tl.tensor:
    """The slot's expert, from 0; `count` where it is another rank's or the slot does not exist."""
    e = tl.load(experts + slot, mask=slot < total, other=-1).to(tl.int32) - first
    return tl.where((slot < total) & (e >= 0) & (e < count), e, count)


@triton.jit(do_not_specialize=["total"])
def count_kernel(
    experts: tl.tensor,
    counts: tl.tensor,
    total: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Counts [blocks, count]: slots of each expert in each block."""
    block = tl.program_id(0)
    e = _local(experts, block * SLOTS + tl.arange(0, SLOTS), total, first, count)
    bins = tl.arange(0, BINS)
    tl.store(counts + block * count + bins, tl.histogram(e, BINS), mask=bins < count)


@triton.jit
def scan_kernel(
    counts: tl.tensor,
    sums: tl.tensor,
    blocks: tl.tensor,
    count: tl.tensor,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Each count becomes the sum of those before it of the same expert; sums [count] are the experts' totals."""
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for begin in range(0, blocks, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)
        at = counts + block[:, None] * count + e[None, :]
        live = (block < blocks)[:, None] & (e < count)[None, :]
        own = tl.load(at, mask=live, other=0)
        tl.store(at, total[None, :] + tl.cumsum(own, 0) - own, mask=live)
        total += tl.sum(own, axis=0)
    tl.store(sums + e, total, mask=e < count)


@triton.jit(do_not_specialize=["total"])
def place_kernel(
    experts: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    slots: tl.tensor,
    rows: tl.tensor,
    offsets: tl.tensor,
    total: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Slots in the order of experts, then -1; of each slot its row, or -1; offsets [count + 1]."""
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    own = tl.load(sums + bins, mask=bins < count, other=0)
    ends = tl.cumsum(own, 0)
    if block == 0:
        tl.store(offsets + bins, ends - own, mask=bins <= count)
    slot = block * SLOTS + tl.arange(0, SLOTS)
    e = _local(experts, slot, total, first, count)
    before = (e[None, :] == e[:, None]) & (slot[None, :] < slot[:, None])
    rank = tl.sum(before.to(tl.int32), axis=1)
    mine = e < count
    rank += tl.load(counts + block * count + e, mask=mine, other=0)
    row = rank
    for chunk in range(0, BINS, CHUNK):
        some = chunk + tl.arange(0, CHUNK)
        others = tl.load(sums + some, mask=some < count, other=0)
        row += tl.sum(tl.where(some[None, :] < e[:, None], others[None, :], 0), axis=1)
    tl.store(slots + row, slot.to(tl.int64), mask=mine)
    tl.store(rows + slot, tl.where(mine, row, -1), mask=slot < total)
    filled = tl.sum(own, axis=0)
    tl.store(slots + slot, tl.full((SLOTS,), -1, tl.int64), mask=(slot < total) & (slot >= filled))


@triton.jit
def rows_kernel(
    x: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = col < width
        v = tl.load(x + slot // PLACES * stride + col, mask=live, other=0.0)
        tl.store(out + row * width + col, v, mask=live)


@triton.jit
def back_kernel(
    y: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """A slot's row, or zeros where it has none."""
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + slot).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = col < tl.where(row >= 0, width, 0)
    v = tl.load(y + row * stride + col, mask=there, other=0.0)
    tl.store(out + slot * width + col, v, mask=col < width)


def launch_plan(
    experts: Tensor, first: int, count: int, *, slots_a_block: int = _SLOTS
) -> tuple[Tensor, ...]:
    """Contiguous int64 experts [T, k] -> slots int64 [T * k], rows int32 [T * k], offsets int32 [count + 1]."""
    total, device = experts.numel(), experts.device
    blocks = max(1, -(-total // slots_a_block))
    bins = power_of_two(count + 1)
    slots = torch.empty(total, dtype=torch.int64, device=device)
    rows = torch.empty(total, dtype=torch.int32, device=device)
    offsets = torch.empty(count + 1, dtype=torch.int32, device=device)
    counts = torch.empty(blocks, count, dtype=torch.int32, device=device)
    sums = torch.empty(count, dtype=torch.int32, device=device)
    cut = {"BINS": bins, "SLOTS": slots_a_block}
    count_kernel[(blocks,)](experts, counts, total, first, count, **cut, num_warps=4)
    scan_kernel[(-(-count // _EXPERTS),)](
        counts, sums, blocks, count, BLOCKS=min(_BLOCKS, power_of_two(blocks)), EXPERTS=_EXPERTS, num_warps=4
    )
    place_kernel[(blocks,)](
        *(experts, counts, sums, slots, rows, offsets, total, first, count),
        **cut,
        CHUNK=min(bins, _CHUNK),
        num_warps=8,
    )
    return slots, rows, offsets


def launch_rows(
    x: Tensor, index: Tensor, out: Tensor, places: int, *, back: bool = False, block: int | None = None
) -> None:
    """Write a row a slot of `index` (slots in rows' order), or, `back`, a row a slot through `index` (rows of slots)."""
    count, width = out.shape
    if not out.numel():
        return
    block = block or min(2048, power_of_two(width))
    grid = (count, -(-width // block))
    warps = max(1, min(8, block // 256))
    if back:
        back_kernel[grid](x, index, out, width, x.stride(0), BLOCK=block, num_warps=warps)
    else:
        rows_kernel[grid](x, index, out, width, x.stride(0), PLACES=places, BLOCK=block, num_warps=warps)
