# SPDX-License-Identifier: Apache-2.0
"""Norms in Triton: some rows a program, a row's squares summed by index. Rows, tiles and warps a program are free.

One kernel serves the norms that differ in their scale only: plain, 1 + w, gated, and without mean and weight (L2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import fold, power_of_two, sigmoid

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BARE", "CENTRED", "PLAIN", "inverse_root", "launch", "strides", "weights"]

BARE, PLAIN, CENTRED = 0, 1, 2  # no weight, w, 1 + w
_CENTRED = tl.constexpr(CENTRED)
_PROGRAM = 2048  # elements a program takes where rows are short
_MANY = 8192  # rows from which occupancy counts more than latency


@triton.jit
def inverse_root(
    v: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    MEAN: tl.constexpr,
) -> tl.tensor:
    """[ROWS, PADDED] -> [ROWS]: `naive.inverse_root`."""
    total = fold(v * v, ROWS, PADDED)
    if MEAN:
        total = tl.div_rn(total, tl.full((ROWS,), WIDTH, tl.float32))
    return tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(total + eps))


@triton.jit
def weights(w: tl.tensor, col: tl.tensor, WIDTH: tl.constexpr, SCALE: tl.constexpr) -> tl.tensor:
    """[PADDED] fp32: the weight as the function multiplies by it."""
    weight = tl.load(w + col, mask=col < WIDTH, other=0.0).to(tl.float32)
    if SCALE == _CENTRED:
        weight = 1.0 + weight
    return weight


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    w: tl.tensor,
    z: tl.tensor,
    y: tl.tensor,
    h: tl.tensor,
    rows: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    r_token: tl.tensor,
    z_token: tl.tensor,
    z_head: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    MEAN: tl.constexpr,
    GATED: tl.constexpr,
    EVICT: tl.constexpr,
) -> None:
    col = tl.arange(0, PADDED)
    if SCALE:
        weight = weights(w, col, WIDTH, SCALE)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row = (tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        live = (row < rows)[:, None] & (col < WIDTH)[None, :]
        start = row * x_token if HEADS == 1 else (row // HEADS) * x_token + (row % HEADS) * x_head
        v = tl.load(x + start[:, None] + col[None, :], mask=live, other=0.0, eviction_policy=EVICT)
        v = v.to(tl.float32)
        out = row[:, None] * WIDTH + col[None, :]
        if ADD:
            r = tl.load(
                residual + (row * r_token)[:, None] + col[None, :],
                mask=live,
                other=0.0,
                eviction_policy=EVICT,
            )
            rounded = (v + r.to(tl.float32)).to(h.dtype.element_ty)
            tl.store(h + out, rounded, mask=live)
            v = rounded.to(tl.float32)
        n = v * inverse_root(v, eps, ROWS, PADDED, WIDTH, MEAN)[:, None]
        if SCALE:
            n = n * weight[None, :]
        if GATED:
            at = row * z_token if HEADS == 1 else (row // HEADS) * z_token + (row % HEADS) * z_head
            gate = tl.load(z + at[:, None] + col[None, :], mask=live, other=0.0, eviction_policy=EVICT)
            gate = gate.to(tl.float32)
            n = n * (gate * sigmoid(gate))
        tl.store(y + out, n.to(y.dtype.element_ty), mask=live)


def strides(x: Tensor) -> tuple[int, int]:
    """Of a token and of a head, in elements."""
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0


def launch(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None,
    y: Tensor,
    h: Tensor | None,
    eps: float,
    *,
    gate: Tensor | None = None,
    scale: int = PLAIN,
    mean: bool = True,
    rows_per_program: int | None = None,
    tiles: int | None = None,
    stages: int = 1,
    num_warps: int | None = None,
    evict: str = "",
    fused_multiply_add: bool = False,
) -> None:
    """Write the norm of `x [tokens, width]` or `[tokens, heads, width]` to contiguous `y` (and the sum to `h`).

    `rows_per_program`, `tiles` (of as many rows, one after another), `stages`, `num_warps` and `evict` change no bit.
    `fused_multiply_add=True` is another function: the gates use it to see that they can fail.
    """
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * heads
    if not rows:
        return
    padded = power_of_two(width)
    per = rows_per_program or max(1, min(_PROGRAM // padded, power_of_two(-(-rows // 264))))
    warps = num_warps or max(1, min(8, per * padded // (256 if rows < _MANY else 512)))
    z = x if gate is None else gate
    norm_kernel[(-(-rows // (per * (tiles or 1))),)](
        x,
        x if residual is None else residual,
        x if w is None else w,
        z,
        y,
        y if h is None else h,
        rows,
        *strides(x),
        0 if residual is None else residual.stride(0),
        *strides(z),
        eps,
        HEADS=heads,
        WIDTH=width,
        PADDED=padded,
        ROWS=per,
        TILES=tiles or 1,
        STAGES=stages,
        ADD=residual is not None,
        SCALE=scale,
        MEAN=mean,
        GATED=gate is not None,
        EVICT=evict,
        num_warps=warps,
        enable_fp_fusion=fused_multiply_add,
    )
