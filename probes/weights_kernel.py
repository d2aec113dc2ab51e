# SPDX-License-Identifier: Apache-2.0
"""The digests of `isoexec.probes.weights` in one pass over many tensors on a GPU, with its numbers; nothing is widened in memory.

In plain torch the same sums make a dozen passes over 64-bit copies of a tensor, for which a full GPU has no room.  A launch of
its own for each tensor costs the host more than the device needs for all of them, so a launch takes a table of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Run", "sums"]

_BLOCK = 2048  # elements a program takes at a time
_PROGRAMS = 64  # programs a run is shared by, at most
_WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


class Run(NamedTuple):
    """A contiguous ``tensor`` of ``rows`` equal rows.

    Its first element is number ``base`` of the whole tensor, and ``stride`` elements of that lie between two rows' first ones.
    ``mask`` (int64) are the bits of an element of which none is set in a zero.
    """

    tensor: Tensor
    rows: int
    stride: int
    base: int
    mask: int


@triton.jit
def _mix(x: tl.tensor, M1: tl.constexpr, M2: tl.constexpr) -> tl.tensor:
    """uint64 -> uint64: `weights._mix`."""
    x = (x ^ (x >> 33)) * M1
    x = (x ^ (x >> 33)) * M2
    return x ^ (x >> 33)


@triton.jit
def _sums_kernel(
    table: tl.tensor,
    out: tl.tensor,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    M1: tl.constexpr,
    M2: tl.constexpr,
) -> None:
    run = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1).to(tl.int64)
    programs = tl.num_programs(1)
    entry = table + 6 * run
    bits = tl.load(entry).to(tl.pointer_type(WORD))
    rows = tl.load(entry + 1)
    cols = tl.load(entry + 2)
    stride = tl.load(entry + 3)
    base = tl.load(entry + 4)
    mask = tl.load(entry + 5)
    tiles = (cols + BLOCK - 1) // BLOCK
    low = tl.zeros((BLOCK,), tl.int64)
    high = tl.zeros((BLOCK,), tl.int64)
    some = tl.zeros((BLOCK,), tl.int64)
    for tile in range(program, rows * tiles, programs):
        row = tile // tiles
        col = (tile % tiles) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        held = col < cols
        index = base + row * stride + col
        word = tl.load(bits + (row * cols + col), mask=held, other=0).to(tl.int64)
        placed = ((index << 32) ^ (index >> 32) ^ word).to(tl.uint64)
        low += tl.where(held, _mix(placed ^ LOW, M1, M2).to(tl.int64), 0)
        high += tl.where(held, _mix(placed ^ HIGH, M1, M2).to(tl.int64), 0)
        some |= word & mask
    place = out + 3 * (run * programs + program)
    tl.store(place, tl.sum(low, axis=0))
    tl.store(place + 1, tl.sum(high, axis=0))
    tl.store(place + 2, tl.sum((some != 0).to(tl.int64), axis=0))


def sums(runs: Sequence[Run], *, seeds: tuple[int, int], mixers: tuple[int, int]) -> Tensor:
    """int64 [runs, 3] on their device: the two sums over each run, and a number that is 0 where all of it is zero.

    The host waits for nothing: the tensors may be freed when this returns, for memory is given out again in the queue's order.
    """
    kinds: dict[tuple[int, int], list[int]] = {}
    lines = []
    for index, (t, rows, stride, base, mask) in enumerate(runs):
        cols = t.numel() // rows
        lines.append((t.data_ptr(), rows, cols, stride, base, mask))
        kinds.setdefault((t.element_size(), min(_BLOCK, triton.next_power_of_2(cols))), []).append(index)
    order = [index for of in kinds.values() for index in of]
    device = runs[0].tensor.device
    table = torch.tensor([lines[index] for index in order], dtype=torch.int64).to(device, non_blocking=True)
    made, first = [], 0
    for (size, block), of in kinds.items():
        tiles = max(lines[index][1] * -(-lines[index][2] // block) for index in of)
        found = torch.empty(len(of), min(_PROGRAMS, tiles), 3, dtype=torch.int64, device=device)
        _sums_kernel[(len(of), found.shape[1])](
            table[first : first + len(of)],
            found,
            WORD=_WORDS[size],
            BLOCK=block,
            LOW=seeds[0],
            HIGH=seeds[1],
            M1=mixers[0],
            M2=mixers[1],
            num_warps=8 if block >= 2048 else 4,
        )
        made.append(found.sum(1))  # int64 addition wraps, which is the sum mod 2**64
        first += len(of)
    place = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(made)[torch.tensor(place).to(device, non_blocking=True)]
