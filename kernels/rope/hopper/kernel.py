# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in Triton: some tokens and heads a program; products and sums are rounded apart.

Halves or neighbours are rotated, the columns behind them copied; each frequency may read the position of an axis of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch"]

_MANY = 4096  # tokens from which larger programs are faster


@triton.jit(do_not_specialize=["tokens", "length", "p_axis"])
def rope_kernel(
    x: tl.tensor,
    positions: tl.tensor,
    axes: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    p_axis: tl.tensor,
    length: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SECTIONS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    REVERSE: tl.constexpr,
    EVICT: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, PADDED)
    known = (token < tokens)[:, None] & (col < HALF)[None, :]
    if SECTIONS:
        axis = tl.load(axes + col, mask=col < HALF, other=0).to(tl.int64)
        position = tl.load(positions + axis[None, :] * p_axis + token[:, None], mask=known, other=0).to(
            tl.int64
        )
    else:
        position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.int64)[:, None]
        position = position + tl.zeros((TOKENS, PADDED), tl.int64)
    # a position outside the table gives NaN: refusing it here would need the host to wait for the GPU
    inside = known & (position >= 0) & (position < length)
    entry = position * HALF + col[None, :]
    c = tl.load(cos + entry, mask=inside, other=float("nan"))[:, None, :]
    s = tl.load(sin + entry, mask=inside, other=float("nan"))[:, None, :]
    if REVERSE:
        s = -s
    here = (token < tokens)[:, None, None] & (head < HEADS)[None, :, None]
    start = token[:, None, None] * x_token + head[None, :, None] * x_head
    to = token[:, None, None] * (HEADS * WIDTH) + head[None, :, None] * WIDTH
    if INTERLEAVED:
        both = tl.arange(0, 2 * PADDED)[None, None, :]
        live = here & (both < 2 * HALF)
        v = tl.load(x + start + both, mask=live, other=0.0, eviction_policy=EVICT).to(tl.float32)
        a, b = tl.split(tl.reshape(v, (TOKENS, BLOCK, PADDED, 2)))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (TOKENS, BLOCK, 2 * PADDED))
        tl.store(out + to + both, turned.to(out.dtype.element_ty), mask=live)
    else:
        live = here & (col < HALF)[None, None, :]
        at = start + col[None, None, :]
        a = tl.load(x + at, mask=live, other=0.0, eviction_policy=EVICT).to(tl.float32)
        b = tl.load(x + at + HALF, mask=live, other=0.0, eviction_policy=EVICT).to(tl.float32)
        to_col = to + col[None, None, :]
        tl.store(out + to_col, (a * c - b * s).to(out.dtype.element_ty), mask=live)
        tl.store(out + to_col + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=live)
    if REST:
        behind = 2 * HALF + tl.arange(0, REST)[None, None, :]
        live = here & (behind < WIDTH)
        tl.store(out + to + behind, tl.load(x + start + behind, mask=live, eviction_policy=EVICT), mask=live)


def launch(
    x: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    *,
    axes: Tensor | None = None,
    interleaved: bool = False,
    reverse: bool = False,
    tokens_per_program: int = 1,
    heads_per_program: int | None = None,
    num_warps: int | None = None,
    evict: str = "",
    fused_multiply_add: bool = False,
) -> None:
    """Write `x [tokens, heads, width]` rotated in its first columns at `positions [tokens]` to contiguous `out`.

    With `axes [half]`, positions are `[axes, tokens]`. Tokens, heads and warps a program, and `evict`, change no bit.
    `fused_multiply_add=True` is another function: the gates use it to see that they can fail.
    """
    tokens, heads, width = x.shape
    if not tokens:
        return
    half = cos.shape[-1]
    padded = power_of_two(half)
    block = heads_per_program or min(
        power_of_two(heads), max(1, (2048 if tokens >= _MANY else 512) // padded)
    )
    rope_kernel[(-(-tokens // tokens_per_program), -(-heads // block))](
        x,
        positions,
        positions if axes is None else axes,
        cos,
        sin,
        out,
        tokens,
        x.stride(0),
        x.stride(1),
        tokens,
        cos.shape[0],
        HEADS=heads,
        WIDTH=width,
        HALF=half,
        PADDED=padded,
        REST=0 if width == 2 * half else power_of_two(width - 2 * half),
        TOKENS=tokens_per_program,
        BLOCK=block,
        SECTIONS=axes is not None,
        INTERLEAVED=interleaved,
        REVERSE=reverse,
        EVICT=evict,
        num_warps=num_warps or max(1, min(4, tokens_per_program * block * padded // 128)),
        enable_fp_fusion=fused_multiply_add,
    )
