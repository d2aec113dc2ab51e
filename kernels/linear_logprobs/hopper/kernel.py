# SPDX-License-Identifier: Apache-2.0
"""The linear's chain and the logprobs' blocks in one Triton kernel: a tile of logits becomes nodes of the tree in registers.

Tiles, warps, stages, the order of tiles and programs a multiprocessor change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from isoexec.kernels.hopper.arithmetic import top
from isoexec.kernels.logprobs.hopper.arithmetic import blocks, tree, whole
from isoexec.kernels.logprobs.hopper.naive import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Tile", "launch_nodes", "launch_picked", "nodes_of"]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How the product is cut: `columns` a multiple of 128; `group` row tiles take the columns in turns; free of bits.

    `programs` run on a multiprocessor at the same time: with two, one computes nodes while the other multiplies. `flat` loads
    the next tile's operands meanwhile.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    programs: int = 1
    flat: bool = False


@triton.jit(do_not_specialize=["T"])
def nodes_kernel(
    x: tl.tensor,
    w: tl.tensor,
    temperature: tl.tensor,
    m: tl.tensor,
    s: tl.tensor,
    u: tl.tensor,
    T: tl.tensor,
    K: tl.tensor,
    LEAF: tl.constexpr,
    LEAVES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    TEMPERED: tl.constexpr,
    BOTH: tl.constexpr,
    FLAT: tl.constexpr,
) -> None:
    per_leaf: tl.constexpr = (LEAF + COLUMNS - 1) // COLUMNS
    wide: tl.constexpr = LEAVES * per_leaf
    held: tl.constexpr = COLUMNS // 128
    tall = tl.cdiv(T, ROWS)
    for tile in tl.range(tl.program_id(0), tall * wide, tl.num_programs(0), flatten=FLAT):
        first_tall = tile // (GROUP * wide) * GROUP
        many = min(tall - first_tall, GROUP)
        m0 = (first_tall + tile % (GROUP * wide) % many) * ROWS
        c = tile % (GROUP * wide) // many
        first = c % per_leaf * COLUMNS
        n0 = c // per_leaf * LEAF + first
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, K, DEPTH):
            total = tl.dot(x.load([m0, k]), w.load([n0, k]).T, total)
        row = m0 + tl.arange(0, ROWS)
        real = row < T
        if TEMPERED:
            heat = tl.load(temperature + row, mask=real, other=1.0)
            total = tl.div_rn(total, tl.broadcast_to(heat[:, None], (ROWS, COLUMNS)))
        # the last tile of a leaf reads into the next one, or beyond the weight
        total = tl.where((first + tl.arange(0, COLUMNS) < LEAF)[None, :], total, float("-inf"))
        block_m, block_s, block_u = blocks(total, ROWS, held, BOTH)
        own_s, own_u = tree(whole(block_m), block_s, block_u, ROWS, held, BOTH)
        at = row.to(tl.int64) * wide + c
        tl.store(m + at, top(block_m), mask=real)
        tl.store(s + at, own_s, mask=real)
        if BOTH:
            tl.store(u + at, own_u, mask=real)


@triton.jit(do_not_specialize=["T"])
def picked_kernel(
    x: tl.tensor,
    w: tl.tensor,
    target: tl.tensor,
    temperature: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    K: tl.tensor,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TEMPERED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < T
    t = tl.load(target + row, mask=real, other=-1) - first
    known = (t >= 0) & (t < width)
    k = tl.arange(0, DEPTH)
    x_at = x + row[:, None] * K + k[None, :]
    w_at = w + tl.where(known, t, 0)[None, :] * K + k[:, None]
    total = tl.zeros((ROWS, ROWS), tl.float32)
    for start in range(0, K, DEPTH):
        deep = start + k < K
        a = tl.load(x_at + start, mask=real[:, None] & deep[None, :], other=0.0)
        b = tl.load(w_at + start, mask=known[None, :] & deep[:, None], other=0.0)
        total = tl.dot(a, b, total)
    diagonal = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
    own = tl.sum(tl.where(diagonal, total, 0.0), axis=1)
    if TEMPERED:
        own = tl.div_rn(own, tl.load(temperature + row, mask=real, other=1.0))
    tl.store(out + row, tl.where(known, own, float("nan")), mask=real)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def nodes_of(width: int, leaves: int, tile: Tile) -> int:
    """Nodes of a tile's columns in a leaf."""
    return -(-(width // leaves) // tile.columns)


def launch_nodes(
    x: Tensor, w: Tensor, temperature: Tensor | None, m: Tensor, s: Tensor, u: Tensor | None, tile: Tile
) -> None:
    """Write the nodes of fp32 logits `x [T, K] @ w [V, K]^T` to contiguous `m`, `s`, `u` where given, `[T, leaves, nodes_of]`.

    `x` and `w` are contiguous bf16 with rows of whole 16 bytes.
    """
    T, K = x.shape
    assert tile.columns % BLOCK == 0, "a tile holds whole blocks"
    if not T:
        return
    leaves, per_leaf = m.shape[1:]
    programs = min(tile.programs * _multiprocessors(x.device), -(-T // tile.rows) * leaves * per_leaf)
    nodes_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(w, [tile.columns, tile.depth]),
        m if temperature is None else temperature,
        m,
        s,
        s if u is None else u,
        T,
        K,
        LEAF=len(w) // leaves,
        LEAVES=leaves,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP=tile.group,
        TEMPERED=temperature is not None,
        BOTH=u is not None,
        FLAT=tile.flat,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


def launch_picked(
    x: Tensor, w: Tensor, target: Tensor, temperature: Tensor | None, out: Tensor, *, first: int = 0
) -> None:
    """Write to `out [T]` the logit at each target, divided by the temperature; `w` holds the vocabulary from `first` on.

    NaN where it does not hold the target.
    """
    T, K = x.shape
    if not T:
        return
    picked_kernel[(-(-T // 16),)](
        x,
        w,
        target,
        out if temperature is None else temperature,
        out,
        T,
        first,
        len(w),
        K,
        ROWS=16,
        DEPTH=128,
        TEMPERED=temperature is not None,
        num_warps=2,
        num_stages=4,
        enable_fp_fusion=False,
    )
