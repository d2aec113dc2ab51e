# SPDX-License-Identifier: Apache-2.0
"""NeoX rotation in Triton: a token and some heads a program; products and sums are rounded apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch"]

_MANY = 4096  # tokens from which larger programs are faster


@triton.jit(do_not_specialize=["length"])
def rope_kernel(
    x: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    length: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, PADDED)
    live = (head < HEADS)[:, None] & (col < HALF)[None, :]
    position = tl.load(positions + token).to(tl.int64) + tl.zeros((PADDED,), tl.int64)
    # a position outside the table gives NaN: refusing it here would need the host to wait for the GPU
    inside = (col < HALF) & (position >= 0) & (position < length)
    entry = position * HALF + col
    c = tl.load(cos + entry, mask=inside, other=float("nan"))[None, :]
    s = tl.load(sin + entry, mask=inside, other=float("nan"))[None, :]
    at = token * x_token + head[:, None] * x_head + col[None, :]
    a = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=live, other=0.0).to(tl.float32)
    to = token * (HEADS * 2 * HALF) + head[:, None] * (2 * HALF) + col[None, :]
    tl.store(out + to, (a * c - b * s).to(out.dtype.element_ty), mask=live)
    tl.store(out + to + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=live)


def launch(
    x: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    *,
    heads_per_program: int | None = None,
    num_warps: int | None = None,
    fused_multiply_add: bool = False,
) -> None:
    """Write `x [tokens, heads, 2 * half]` rotated at `positions [tokens]` to contiguous `out`.

    `fused_multiply_add=True` is another function: the gates use it to see that they can fail.
    """
    tokens, heads, width = x.shape
    if not tokens:
        return
    padded = power_of_two(width // 2)
    block = heads_per_program or min(
        power_of_two(heads), max(1, (2048 if tokens >= _MANY else 512) // padded)
    )
    rope_kernel[(tokens, -(-heads // block))](
        x,
        positions,
        cos,
        sin,
        out,
        x.stride(0),
        x.stride(1),
        cos.shape[0],
        HEADS=heads,
        HALF=width // 2,
        PADDED=padded,
        BLOCK=block,
        num_warps=num_warps or max(1, min(4, block * padded // 128)),
        enable_fp_fusion=fused_multiply_add,
    )
