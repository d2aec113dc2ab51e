# SPDX-License-Identifier: Apache-2.0
"""The digest of `isoexec.probes.weights` in one pass over a tensor on a GPU, with its numbers; nothing is copied or widened.

In plain torch the same sums make a dozen passes over 64-bit copies of the tensor, for which a full GPU has no room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["lanes"]

_BLOCK = 4096  # elements a program takes
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _mix(x: tl.tensor, M1: tl.constexpr, M2: tl.constexpr) -> tl.tensor:
    """uint64 -> uint64: `weights._mix`."""
    x = (x ^ (x >> 33)) * M1
    x = (x ^ (x >> 33)) * M2
    return x ^ (x >> 33)


@triton.jit(do_not_specialize=["tiles", "stride", "base"])
def _lanes_kernel(
    bits: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    cols: tl.tensor,
    stride: tl.tensor,
    base: tl.tensor,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    M1: tl.constexpr,
    M2: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    col = (program % tiles) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    at = row * cols + col
    held = col < cols
    index = base + row * stride + col
    word = tl.load(bits + at, mask=held, other=0).to(tl.int64)
    placed = ((index << 32) ^ (index >> 32) ^ word).to(tl.uint64)
    nothing = tl.zeros((BLOCK,), tl.int64)
    low = tl.where(held, _mix(placed ^ LOW, M1, M2).to(tl.int64), nothing)
    high = tl.where(held, _mix(placed ^ HIGH, M1, M2).to(tl.int64), nothing)
    tl.store(out + 2 * program, tl.sum(low, axis=0))
    tl.store(out + 2 * program + 1, tl.sum(high, axis=0))


def lanes(
    t: Tensor, *, rows: int, stride: int, base: int, seeds: tuple[int, int], mixers: tuple[int, int]
) -> Tensor:
    """int64 [2]: the two sums over a contiguous ``t`` of ``rows`` equal rows.

    Its first element is number ``base`` of the whole tensor, and ``stride`` elements of that lie between two rows' first ones.
    """
    cols = t.numel() // rows
    block = min(_BLOCK, triton.next_power_of_2(cols))
    tiles = -(-cols // block)
    out = torch.empty(rows * tiles, 2, dtype=torch.int64, device=t.device)
    _lanes_kernel[(rows * tiles,)](
        t.view(_VIEWS[t.element_size()]),
        out,
        tiles,
        cols,
        stride,
        base,
        BLOCK=block,
        LOW=seeds[0],
        HIGH=seeds[1],
        M1=mixers[0],
        M2=mixers[1],
        num_warps=8 if block >= 2048 else 4,
    )
    return out.sum(0)  # int64 addition wraps, which is the sum mod 2**64
