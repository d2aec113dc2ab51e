# SPDX-License-Identifier: Apache-2.0
"""Token logprobs in Triton: chunks of blocks on their own, then one small merge; and the gradient, element by element.

Rows and blocks a program, and warps, are free: every program keeps to the tree of `naive`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import _larger, power_of_two, top
from isoexec.kernels.logprobs.hopper.arithmetic import (
    BASE32,
    DEPTH,
    finish,
    reach,
    sums,
    terms,
    tree,
    whole,
)
from isoexec.kernels.logprobs.hopper.naive import BLOCK

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Cut", "cut_for", "launch_gradient", "launch_merge", "launch_nodes", "launch_partials", "nodes_of"]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How logits are read: blocks and rows a program, how many blocks make a node, warps. Free of bits, tuned for time."""

    blocks: int
    join: int
    rows: int
    warps: int


FEW = 16  # rows below which latency counts more than occupancy


def cut_for(rows: int, dtype: torch.dtype) -> Cut:
    """The cut that serves so many rows."""
    if rows < FEW:
        return Cut(blocks=32, join=8, rows=1, warps=4)
    if dtype.itemsize == 2:
        return Cut(blocks=16, join=16, rows=1, warps=1)
    return Cut(blocks=16, join=8, rows=1, warps=2)


@triton.jit(do_not_specialize=["rows"])
def partials_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    m: tl.tensor,
    s: tl.tensor,
    w: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    LEAF: tl.constexpr,
    CHUNKS: tl.constexpr,
    NODES: tl.constexpr,
    GROUP: tl.constexpr,
    JOIN: tl.constexpr,
    ROWS: tl.constexpr,
    TEMPERED: tl.constexpr,
    BOTH: tl.constexpr,
    HARDWARE_EXP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    part = tl.program_id(1)
    # the last dimension is a stripe: 4 or 8 lanes read it, the others read other blocks, and a thread holds all four stripes
    inside = (
        (part % CHUNKS) * (GROUP * 128)
        + tl.arange(0, GROUP)[None, :, None, None] * 128
        + tl.arange(0, 4)[None, None, :, None] * 32
        + tl.arange(0, 32)[None, None, None, :]
    )
    at = logits + (part // CHUNKS) * LEAF + (row * stride)[:, None, None, None] + inside
    if ROWS == 1 and (part % CHUNKS + 1) * (GROUP * 128) <= LEAF:
        given = tl.load(at)  # masks would cost an instruction for every other element
    else:
        live = real[:, None, None, None] & (inside < LEAF)
        given = tl.load(at, mask=live, other=float("-inf"))
    x = given.to(tl.float32)
    if TEMPERED:
        heat = tl.load(temperature + row, mask=real, other=1.0)
        x = tl.div_rn(x, tl.broadcast_to(heat[:, None, None, None], x.shape))
    block_m = tl.reduce(tl.reduce(x, 3, _larger), 2, _larger)
    n = whole(block_m)
    low = reach(block_m) - DEPTH
    e, d = terms(x, n[:, :, None, None], low[:, :, None, None], BOTH)
    if HARDWARE_EXP:
        e = tl.exp(x - reach(block_m)[:, :, None, None])
    block_s = sums(e, ROWS, GROUP)
    block_w = sums(e * d, ROWS, GROUP) if BOTH else block_s
    # joined only as far as a warp can alone
    COUNT: tl.constexpr = GROUP // JOIN
    parts: tl.constexpr = ROWS * COUNT
    n = tl.reshape(n, (parts, JOIN))
    own_s, own_w = tree(
        n, tl.reshape(block_s, (parts, JOIN)), tl.reshape(block_w, (parts, JOIN)), parts, JOIN, BOTH
    )
    own_m = tl.reshape(top(tl.reshape(block_m, (parts, JOIN))), (ROWS, COUNT))
    node = (part % CHUNKS) * COUNT + tl.arange(0, COUNT)
    keep = real[:, None] & (node < NODES)[None, :]
    place = (row * out_stride)[:, None] + ((part // CHUNKS) * NODES + node)[None, :]
    tl.store(m + place, own_m, mask=keep)
    tl.store(s + place, tl.reshape(own_s, (ROWS, COUNT)), mask=keep)
    if BOTH:
        tl.store(w + place, tl.reshape(own_w, (ROWS, COUNT)), mask=keep)


@triton.jit
def _nodes(
    m: tl.tensor,
    s: tl.tensor,
    w: tl.tensor,
    at: tl.tensor,
    live: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BOTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    own_m = tl.load(m + at, mask=live, other=float("-inf"))
    own_s = tl.load(s + at, mask=live, other=0.0)
    own_w = tl.load(w + at, mask=live, other=0.0) if BOTH else own_s
    s_up, w_up = tree(whole(own_m), own_s, own_w, ROWS, WIDTH, BOTH)
    return top(own_m), s_up, w_up


@triton.jit(do_not_specialize=["rows"])
def nodes_kernel(
    m: tl.tensor,
    s: tl.tensor,
    w: tl.tensor,
    up_m: tl.tensor,
    up_s: tl.tensor,
    up_w: tl.tensor,
    rows: tl.tensor,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BOTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, PADDED)
    live = (row < rows)[:, None] & (place < COUNT)[None, :]
    at = row[:, None] * COUNT + place[None, :]
    node_m, node_s, node_w = _nodes(m, s, w, at, live, ROWS, PADDED, BOTH)
    tl.store(up_m + row, node_m, mask=row < rows)
    tl.store(up_s + row, node_s, mask=row < rows)
    if BOTH:
        tl.store(up_w + row, node_w, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    picked: tl.tensor,
    target: tl.tensor,
    temperature: tl.tensor,
    m: tl.tensor,
    s: tl.tensor,
    w: tl.tensor,
    log_p: tl.tensor,
    entropy: tl.tensor,
    stats: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    LEAVES: tl.constexpr,
    NODES: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    GATHER: tl.constexpr,
    TEMPERED: tl.constexpr,
    BOTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    place = tl.arange(0, LEAVES * PADDED)
    node = place % PADDED
    at = row[:, None] * (LEAVES * NODES) + ((place // PADDED) * NODES + node)[None, :]
    live = real[:, None] & (node < NODES)[None, :]
    top_m, all_s, all_w = _nodes(m, s, w, at, live, ROWS, LEAVES * PADDED, BOTH)
    if GATHER:
        t = tl.load(target + row, mask=real, other=0).to(tl.int64)
        # a target outside the vocabulary gives NaN: refusing it here would need the host to wait for the GPU
        known = real & (t >= 0) & (t < vocab)
        x = tl.load(picked + row * stride + t, mask=known, other=float("nan")).to(tl.float32)
    else:
        x = tl.load(picked + row, mask=real, other=0.0)
    if TEMPERED:
        x = tl.div_rn(x, tl.load(temperature + row, mask=real, other=1.0))
    own, spread, n, total, lse = finish(x, top_m, all_s, all_w)
    tl.store(log_p + row, own, mask=real)
    if BOTH:
        tl.store(entropy + row, spread, mask=real)
    tl.store(stats + row * 3, n, mask=real)
    tl.store(stats + row * 3 + 1, total, mask=real)
    tl.store(stats + row * 3 + 2, lse, mask=real)


@triton.jit(do_not_specialize=["rows", "first"])
def gradient_kernel(
    grad: tl.tensor,
    grad_entropy: tl.tensor,
    logits: tl.tensor,
    target: tl.tensor,
    temperature: tl.tensor,
    entropy: tl.tensor,
    stats: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TEMPERED: tl.constexpr,
    BOTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = row < rows
    live = real[:, None] & (col < width)[None, :]
    x = tl.load(logits + (row * stride)[:, None] + col[None, :], mask=live, other=0.0).to(tl.float32)
    g = tl.load(grad + row, mask=real, other=0.0)
    t = tl.load(target + row, mask=real, other=-1)
    n = tl.load(stats + row * 3, mask=real, other=0.0)
    total = tl.load(stats + row * 3 + 1, mask=real, other=1.0)
    if TEMPERED:
        heat = tl.broadcast_to(tl.load(temperature + row, mask=real, other=1.0)[:, None], x.shape)
        x = tl.div_rn(x, heat)
    low = (n * BASE32 - DEPTH)[:, None]
    e, _ = terms(x, n[:, None], low, False)
    p = e * tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)[:, None]
    p = tl.where(x <= low, 0.0, p)
    hit = (t - first)[:, None] == col[None, :]
    d = g[:, None] * (tl.where(hit, 1.0, 0.0) - p)
    if BOTH:
        h = tl.load(grad_entropy + row, mask=real, other=0.0)
        spread = tl.load(entropy + row, mask=real, other=0.0)
        lse = tl.load(stats + row * 3 + 2, mask=real, other=0.0)
        q = tl.where(x <= low, 0.0, p * ((x - lse[:, None]) + spread[:, None]))
        d = d - h[:, None] * q
    if TEMPERED:
        d = tl.div_rn(d, heat)
    tl.store(out + (row * out_stride)[:, None] + col[None, :], d.to(out.dtype.element_ty), mask=live)


def nodes_of(width: int, leaves: int, join: int) -> int:
    """Nodes of `join` blocks in a leaf."""
    return -(-(width // leaves) // (BLOCK * join))


def launch_partials(
    logits: Tensor,
    temperature: Tensor | None,
    m: Tensor,
    s: Tensor,
    w: Tensor | None,
    cut: Cut,
    *,
    hardware_exp: bool = False,
) -> None:
    """Write the nodes of `logits [rows, V]` to `m`, `s`, and `w` where given: `[rows, leaves, nodes]`, rows apart by a stride.

    `hardware_exp=True` is another function: the gates use it to see that they can fail.
    """
    rows, width = logits.shape
    if not rows:
        return
    leaves, nodes = m.shape[1:]
    chunks = nodes_of(width, leaves, cut.blocks)
    partials_kernel[(-(-rows // cut.rows), leaves * chunks)](
        logits,
        m if temperature is None else temperature,
        m,
        s,
        s if w is None else w,
        rows,
        logits.stride(0),
        m.stride(0),
        LEAF=width // leaves,
        CHUNKS=chunks,
        NODES=nodes,
        GROUP=cut.blocks,
        JOIN=cut.join,
        ROWS=cut.rows,
        TEMPERED=temperature is not None,
        BOTH=w is not None,
        HARDWARE_EXP=hardware_exp,
        num_warps=cut.warps,
        enable_fp_fusion=False,
    )


def launch_nodes(
    m: Tensor, s: Tensor, w: Tensor | None, up_m: Tensor, up_s: Tensor, up_w: Tensor | None
) -> None:
    """Join the contiguous nodes `[rows, count]` of each row into `[rows]`."""
    rows, count = m.shape
    if not rows:
        return
    nodes_kernel[(-(-rows // 4),)](
        m,
        s,
        s if w is None else w,
        up_m,
        up_s,
        up_s if up_w is None else up_w,
        rows,
        COUNT=count,
        PADDED=power_of_two(count),
        ROWS=4,
        BOTH=w is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )


def launch_merge(
    picked: Tensor,
    target: Tensor | None,
    temperature: Tensor | None,
    m: Tensor,
    s: Tensor,
    w: Tensor | None,
    log_p: Tensor,
    entropy: Tensor | None,
    stats: Tensor,
    *,
    rows_per_program: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Write `log_p [rows]`, `entropy [rows]` where `w` is given, `stats [rows, 3]` (N, s, lse) of nodes `[rows, leaves, nodes]`.

    With a target, `picked` is the logits `[rows, V]`, divided here by the temperature; without, the target's logit `[rows]`.
    """
    rows, leaves, nodes = m.shape
    if not rows:
        return
    wide = leaves * power_of_two(nodes)
    per = rows_per_program or (1 if rows < FEW or wide > 256 else 2)
    merge_kernel[(-(-rows // per),)](
        picked,
        m if target is None else target,
        m if temperature is None else temperature,
        m,
        s,
        s if w is None else w,
        log_p,
        log_p if entropy is None else entropy,
        stats,
        rows,
        picked.stride(0),
        0 if target is None else picked.shape[1],
        LEAVES=leaves,
        NODES=nodes,
        PADDED=power_of_two(nodes),
        ROWS=per,
        GATHER=target is not None,
        TEMPERED=temperature is not None,
        BOTH=w is not None,
        num_warps=num_warps or (1 if wide <= 256 else 4),
        enable_fp_fusion=False,
    )


def launch_gradient(
    grad: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    entropy: Tensor | None,
    stats: Tensor,
    out: Tensor,
    *,
    first: int = 0,
    rows_per_program: int = 1,
    columns_per_program: int = 2048,
    num_warps: int = 4,
) -> None:
    """Write the gradient of `logits [rows, n]`, columns `first ...` of the vocabulary, to `out [rows, n]`, bf16 or fp32."""
    rows, width = logits.shape
    if not rows:
        return
    gradient_kernel[(-(-rows // rows_per_program), -(-width // columns_per_program))](
        grad,
        grad if grad_entropy is None else grad_entropy,
        logits,
        target,
        grad if temperature is None else temperature,
        grad if entropy is None else entropy,
        stats,
        out,
        rows,
        first,
        width,
        logits.stride(0),
        out.stride(0),
        COLUMNS=columns_per_program,
        ROWS=rows_per_program,
        TEMPERED=temperature is not None,
        BOTH=grad_entropy is not None,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
