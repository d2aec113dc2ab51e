# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention on sm90 in Triton, without atomics: `naive.gradients` says which sums, in which order.

A program of `key_kernel` takes a block of keys and walks every query row that sees it, the heads of its KV group one after
the other; a program of `query_kernel` takes a block of query rows and walks the keys they see. Each sum is one tensor-core
chain whose steps of 16 begin at multiples of 16 in the sequence, and a row or key that is masked adds exact zeros: so the
sizes of blocks, where loops begin, warps and stages are free of bits.

What the query's sum needs of a pair of blocks is what the key's sum has computed: with room for it the first kernel writes
it down, and `stored_kernel` only multiplies (five products in all, where the other way takes seven). Same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from isoexec.kernels.attention.hopper.kernel import _unary
from isoexec.kernels.attention.hopper.naive import constants
from isoexec.kernels.hopper.arithmetic import exp, fold, power_of_two
from isoexec.kernels.hopper.spec import LOG2E

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KEY", "QUERY", "STORED", "UNIT", "WORKSPACE", "Given", "Walk", "launch_gradients"]

UNIT = 128  # rows and keys that a program of a table's tile may take at most
# bytes of written-down products at a time, by head dim; where a KV group needs more, they are computed twice, which is faster
# where they are narrow
WORKSPACE = {64: 0, 128: 0, 256: 4 << 30}
_LOG2E = tl.constexpr(LOG2E)
# numbers that change with the tokens of a call: what is known of them would have the kernels compiled again and again
_SIZES = ("requests", "first_kv", "window", "rows", "stripe", "s_row", "w_row")


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Free of bits: what a program holds, what it takes in a step, warps, stages; `apart`: keys and values in two programs."""

    hold: int
    step: int
    warps: int
    stages: int
    apart: bool = False


KEY = {
    64: Walk(hold=64, step=128, warps=4, stages=2),
    128: Walk(hold=128, step=64, warps=8, stages=1),
    256: Walk(hold=32, step=64, warps=4, stages=2),
}
QUERY = {
    64: Walk(hold=64, step=64, warps=4, stages=3),
    128: Walk(hold=128, step=64, warps=8, stages=3),
    256: Walk(hold=128, step=32, warps=8, stages=2),
}
STORED = {
    64: Walk(hold=128, step=64, warps=4, stages=4),
    128: Walk(hold=128, step=64, warps=4, stages=3),
    256: Walk(hold=64, step=64, warps=8, stages=3),
}


class Given(NamedTuple):
    """What both kernels read, tensors and then numbers; in a kernel pointers, types where one is compiled.

    q, g [T, H, D], k, v [keys, KV, D], ds (written-down products) bf16; base, delta [H, T] fp32; spans, owners int32; places of
    the units' stripes int64. Beside it the kernels get `rows` (T), `stripe`, the elements of one head's products at most, and
    the strides of spans and owners.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    base: Any
    delta: Any
    ds: Any
    spans: Any
    owners: Any
    places: Any
    c: Any
    scale: Any
    q_row: Any
    q_head: Any
    k_row: Any
    k_head: Any
    v_row: Any
    v_head: Any
    g_row: Any
    g_head: Any


@triton.jit(do_not_specialize=["rows", "l_head"])
def delta_kernel(
    g: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    base: tl.tensor,
    rows: tl.tensor,
    g_row: tl.tensor,
    g_head: tl.tensor,
    o_row: tl.tensor,
    o_head: tl.tensor,
    l_head: tl.tensor,
    D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """delta[h, t]: the products of a row's gradient and result by a tree of pairs; base[h, t] = lse * log2(e)."""
    h = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    some = row < rows
    d = tl.arange(0, D)
    at = row.to(tl.int64)[:, None]
    x = tl.load(g + at * g_row + h * g_head + d[None, :], mask=some[:, None], other=0.0).to(tl.float32)
    y = tl.load(out + at * o_row + h * o_head + d[None, :], mask=some[:, None], other=0.0).to(tl.float32)
    tl.store(delta + h * rows + row, fold(x * y, ROWS, D), mask=some)
    one = tl.load(lse + h * l_head + row, mask=some, other=0.0)
    tl.store(base + h * rows + row, one * _LOG2E, mask=some)


@triton.jit(do_not_specialize=["requests", "rows", "count", "s_row", "w_row", "l_head"])
def sink_kernel(
    lse: tl.tensor,
    delta: tl.tensor,
    sinks: tl.tensor,
    parts: tl.tensor,
    spans: tl.tensor,
    owners: tl.tensor,
    requests: tl.tensor,
    rows: tl.tensor,
    count: tl.tensor,
    s_row: tl.tensor,
    w_row: tl.tensor,
    l_head: tl.tensor,
    UNIT: tl.constexpr,
) -> None:
    """A tile's share of a sink's gradient: exp(sink - lse) * delta of its rows by a tree of pairs."""
    u = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.load(owners + u)
    found = tl.zeros([1], tl.float32)
    if b < requests:
        r = tl.load(owners + w_row + u) * UNIT + tl.arange(0, UNIT)
        some = r < tl.load(spans + s_row + b)
        at = tl.load(spans + b) + r
        one = tl.load(lse + h * l_head + at, mask=some, other=0.0)
        w = exp(tl.load(sinks + h) - one) * tl.load(delta + h * rows + at, mask=some, other=0.0)
        found = fold(tl.where(some, w, 0.0)[None, :], 1, UNIT)
    tl.store(parts + h * count + u + tl.arange(0, 1), found)


@triton.jit(do_not_specialize=["requests", "count", "s_row"])
def sink_total_kernel(
    parts: tl.tensor,
    spans: tl.tensor,
    grad: tl.tensor,
    requests: tl.tensor,
    count: tl.tensor,
    s_row: tl.tensor,
    UNIT: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """A sequence's tiles by a tree of pairs, sequences one after the other."""
    h = tl.program_id(0)
    total = tl.zeros([1], tl.float32)
    at = 0
    place = tl.arange(0, MOST)
    for b in range(requests):
        tiles = tl.cdiv(tl.load(spans + s_row + b), UNIT)
        x = tl.load(parts + h * count + at + place, mask=place < tiles, other=0.0)
        total += fold(x[None, :], 1, MOST)
        at += tiles
    tl.store(grad + h + tl.arange(0, 1), -total)


@triton.jit
def _rows_of(
    of: Given,
    kx: tl.tensor,
    vx: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    into: tl.tensor,
    h: tl.tensor,
    q0: tl.tensor,
    r0: tl.tensor,
    n: tl.tensor,
    key: tl.tensor,
    window: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOWED: tl.constexpr,
    STORE: tl.constexpr,
    WANT: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The rows r0 .. of head h added to the gradients of a block of keys and of values."""
    row = r0 + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    some = row < n
    at = (q0 + row).to(tl.int64)
    qx = tl.load(of.q + h * of.q_head + at[:, None] * of.q_row + d[None, :], mask=some[:, None], other=0.0)
    gx = tl.load(of.g + h * of.g_head + at[:, None] * of.g_row + d[None, :], mask=some[:, None], other=0.0)
    bx = tl.load(of.base + h * rows + at, mask=some, other=float("inf"))
    dx = tl.load(of.delta + h * rows + at, mask=some, other=0.0)
    s = tl.dot(kx, tl.trans(qx), tl.zeros([KEYS, ROWS], tl.float32))
    cs = tl.full([KEYS, ROWS], 1.0, tl.float32) * of.c
    # a row beyond the sequence has base inf, so p = 0
    p = _unary(tl.fma(s, cs, tl.zeros([KEYS, ROWS], tl.float32) - bx[None, :]), "ex2", HARDWARE)
    # masked everywhere: a second loop without it costs more registers than the mask costs time
    seen = key[:, None] <= row[None, :]
    if WINDOWED:
        seen = seen & (row[None, :] - key[:, None] < window)
    p = tl.where(seen, p, 0.0)
    if WANT != 1:
        dv = tl.dot(p.to(tl.bfloat16), gx, dv)
    if WANT != 2:
        dp = tl.dot(vx, tl.trans(gx), tl.zeros([KEYS, ROWS], tl.float32))
        rounded = (p * (dp - dx[None, :])).to(tl.bfloat16)
        dk = tl.dot(rounded, qx, dk)
    if STORE and WANT != 2:
        to = into + (tl.zeros([], tl.int64) + r0 // UNIT) * (UNIT * UNIT) + r0 % UNIT
        tl.store(to + tl.arange(0, KEYS)[:, None] * UNIT + tl.arange(0, ROWS)[None, :], rounded)
    return dk, dv


@triton.jit(do_not_specialize=_SIZES)
def key_kernel(
    of: Given,
    dk: tl.tensor,
    dv: tl.tensor,
    requests: tl.tensor,
    first_kv: tl.tensor,
    window: tl.tensor,
    rows: tl.tensor,
    stripe: tl.tensor,
    s_row: tl.tensor,
    w_row: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOWED: tl.constexpr,
    STORE: tl.constexpr,
    WANT: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> None:
    u = tl.program_id(0) // (UNIT // KEYS)
    b = tl.load(of.owners + u)
    if b < requests:
        n = tl.load(of.spans + s_row + b)
        index = tl.load(of.owners + w_row + u)
        start = index * UNIT + tl.program_id(0) % (UNIT // KEYS) * KEYS
        if start < n or STORE:
            kv = first_kv + tl.program_id(1)
            q0 = tl.load(of.spans + b)
            k0 = tl.load(of.spans + 3 * s_row + b)
            key = start + tl.arange(0, KEYS)
            d = tl.arange(0, D)
            some = (key < n)[:, None]
            at = (k0 + key).to(tl.int64)[:, None]
            kx = tl.load(of.k + at * of.k_row + kv * of.k_head + d[None, :], mask=some, other=0.0)
            vx = tl.load(of.v + at * of.v_row + kv * of.v_head + d[None, :], mask=some, other=0.0)
            dkx = tl.zeros([KEYS, D], tl.float32)
            dvx = tl.zeros([KEYS, D], tl.float32)
            # rows from the unit's first on, so that what is written down has no holes
            begin = index * UNIT if STORE else start // ROWS * ROWS
            end = tl.cdiv(n, UNIT) * UNIT if STORE else tl.cdiv(n, ROWS) * ROWS
            if WINDOWED:
                end = tl.minimum(end, tl.cdiv(start + KEYS + window - 1, ROWS) * ROWS)
            for one in range(GROUP):
                into = of.ds
                if STORE:
                    # squares of [keys, rows], this head's, from the unit's own rows on
                    head = tl.program_id(1) * GROUP + one
                    into += head.to(tl.int64) * stripe + tl.load(of.places + u) + (start % UNIT) * UNIT
                    into -= index.to(tl.int64) * (UNIT * UNIT)
                for r0 in range(begin, end, ROWS):
                    dkx, dvx = _rows_of(
                        *(of, kx, vx, dkx, dvx, into, kv * GROUP + one, q0, r0, n, key, window, rows),
                        *(D, UNIT, KEYS, ROWS, WINDOWED, STORE, WANT, HARDWARE),
                    )
            # a request that does not bring all its keys' rows is outside the domain, and shows it
            bad = tl.where(tl.load(of.spans + 2 * s_row + b) == n, 0.0, float("nan"))
            to = at * out_row + kv * out_head + d[None, :]
            if WANT != 2:
                tl.store(dk + to, (dkx * of.scale + bad).to(tl.bfloat16), mask=some)
            if WANT != 1:
                tl.store(dv + to, (dvx + bad).to(tl.bfloat16), mask=some)


@triton.jit
def _keys_of(
    of: Given,
    qx: tl.tensor,
    gx: tl.tensor,
    bx: tl.tensor,
    dx: tl.tensor,
    dq: tl.tensor,
    kv: tl.tensor,
    k0: tl.tensor,
    start: tl.tensor,
    n: tl.tensor,
    row: tl.tensor,
    window: tl.tensor,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> tl.tensor:
    """A block of keys added to the gradient of a block of query rows."""
    key = start + tl.arange(0, KEYS)
    d = tl.arange(0, D)
    some = (key < n)[:, None]
    at = (k0 + key).to(tl.int64)[:, None]
    kx = tl.load(of.k + kv * of.k_head + at * of.k_row + d[None, :], mask=some, other=0.0)
    vx = tl.load(of.v + kv * of.v_head + at * of.v_row + d[None, :], mask=some, other=0.0)
    s = tl.dot(qx, tl.trans(kx), tl.zeros([ROWS, KEYS], tl.float32))
    cs = tl.full([ROWS, KEYS], 1.0, tl.float32) * of.c
    p = _unary(tl.fma(s, cs, tl.zeros([ROWS, KEYS], tl.float32) - bx[:, None]), "ex2", HARDWARE)
    if MASKED:
        seen = key[None, :] <= row[:, None]
        if WINDOWED:
            seen = seen & (row[:, None] - key[None, :] < window)
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(gx, tl.trans(vx), tl.zeros([ROWS, KEYS], tl.float32))
    return tl.dot((p * (dp - dx[:, None])).to(tl.bfloat16), kx, dq)


@triton.jit(do_not_specialize=_SIZES)
def query_kernel(
    of: Given,
    dq: tl.tensor,
    requests: tl.tensor,
    first_kv: tl.tensor,
    window: tl.tensor,
    rows: tl.tensor,
    stripe: tl.tensor,
    s_row: tl.tensor,
    w_row: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOWED: tl.constexpr,
    STORED: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> None:
    # the longest first
    x = tl.num_programs(0) - 1 - tl.program_id(0)
    u = x // (UNIT // ROWS)
    b = tl.load(of.owners + u)
    if b < requests:
        n = tl.load(of.spans + s_row + b)
        index = tl.load(of.owners + w_row + u)
        start = index * UNIT + x % (UNIT // ROWS) * ROWS
        if start < n:
            h = first_kv * GROUP + tl.program_id(1)
            kv = h // GROUP
            k0 = tl.load(of.spans + 3 * s_row + b)
            row = start + tl.arange(0, ROWS)
            d = tl.arange(0, D)
            some = row < n
            at = (tl.load(of.spans + b) + row).to(tl.int64)
            acc = tl.zeros([ROWS, D], tl.float32)
            end = tl.cdiv(tl.minimum(start + ROWS, n), KEYS) * KEYS
            if STORED:
                into = of.ds + tl.program_id(1).to(tl.int64) * stripe + tl.load(of.places + u - index)
                units = tl.cdiv(n, UNIT)
                for at_key in range(0, end, KEYS):
                    key = at_key + tl.arange(0, KEYS)
                    unit = at_key // UNIT
                    # squares of the units of keys before this one, and in it those of the rows before these
                    square = units * unit - unit * (unit - 1) // 2 + index - unit
                    line = into + square.to(tl.int64) * (UNIT * UNIT) + (at_key % UNIT) * UNIT + start % UNIT
                    one = tl.load(line + tl.arange(0, KEYS)[:, None] * UNIT + tl.arange(0, ROWS)[None, :])
                    kx = tl.load(
                        of.k + (k0 + key).to(tl.int64)[:, None] * of.k_row + kv * of.k_head + d[None, :],
                        mask=(key < n)[:, None],
                        other=0.0,
                    )
                    acc = tl.dot(tl.trans(one), kx, acc)
            else:
                to_q = of.q + at[:, None] * of.q_row + h * of.q_head + d[None, :]
                to_g = of.g + at[:, None] * of.g_row + h * of.g_head + d[None, :]
                qx = tl.load(to_q, mask=some[:, None], other=0.0)
                gx = tl.load(to_g, mask=some[:, None], other=0.0)
                bx = tl.load(of.base + h * rows + at, mask=some, other=float("inf"))
                dx = tl.load(of.delta + h * rows + at, mask=some, other=0.0)
                first = 0
                if WINDOWED:
                    first = tl.maximum(start - window + 1, 0) // KEYS * KEYS
                # one loop, all masked, costs fewer registers
                LAST: tl.constexpr = 0 if WINDOWED or D == 256 else 1
                inner = first if LAST == 0 else start // KEYS * KEYS
                for half in tl.static_range(LAST + 1):
                    for at_key in range(
                        inner if half == LAST else first, end if half == LAST else inner, KEYS
                    ):
                        acc = _keys_of(
                            *(of, qx, gx, bx, dx, acc, kv, k0, at_key, n, row, window),
                            *(D, KEYS, ROWS, half == LAST, WINDOWED, HARDWARE),
                        )
            bad = tl.where(tl.load(of.spans + 2 * s_row + b) == n, 0.0, float("nan"))
            to = at[:, None] * out_row + h * out_head + d[None, :]
            tl.store(dq + to, (acc * of.scale + bad).to(tl.bfloat16), mask=some[:, None])


def _stripes(spans: Tensor, owners: Tensor) -> Tensor:
    """Where the stripe of each unit begins among a head's written-down products, in elements: int64 [units]."""
    units = (spans[1].long() + UNIT - 1) // UNIT
    before = (units * (units + 1) // 2).cumsum(0) - units * (units + 1) // 2
    b = owners[0].long().clamp(max=len(units) - 1)  # beyond the last unit anywhere: nobody asks
    i = owners[1].long()
    return (before[b] + units[b] * i - i * (i - 1) // 2) * (UNIT * UNIT)


def launch_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    g: Tensor,
    spans: Tensor,
    owners: Tensor,
    sinks: Tensor | None,
    *,
    scale: float,
    window: int,
    most_rows: int,
    workspace: int = -1,
    key: Walk | None = None,
    query: Walk | None = None,
    stored: Walk | None = None,
    hardware: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq [T, H, D], dk and dv as k and v, dsinks fp32 [H] or None) of packed sequences from position 0.

    q, out and g [T, H, D], k and v [keys, KV, D] bf16, lse [H, T] fp32; spans and owners as `launch_tiles`, a tile UNIT rows,
    no sequence longer than `most_rows`. Rows and keys that no request has get zeros. Free of bits: `workspace` bytes, the walks.
    """
    T, H, D = q.shape
    KV = k.shape[1]
    group = H // KV
    device = q.device
    dq, dk, dv = (
        torch.zeros(x.shape, dtype=x.dtype, device=device) for x in (q, k, v)
    )  # what a table's bounds leave out stays zero
    if not T:
        return dq, dk, dv, None if sinks is None else torch.zeros_like(sinks)
    g = g if g.stride(-1) == 1 else g.contiguous()
    delta = torch.empty(H, T, dtype=torch.float32, device=device)
    base = torch.empty_like(delta)
    few = 4096 // D
    delta_kernel[(-(-T // few), H)](
        *(g, out, lse, delta, base, T, g.stride(0), g.stride(1), out.stride(0), out.stride(1), lse.stride(0)),
        D=D,
        ROWS=few,
        num_warps=4,
        enable_fp_fusion=False,
    )
    units, requests = owners.shape[1], spans.shape[1]
    dsinks = None
    if sinks is not None:
        dsinks = torch.empty_like(sinks)
        parts = torch.empty(H, units, dtype=torch.float32, device=device)
        counts = (requests, T, units, spans.stride(0), owners.stride(0), lse.stride(0))
        sink_kernel[(units, H)](
            *(lse, delta, sinks, parts, spans, owners, *counts),
            UNIT=UNIT,
            num_warps=1,
            enable_fp_fusion=False,
        )
        most = power_of_two(-(-most_rows // UNIT))
        sink_total_kernel[(H,)](
            *(parts, spans, dsinks, requests, units, spans.stride(0)),
            UNIT=UNIT,
            MOST=most,
            num_warps=1,
            enable_fp_fusion=False,
        )
    walk_key, walk_query, walk_stored = key or KEY[D], query or QUERY[D], stored or STORED[D]
    most = -(-most_rows // UNIT)
    elements = units * (most + 1) // 2 * UNIT * UNIT  # of one head at most
    room = (WORKSPACE[D] if workspace < 0 else workspace) // (2 * elements * group)
    store = room > 0 and window == 0
    at_once = min(KV, room) if store else KV
    ds = torch.empty(at_once * group * elements if store else 0, dtype=torch.bfloat16, device=device)
    places = _stripes(spans, owners) if store else owners
    of = Given(
        *(q, k, v, g, base, delta, ds, spans, owners, places),
        *(constants(scale)[0], float(torch.tensor(scale, dtype=torch.float32))),
        *(
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            g.stride(0),
            g.stride(1),
        ),
    )
    sizes = (T, elements, spans.stride(0), owners.stride(0))
    walk = walk_stored if store else walk_query
    for first in range(0, KV, at_once):
        some = min(at_once, KV - first)
        cut = {"GROUP": group, "D": D, "UNIT": UNIT, "WINDOWED": window > 0, "HARDWARE": hardware}
        for want in (1, 2) if walk_key.apart else (0,):
            key_kernel[(units * (UNIT // walk_key.hold), some)](
                *(of, dk, dv, requests, first, window, *sizes, dk.stride(0), dk.stride(1)),
                **cut,
                KEYS=walk_key.hold,
                ROWS=walk_key.step,
                STORE=store,
                WANT=want,
                num_warps=walk_key.warps,
                num_stages=walk_key.stages,
                enable_fp_fusion=False,
            )
        query_kernel[(units * (UNIT // walk.hold), some * group)](
            *(of, dq, requests, first, window, *sizes, dq.stride(0), dq.stride(1)),
            **cut,
            KEYS=walk.step,
            ROWS=walk.hold,
            STORED=store,
            num_warps=walk.warps,
            num_stages=walk.stages,
            enable_fp_fusion=False,
        )
    return dq, dk, dv, dsinks
