# SPDX-License-Identifier: Apache-2.0
"""Gradients of the norms in Triton: the input's row by row, and in the same pass the scale's in chains of 16 tokens.

Chains, trees of 64 of them and trees over heads are the function (`naive.over_tokens`); how many chains a program takes is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import by_row, fold, fold_rows, power_of_two, sigmoid
from isoexec.kernels.rms_norm.hopper.kernel import BARE, PLAIN, inverse_root, strides, weights
from isoexec.kernels.rms_norm.hopper.naive import CHAINS, TOKENS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch_gradient", "launch_total", "launch_trees"]

_PROGRAM = 2048  # elements of a token that a program takes where they are few
_WIDE = 1024  # widths from which a program takes one row, its loads further ahead; measured


@triton.jit(do_not_specialize=["tokens"])
def gradient_kernel(
    g: tl.tensor,
    x: tl.tensor,
    w: tl.tensor,
    z: tl.tensor,
    g_sum: tl.tensor,
    dx: tl.tensor,
    dz: tl.tensor,
    chains: tl.tensor,
    tokens: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    z_token: tl.tensor,
    z_head: tl.tensor,
    s_token: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    CHAIN: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE: tl.constexpr,
    MEAN: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    # a row here is a head of a chain: its tokens come one after another
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (row // HEADS) * CHAIN
    head = row % HEADS
    col = tl.arange(0, PADDED)
    if SCALE:
        weight = weights(w, col, WIDTH, SCALE)
    sums = tl.zeros((ROWS, PADDED), tl.float32)
    for place in tl.range(0, CHAIN, num_stages=STAGES):
        token = first + place
        live = (token < tokens)[:, None] & (col < WIDTH)[None, :]
        v = tl.load(x + (token * x_token + head * x_head)[:, None] + col[None, :], mask=live, other=0.0)
        v = v.to(tl.float32)
        d = tl.load(g + (token * g_token + head * g_head)[:, None] + col[None, :], mask=live, other=0.0)
        d = d.to(tl.float32)
        out = ((token * HEADS + head) * WIDTH)[:, None] + col[None, :]
        r = by_row(inverse_root(v, eps, ROWS, PADDED, WIDTH, MEAN), ROWS)
        xh = v * r
        if GATED:
            at = (token * z_token + head * z_head)[:, None] + col[None, :]
            gate = tl.load(z + at, mask=live, other=0.0).to(tl.float32)
            s = sigmoid(gate)
            dgate = (d * (xh * weight[None, :])) * (s * (1.0 + gate * (1.0 - s)))
            tl.store(dz + out, dgate.to(dz.dtype.element_ty), mask=live)
            d = d * (gate * s)
        dw = d * xh
        if SCALE:
            sums += tl.where(live, dw, 0.0)
            d = d * weight[None, :]
            dw = d * xh
        c = fold(dw, ROWS, PADDED)
        if MEAN:
            c = tl.div_rn(c, tl.full((ROWS,), WIDTH, tl.float32))
        rounded = (r * (d - xh * by_row(c, ROWS))).to(dx.dtype.element_ty)
        if ADD:
            at = (token * s_token)[:, None] + col[None, :]
            more = tl.load(g_sum + at, mask=live, other=0.0).to(tl.float32)
            rounded = (rounded.to(tl.float32) + more).to(dx.dtype.element_ty)
        tl.store(dx + out, rounded, mask=live)
    if SCALE:
        tl.store(
            chains + row[:, None] * WIDTH + col[None, :],
            sums,
            mask=(first < tokens)[:, None] & (col < WIDTH)[None, :],
        )


@triton.jit(do_not_specialize=["chains"])
def trees_kernel(
    sums: tl.tensor,
    trees: tl.tensor,
    chains: tl.tensor,
    WIDTH: tl.constexpr,
    TREE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    tree = tl.program_id(1)
    chain = tree * TREE + tl.arange(0, TREE)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = chain.to(tl.int64)[:, None] * WIDTH + col[None, :]
    v = tl.load(sums + at, mask=(chain < chains)[:, None] & (col < WIDTH)[None, :], other=0.0)
    tl.store(trees + tree.to(tl.int64) * WIDTH + col, fold_rows(v, TREE, COLUMNS), mask=col < WIDTH)


@triton.jit(do_not_specialize=["count"])
def total_kernel(
    trees: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLD: tl.constexpr,
) -> None:
    head = tl.arange(0, PADDED)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live = (head < HEADS)[:, None] & (col < WIDTH)[None, :]
    at = head[:, None] * WIDTH + col[None, :]
    total = tl.zeros((PADDED, COLUMNS), tl.float32)
    for _ in tl.range(0, count):
        total += tl.load(trees + at, mask=live, other=0.0)
        trees += HEADS * WIDTH
    if FOLD:
        folded = fold_rows(total, PADDED, COLUMNS)
        tl.store(out + col, folded.to(out.dtype.element_ty), mask=col < WIDTH)
    else:
        tl.store(out + at, total, mask=live)


def launch_gradient(
    g: Tensor,
    x: Tensor,
    w: Tensor | None,
    dx: Tensor,
    eps: float,
    *,
    gate: Tensor | None = None,
    dgate: Tensor | None = None,
    g_sum: Tensor | None = None,
    scale: int = PLAIN,
    mean: bool = True,
    rows_per_program: int | None = None,
    stages: int | None = None,
    num_warps: int | None = None,
    fused_multiply_add: bool = False,
) -> Tensor | None:
    """Write the input's gradient to contiguous `dx` (and the gate's to `dgate`); the sums of the scale's gradient by chains.

    fp32 `[chains, heads, width]`, None without a weight. `g_sum` is the gradient of a sum that the norm read, and is added.
    `rows_per_program` (heads of chains at once), `stages` and `num_warps` change no bit.
    """
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    tokens = x.shape[0]
    count = -(-tokens // TOKENS)
    chains = None
    if scale != BARE:
        chains = torch.empty((count, heads, width), dtype=torch.float32, device=x.device)
    if not tokens:
        return chains
    padded = power_of_two(width)
    wide = padded >= _WIDE
    most = 1 if wide else _PROGRAM // padded
    per = rows_per_program or max(1, min(most, power_of_two(-(-count * heads // 264))))
    warps = (8 if padded > 2 * _WIDE else 4) if wide else max(1, min(8, per * padded // 256))
    ahead = 3 if wide and padded <= 4 * _WIDE else 2  # shared memory holds no third stage of the widest
    z = x if gate is None else gate
    gradient_kernel[(-(-count * heads // per),)](
        g,
        x,
        x if w is None else w,
        z,
        x if g_sum is None else g_sum,
        dx,
        dx if dgate is None else dgate,
        dx if chains is None else chains,
        tokens,
        *strides(g),
        *strides(x),
        *strides(z),
        0 if g_sum is None else g_sum.stride(0),
        eps,
        HEADS=heads,
        WIDTH=width,
        PADDED=padded,
        ROWS=per,
        CHAIN=TOKENS,
        STAGES=stages or ahead,
        SCALE=scale,
        MEAN=mean,
        GATED=gate is not None,
        ADD=g_sum is not None,
        num_warps=num_warps or warps,
        enable_fp_fusion=fused_multiply_add,
    )
    return chains


def launch_trees(chains: Tensor, *, columns: int | None = None) -> Tensor:
    """fp32 `[trees, heads, width]`: a pair tree over each 64 chains, zeros for those that lack."""
    count, heads, width = chains.shape
    trees = torch.empty((-(-count // CHAINS), heads, width), dtype=torch.float32, device=chains.device)
    if count:
        wide, cut = heads * width, columns or 32
        trees_kernel[(-(-wide // cut), len(trees))](
            chains, trees, count, WIDTH=wide, TREE=CHAINS, COLUMNS=cut, num_warps=4, enable_fp_fusion=False
        )
    return trees


def launch_total(trees: Tensor, out: Tensor) -> None:
    """Trees in order from zero into `out`: fp32 `[heads, width]`, or `[width]` in its dtype, by a pair tree over heads."""
    count, heads, width = trees.shape
    padded = power_of_two(heads)
    cut = max(8, min(128, 1024 // padded))
    total_kernel[(-(-width // cut),)](
        trees,
        out,
        count,
        HEADS=heads,
        PADDED=padded,
        WIDTH=width,
        COLUMNS=cut,
        FOLD=out.dim() == 1,
        num_warps=max(1, min(4, padded * cut // 128)),
        enable_fp_fusion=False,
    )
