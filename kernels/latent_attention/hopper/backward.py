# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention.latent_segments/1 in Triton, as `naive.gradients` writes them; no atomics.

Two kernels compute the scores anew: one a tile of query rows, which walks keys upwards, and one a tile of keys, which walks the
heads and, in each, the query rows that see it. Keys a tile of the first, keys and warps of the second, and all stages are free of
bits; the ROWS query rows of a step of the second are not: a latent row's gradient takes both its parts from them in turn.
`launch_keys` computes any keys at a time and goes on from what other heads gave, so ranks can hand their chains on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from isoexec.kernels.attention.hopper.backward import UNIT
from isoexec.kernels.hopper.arithmetic import exp, fold
from isoexec.kernels.latent_attention.hopper.naive import HEAD, LATENT, ROPE, ROWS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KEYS", "QUERIES", "Operands", "Tile", "launch_delta", "launch_keys", "launch_queries"]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Free of bits: query rows and keys of a tile, warps, stages of the loads."""

    rows: int
    keys: int
    warps: int
    stages: int


QUERIES = Tile(rows=32, keys=64, warps=8, stages=1)
KEYS = Tile(rows=ROWS, keys=32, warps=8, stages=1)


# numbers that change with the tokens of a call: what is known of them would have the kernels compiled again and again
_SIZES = ("requests", "s_row", "u_row", "l_head", "d_head")


class Operands(NamedTuple):
    """What both kernels read, tensors and then numbers; in a kernel pointers, types where one is compiled.

    q_rope [T, H, 64], q_latent and dout [T, H, 512], k_rope [keys, 64], latent [keys, 512] bf16; lse and delta [H, T] fp32. spans
    [4, B] int32: a sequence's first row, rows, keys and first key; units [2, n] int32: whose each tile of UNIT rows is, and which
    of its own. A sequence whose rows are not those of all its keys gets NaN.
    """

    q_rope: Any
    q_latent: Any
    k_rope: Any
    latent: Any
    lse: Any
    delta: Any
    dout: Any
    spans: Any
    units: Any
    scale: Any
    qr_row: Any
    qr_head: Any
    ql_row: Any
    ql_head: Any
    kr_row: Any
    c_row: Any
    g_row: Any
    g_head: Any

    @classmethod
    def made(cls, *tensors: Tensor, scale: float) -> Operands:
        """From the nine tensors, with what they say of themselves."""
        q_rope, q_latent, k_rope, latent, _, _, dout, _, _ = tensors
        numbers: tuple[float, ...] = (
            *(scale, q_rope.stride(0), q_rope.stride(1), q_latent.stride(0), q_latent.stride(1)),
            *(k_rope.stride(0), latent.stride(0), dout.stride(0), dout.stride(1)),
        )
        return cls._make((*tensors, *numbers))

    def sizes(self) -> tuple[int, ...]:
        """What changes with the tokens of a call, in the order of `_SIZES`."""
        return (
            *(self.spans.shape[1], self.spans.stride(0), self.units.stride(0)),
            *(self.lse.stride(0), self.delta.stride(0)),
        )


@triton.jit(do_not_specialize=["d_head"])
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
def _unit_of(
    of: Operands, unit: tl.tensor, b: tl.tensor, s_row: tl.tensor, u_row: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The first row, rows and first key of sequence b, its unit's place in it, and NaN unless its rows are its keys."""
    count = tl.load(of.spans + s_row + b)
    bad = tl.where(tl.load(of.spans + 2 * s_row + b) == count, 0.0, float("nan"))
    return (
        tl.load(of.spans + b).to(tl.int64),
        count,
        tl.load(of.spans + 3 * s_row + b).to(tl.int64),
        tl.load(of.units + u_row + unit),
        bad,
    )


@triton.jit
def _queries_of(
    of: Operands,
    begin: tl.tensor,
    i: tl.tensor,
    count: tl.tensor,
    h: tl.tensor,
    l_head: tl.tensor,
    d_head: tl.tensor,
    TURN: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Head h's rows i of a sequence: both parts of the query, the result's gradient, the log-sum-exp and delta."""
    turn = tl.arange(0, TURN)
    d = tl.arange(0, WIDTH)
    real = i < count
    some = real[:, None]
    at = begin + i
    x = tl.load(of.q_rope + at[:, None] * of.qr_row + h * of.qr_head + turn[None, :], mask=some, other=0.0)
    y = tl.load(of.q_latent + at[:, None] * of.ql_row + h * of.ql_head + d[None, :], mask=some, other=0.0)
    g = tl.load(of.dout + at[:, None] * of.g_row + h * of.g_head + d[None, :], mask=some, other=0.0)
    far = tl.load(of.lse + h * l_head + at, mask=real, other=0.0)
    return x, y, g, far, tl.load(of.delta + h * d_head + at, mask=real, other=0.0)


@triton.jit
def _keys_of(
    of: Operands, key: tl.tensor, there: tl.tensor, TURN: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Both parts of keys."""
    turn = tl.arange(0, TURN)
    d = tl.arange(0, WIDTH)
    turned = tl.load(of.k_rope + key[:, None] * of.kr_row + turn[None, :], mask=there, other=0.0)
    return turned, tl.load(of.latent + key[:, None] * of.c_row + d[None, :], mask=there, other=0.0)


@triton.jit(do_not_specialize=_SIZES)
def query_kernel(
    of: Operands,
    dq_rope: tl.tensor,
    dq_latent: tl.tensor,
    requests: tl.tensor,
    s_row: tl.tensor,
    u_row: tl.tensor,
    l_head: tl.tensor,
    d_head: tl.tensor,
    H: tl.constexpr,
    TURN: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    h = tl.program_id(0)
    place = tl.num_programs(1) - 1 - tl.program_id(1)  # a sequence's longest rows first
    unit = place // (WHOLE // TILE)
    b = tl.load(of.units + unit)
    if b < requests:
        begin, count, k0, index, bad = _unit_of(of, unit, b, s_row, u_row)
        first = index * WHOLE + place % (WHOLE // TILE) * TILE
        if first < count:
            i = first + tl.arange(0, TILE)
            some = (i < count)[:, None]
            x, y, g, far, own = _queries_of(of, begin, i, count, h, l_head, d_head, TURN, WIDTH)
            dx = tl.zeros([TILE, TURN], tl.float32)
            dy = tl.zeros([TILE, WIDTH], tl.float32)
            for j0 in range(0, tl.minimum(first + TILE, count), COLUMNS):
                j = j0 + tl.arange(0, COLUMNS)
                turned, rows = _keys_of(of, k0 + j, (j < count)[:, None], TURN, WIDTH)
                seen = (j[None, :] <= i[:, None]) & some
                _, ds = _weights(x, y, g, turned, rows, far, own, seen, of.scale)
                low = ds.to(tl.bfloat16)
                dx = tl.dot(low, turned, dx)
                dy = tl.dot(low, rows, dy)
            to = (begin + i)[:, None] * H + h
            turn = tl.arange(0, TURN)
            d = tl.arange(0, WIDTH)
            tl.store(dq_rope + to * TURN + turn[None, :], (dx + bad).to(tl.bfloat16), mask=some)
            tl.store(dq_latent + to * WIDTH + d[None, :], (dy + bad).to(tl.bfloat16), mask=some)


@triton.jit(do_not_specialize=["low", "high", *_SIZES])
def key_kernel(
    of: Operands,
    acc: tl.tensor,
    out: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    requests: tl.tensor,
    s_row: tl.tensor,
    u_row: tl.tensor,
    l_head: tl.tensor,
    d_head: tl.tensor,
    H: tl.constexpr,
    TURN: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CONTINUE: tl.constexpr,
) -> None:
    unit = tl.program_id(0) // (WHOLE // COLUMNS)
    b = tl.load(of.units + unit)
    if b < requests:
        begin, count, k0, index, bad = _unit_of(of, unit, b, s_row, u_row)
        j0 = index * WHOLE + tl.program_id(0) % (WHOLE // COLUMNS) * COLUMNS
        if (j0 < count) & (k0 + j0 < high) & (k0 + j0 + COLUMNS > low):
            turn = tl.arange(0, TURN)
            d = tl.arange(0, WIDTH)
            j = j0 + tl.arange(0, COLUMNS)
            key = k0 + j
            there = ((j < count) & (key >= low) & (key < high))[:, None]
            turned, rows = _keys_of(of, key, there, TURN, WIDTH)
            to = (key - low)[:, None] * (TURN + WIDTH)
            if CONTINUE:
                dr = tl.load(acc + to + turn[None, :], mask=there, other=0.0)
                dc = tl.load(acc + to + TURN + d[None, :], mask=there, other=0.0)
            else:
                dr = tl.zeros([COLUMNS, TURN], tl.float32)
                dc = tl.zeros([COLUMNS, WIDTH], tl.float32)
            for h in range(H):
                for i0 in range(j0 // TILE * TILE, count, TILE):
                    i = i0 + tl.arange(0, TILE)
                    x, y, g, far, own = _queries_of(of, begin, i, count, h, l_head, d_head, TURN, WIDTH)
                    seen = (j[None, :] <= i[:, None]) & (i < count)[:, None]
                    p, ds = _weights(x, y, g, turned, rows, far, own, seen, of.scale)
                    turned_ds = ds.to(tl.bfloat16).T
                    dr = tl.dot(turned_ds, x, dr)
                    dc = tl.dot(turned_ds, y, dc)
                    dc = tl.dot(p.to(tl.bfloat16).T, g, dc)
            kind = out.dtype.element_ty
            tl.store(out + to + turn[None, :], (dr + bad).to(kind), mask=there)
            tl.store(out + to + TURN + d[None, :], (dc + bad).to(kind), mask=there)


def launch_delta(out: Tensor, dout: Tensor) -> Tensor:
    """Pair sums of dout * out, bf16 [T, H, 512] each: fp32 [H, T]."""
    T, H, _ = out.shape
    delta = torch.empty(H, T, dtype=torch.float32, device=out.device)
    per = 4
    if T:
        delta_kernel[(T, -(-H // per))](
            *(
                out,
                dout,
                delta,
                H,
                out.stride(0),
                out.stride(1),
                dout.stride(0),
                dout.stride(1),
                delta.stride(0),
            ),
            HEADS=per,
            WIDTH=LATENT,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return delta


def launch_queries(given: Operands, tile: Tile = QUERIES) -> tuple[Tensor, Tensor]:
    """Dq_rope [T, H, 64] and dq_latent [T, H, 512] bf16; rows of no sequence get zeros."""
    H = given.q_latent.shape[1]
    dq_rope, dq_latent = (
        torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (given.q_rope, given.q_latent)
    )
    query_kernel[(H, given.units.shape[1] * (UNIT // tile.rows))](
        *(given, dq_rope, dq_latent, *given.sizes(), H, ROPE, LATENT),
        WHOLE=UNIT,
        TILE=tile.rows,
        COLUMNS=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
    return dq_rope, dq_latent


def launch_keys(
    given: Operands,
    keys: slice,
    acc: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
    tile: Tile = KEYS,
) -> Tensor:
    """The chains of (dk_rope, dlatent) of `keys` over this call's heads: [n, 576] in `dtype`, into `out` where it is given.

    They go on from `acc` [n, 576] fp32, what the heads before gave. Keys of no sequence get zeros.
    """
    assert tile.rows == ROWS, "the rows of a step decide bits"
    H = given.q_latent.shape[1]
    if out is None:
        out = torch.empty(keys.stop - keys.start, HEAD, dtype=dtype, device=given.latent.device)
    out.zero_()
    key_kernel[(given.units.shape[1] * (UNIT // tile.keys),)](
        *(given, out if acc is None else acc, out, keys.start, keys.stop, *given.sizes(), H, ROPE, LATENT),
        WHOLE=UNIT,
        TILE=tile.rows,
        COLUMNS=tile.keys,
        CONTINUE=acc is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
    return out
