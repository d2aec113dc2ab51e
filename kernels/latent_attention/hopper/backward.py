# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention.latent_segments/1 in Triton, as `naive.gradients` writes them; no atomics.

Two kernels compute the scores anew: one a tile of query rows, which walks keys upwards, and one a tile of keys, which walks the
heads and, in each, the query rows that see it. Keys a tile of the first, keys and warps of the second, and all stages are free of
bits; the ROWS query rows of a step of the second are not: a latent row's gradient takes both its parts from them in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import exp, fold
from isoexec.kernels.latent_attention.hopper.naive import LATENT, ROPE, ROWS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KEYS", "QUERIES", "Tile", "gradients"]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Free of bits: query rows and keys of a tile, warps, stages of the loads."""

    rows: int
    keys: int
    warps: int
    stages: int


QUERIES = Tile(rows=32, keys=64, warps=8, stages=1)
KEYS = Tile(rows=ROWS, keys=32, warps=8, stages=1)


@triton.jit
def delta_kernel(
    out: tl.tensor,
    dout: tl.tensor,
    delta: tl.tensor,
    heads: tl.tensor,
    o_row: tl.tensor,
    o_head: tl.tensor,
    g_row: tl.tensor,
    g_head: tl.tensor,
    d_head: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    some = (h < heads)[:, None]
    o = tl.load(out + t * o_row + h[:, None] * o_head + d[None, :], mask=some, other=0.0).to(tl.float32)
    g = tl.load(dout + t * g_row + h[:, None] * g_head + d[None, :], mask=some, other=0.0).to(tl.float32)
    tl.store(delta + h * d_head + t, fold(g * o, HEADS, WIDTH), mask=h < heads)


@triton.jit
def _weights(
    x: tl.tensor,
    y: tl.tensor,
    g: tl.tensor,
    turned: tl.tensor,
    rows: tl.tensor,
    far: tl.tensor,
    delta: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """P [rows, keys] and dS, fp32, from one tile of each."""
    s = tl.zeros([x.shape[0], turned.shape[0]], tl.float32)
    s = tl.dot(y, rows.T, tl.dot(x, turned.T, s))
    at = tl.fma(s, tl.zeros_like(s) + scale, tl.zeros_like(s) - far[:, None])
    p = tl.where(seen, exp(at), 0.0)
    dp = tl.dot(g, rows.T, tl.zeros_like(s))
    return p, (p * (dp - delta[:, None])) * scale


@triton.jit
def query_kernel(
    q_rope: tl.tensor,
    q_latent: tl.tensor,
    k_rope: tl.tensor,
    latent: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dout: tl.tensor,
    dq_rope: tl.tensor,
    dq_latent: tl.tensor,
    q_start: tl.tensor,
    scale: tl.tensor,
    qr_row: tl.tensor,
    qr_head: tl.tensor,
    ql_row: tl.tensor,
    ql_head: tl.tensor,
    kr_row: tl.tensor,
    c_row: tl.tensor,
    l_head: tl.tensor,
    d_head: tl.tensor,
    g_row: tl.tensor,
    g_head: tl.tensor,
    H: tl.constexpr,
    TURN: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    h = tl.program_id(0)
    b = tl.program_id(2)
    begin = tl.load(q_start + b).to(tl.int64)
    count = tl.load(q_start + b + 1) - begin.to(tl.int32)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE  # the longest rows first
    if first < count:
        turn = tl.arange(0, TURN)
        d = tl.arange(0, WIDTH)
        i = first + tl.arange(0, TILE)
        real = i < count
        at = begin + i
        x = tl.load(
            q_rope + at[:, None] * qr_row + h * qr_head + turn[None, :], mask=real[:, None], other=0.0
        )
        y = tl.load(q_latent + at[:, None] * ql_row + h * ql_head + d[None, :], mask=real[:, None], other=0.0)
        g = tl.load(dout + at[:, None] * g_row + h * g_head + d[None, :], mask=real[:, None], other=0.0)
        far = tl.load(lse + h * l_head + at, mask=real, other=0.0)
        own = tl.load(delta + h * d_head + at, mask=real, other=0.0)
        dx = tl.zeros([TILE, TURN], tl.float32)
        dy = tl.zeros([TILE, WIDTH], tl.float32)
        for j0 in range(0, tl.minimum(first + TILE, count), COLUMNS):
            j = j0 + tl.arange(0, COLUMNS)
            there = (j < count)[:, None]
            key = begin + j
            turned = tl.load(k_rope + key[:, None] * kr_row + turn[None, :], mask=there, other=0.0)
            rows = tl.load(latent + key[:, None] * c_row + d[None, :], mask=there, other=0.0)
            seen = (j[None, :] <= i[:, None]) & real[:, None]
            _, ds = _weights(x, y, g, turned, rows, far, own, seen, scale)
            low = ds.to(tl.bfloat16)
            dx = tl.dot(low, turned, dx)
            dy = tl.dot(low, rows, dy)
        out = at[:, None] * H + h
        tl.store(dq_rope + out * TURN + turn[None, :], dx.to(tl.bfloat16), mask=real[:, None])
        tl.store(dq_latent + out * WIDTH + d[None, :], dy.to(tl.bfloat16), mask=real[:, None])


@triton.jit
def key_kernel(
    q_rope: tl.tensor,
    q_latent: tl.tensor,
    k_rope: tl.tensor,
    latent: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dout: tl.tensor,
    dk_rope: tl.tensor,
    dlatent: tl.tensor,
    q_start: tl.tensor,
    scale: tl.tensor,
    qr_row: tl.tensor,
    qr_head: tl.tensor,
    ql_row: tl.tensor,
    ql_head: tl.tensor,
    kr_row: tl.tensor,
    c_row: tl.tensor,
    l_head: tl.tensor,
    d_head: tl.tensor,
    g_row: tl.tensor,
    g_head: tl.tensor,
    H: tl.constexpr,
    TURN: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CONTINUE: tl.constexpr,
) -> None:
    b = tl.program_id(1)
    begin = tl.load(q_start + b).to(tl.int64)
    count = tl.load(q_start + b + 1) - begin.to(tl.int32)
    j0 = tl.program_id(0) * COLUMNS
    if j0 < count:
        turn = tl.arange(0, TURN)
        d = tl.arange(0, WIDTH)
        j = j0 + tl.arange(0, COLUMNS)
        there = (j < count)[:, None]
        key = begin + j
        turned = tl.load(k_rope + key[:, None] * kr_row + turn[None, :], mask=there, other=0.0)
        rows = tl.load(latent + key[:, None] * c_row + d[None, :], mask=there, other=0.0)
        to_r = dk_rope + key[:, None] * TURN + turn[None, :]
        to_c = dlatent + key[:, None] * WIDTH + d[None, :]
        if CONTINUE:
            dr = tl.load(to_r, mask=there, other=0.0)
            dc = tl.load(to_c, mask=there, other=0.0)
        else:
            dr = tl.zeros([COLUMNS, TURN], tl.float32)
            dc = tl.zeros([COLUMNS, WIDTH], tl.float32)
        for h in range(H):
            for i0 in range(j0 // TILE * TILE, count, TILE):
                i = i0 + tl.arange(0, TILE)
                real = i < count
                at = begin + i
                x = tl.load(
                    q_rope + at[:, None] * qr_row + h * qr_head + turn[None, :], mask=real[:, None], other=0.0
                )
                y = tl.load(
                    q_latent + at[:, None] * ql_row + h * ql_head + d[None, :], mask=real[:, None], other=0.0
                )
                g = tl.load(
                    dout + at[:, None] * g_row + h * g_head + d[None, :], mask=real[:, None], other=0.0
                )
                far = tl.load(lse + h * l_head + at, mask=real, other=0.0)
                own = tl.load(delta + h * d_head + at, mask=real, other=0.0)
                seen = (j[None, :] <= i[:, None]) & real[:, None]
                p, ds = _weights(x, y, g, turned, rows, far, own, seen, scale)
                low = ds.to(tl.bfloat16).T
                dr = tl.dot(low, x, dr)
                dc = tl.dot(low, y, dc)
                dc = tl.dot(p.to(tl.bfloat16).T, g, dc)
        tl.store(to_r, dr, mask=there)
        tl.store(to_c, dc, mask=there)


def gradients(
    q_rope: Tensor,
    q_latent: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    q_start: Tensor,
    longest: int,
    scale: float,
    start: tuple[Tensor, Tensor] | None = None,
    queries: Tile = QUERIES,
    keys: Tile = KEYS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of packed sequences: rows q_start[b] .. q_start[b + 1] (int32, on the device) see their own sequence's keys.

    q_rope [T, H, 64], q_latent, out and dout [T, H, 512], k_rope [T, 64], latent [T, 512] bf16, lse [H, T] fp32; `longest` bounds
    the rows of a sequence. Returns bf16 dq_rope and dq_latent, and fp32 chains of dk_rope and dlatent, continued from `start`
    in place where it is given. Rows of no sequence are not written.
    """
    T, H, _ = q_latent.shape
    dq_rope, dq_latent = torch.empty_like(q_rope), torch.empty_like(q_latent)
    dk_rope, dlatent = start or (
        torch.empty(T, ROPE, dtype=torch.float32, device=out.device),
        torch.empty(T, LATENT, dtype=torch.float32, device=out.device),
    )
    if not T:
        return dq_rope, dq_latent, dk_rope, dlatent
    delta = torch.empty(H, T, dtype=torch.float32, device=out.device)
    strides = (out.stride(0), out.stride(1), dout.stride(0), dout.stride(1), delta.stride(0))
    per = 4
    delta_kernel[(T, -(-H // per))](
        out, dout, delta, H, *strides, HEADS=per, WIDTH=LATENT, num_warps=4, enable_fp_fusion=False
    )
    inputs = (q_rope, q_latent, k_rope, latent, lse, delta, dout)
    shape = (
        *(q_rope.stride(0), q_rope.stride(1), q_latent.stride(0), q_latent.stride(1)),
        *(k_rope.stride(0), latent.stride(0), lse.stride(0), delta.stride(0)),
        *(dout.stride(0), dout.stride(1), H, ROPE, LATENT),
    )
    sequences = len(q_start) - 1
    query_kernel[(H, -(-longest // queries.rows), sequences)](
        *inputs,
        dq_rope,
        dq_latent,
        q_start,
        scale,
        *shape,
        TILE=queries.rows,
        COLUMNS=queries.keys,
        num_warps=queries.warps,
        num_stages=queries.stages,
        enable_fp_fusion=False,
    )
    assert keys.rows == ROWS, "the rows of a step decide bits"
    key_kernel[(-(-longest // keys.keys), sequences)](
        *inputs,
        dk_rope,
        dlatent,
        q_start,
        scale,
        *shape,
        TILE=keys.rows,
        COLUMNS=keys.keys,
        CONTINUE=start is not None,
        num_warps=keys.warps,
        num_stages=keys.stages,
        enable_fp_fusion=False,
    )
    return dq_rope, dq_latent, dk_rope, dlatent
