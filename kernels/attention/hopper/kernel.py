# SPDX-License-Identifier: Apache-2.0
"""What every way to compute attention on sm90 shares: one block's weights, the merge of segments, a provider's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.attention.hopper.naive import LN2
from isoexec.kernels.hopper.arithmetic import exp, log, power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OWN", "PAST", "SINGLE", "lane_total", "launch_merge", "launch_tables", "log_sum_exp"]

OWN, PAST, SINGLE = 0, 1, 2  # what a table's entries are: `launch_tables`
ROWS_OF_TABLE = 5
TOTAL_STEP = 1 << 16  # above any number of rows a call may have
_LN2 = tl.constexpr(LN2)
_STEP = tl.constexpr(TOTAL_STEP)
_UNROLLED = 16  # segments whose loads a merge issues at once


@triton.jit
def _unary(x: tl.tensor, NAME: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """exp2, log2 or 1 / x of the chip's special function unit; elsewhere Triton's own."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            NAME + ".approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505 - Triton compiles both branches unless the condition decides
        if NAME == "ex2":
            return tl.exp2(x)
        if NAME == "lg2":
            return tl.log2(x)
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def lane_total(lanes: tl.tensor) -> tl.tensor:
    """[rows, 4] -> [rows]: (l_0 + l_2) + (l_1 + l_3)."""
    lane = tl.arange(0, 4)[None, :]
    l0 = tl.sum(tl.where(lane == 0, lanes, 0.0), axis=1)
    l1 = tl.sum(tl.where(lane == 1, lanes, 0.0), axis=1)
    l2 = tl.sum(tl.where(lane == 2, lanes, 0.0), axis=1)
    l3 = tl.sum(tl.where(lane == 3, lanes, 0.0), axis=1)
    return (l0 + l2) + (l1 + l3)


@triton.jit
def log_sum_exp(m: tl.tensor, total: tl.tensor, c_ln2: tl.tensor, HARDWARE: tl.constexpr) -> tl.tensor:
    """Of rows with the maximum m and the sum of weights `total`, [rows] each."""
    return tl.fma(m, tl.full(m.shape, 1.0, tl.float32) * c_ln2, _unary(total, "lg2", HARDWARE) * _LN2)


@triton.jit
def _weighed(
    s: tl.tensor,
    m: tl.tensor,
    lanes: tl.tensor,
    c: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A block's weights [ROWS, WIDTH], the fade of what was before it, the lanes with its weights, and the new maximum."""
    high = tl.maximum(m, tl.max(s, axis=1))
    base = tl.where(high == float("-inf"), 0.0, high)
    r = _unary((m - base) * c, "ex2", HARDWARE)
    cs = tl.full([ROWS, WIDTH], 1.0, tl.float32) * c
    p = _unary(tl.fma(s, cs, tl.zeros([ROWS, WIDTH], tl.float32) - (base * c)[:, None]), "ex2", HARDWARE)
    # [rows, key // 8, lane, key % 2] -> [rows, lane, order]
    order = tl.reshape(
        tl.permute(tl.reshape(p, (ROWS, WIDTH // 8, 4, 2)), (0, 2, 1, 3)), (ROWS, 4, WIDTH // 4)
    )
    place = tl.arange(0, WIDTH // 4)
    for a in range(KEYS // 4):
        one = tl.sum(tl.where(place[None, None, :] == a, order, 0.0), axis=2)
        lanes = tl.where(a == 0, tl.fma(lanes, tl.broadcast_to(r[:, None], (ROWS, 4)), one), lanes + one)
    return p, r, lanes, high


@triton.jit
def _merged(
    o: tl.tensor,
    w: tl.tensor,
    acc: tl.tensor,
    total: tl.tensor,
    live: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """One segment's term; a segment that the row has not leaves both as they are."""
    added = tl.fma(tl.broadcast_to(w[:, None], acc.shape), o, acc)
    return tl.where(live[:, None], added, acc), tl.where(live, total + w, total)


@triton.jit(do_not_specialize=["kv_segment", "window", "ol_head", "pl_slot", "pl_head", "wl_head"])
def merge_kernel(
    own: tl.tensor,
    own_lse: tl.tensor,
    parts: tl.tensor,
    part_lse: tl.tensor,
    position: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    whole_lse: tl.tensor,
    kv_segment: tl.tensor,
    window: tl.tensor,
    heads: tl.tensor,
    own_row: tl.tensor,
    own_head: tl.tensor,
    ol_head: tl.tensor,
    part_slot: tl.tensor,
    part_row: tl.tensor,
    part_head: tl.tensor,
    pl_slot: tl.tensor,
    pl_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    wl_head: tl.tensor,
    part_total: tl.tensor,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    SEPARATE: tl.constexpr,
    SINK: tl.constexpr,
    TOTALS: tl.constexpr,
    WINDOWED: tl.constexpr,
    LSE: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64)
    at = tl.load(position + t)
    last = (at // kv_segment).to(tl.int32)
    first = (tl.maximum(at - window + 1, 0) // kv_segment).to(tl.int32) if WINDOWED else 0
    if last > 0 or SINK or not SEPARATE:
        h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        some = h < heads
        d = tl.arange(0, D)
        part = parts + t * part_row + h[:, None] * part_head + d[None, :]
        part_l = part_lse + h * pl_head + t
        # with SEPARATE the row's own segment stands apart and `parts` hold those before it; else segment j is in j % SLOTS
        count = tl.zeros([HEADS], tl.int32) + (last if SEPARATE else last + 1 - first)
        top = tl.full([HEADS], float("-inf"), tl.float32)
        if SEPARATE:
            own_l = tl.load(own_lse + h * ol_head + t, mask=some, other=0.0)
            top = own_l
        for j in tl.static_range(SLOTS):
            slot = tl.zeros([], tl.int64) + ((first + j) % SLOTS if WINDOWED else j)
            lj = tl.load(part_l + slot * pl_slot, mask=some & (j < count), other=float("-inf"))
            top = tl.maximum(top, lj)
        if SINK:
            sink = tl.load(sinks + h, mask=some, other=0.0)
            top = tl.maximum(top, sink)
        acc = tl.zeros([HEADS, D], tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        for j in tl.static_range(SLOTS):
            live = j < count
            slot = tl.zeros([], tl.int64) + ((first + j) % SLOTS if WINDOWED else j)
            lj = tl.load(part_l + slot * pl_slot, mask=some & live, other=0.0)
            oj = tl.load(part + slot * part_slot, mask=(some & live)[:, None], other=0.0).to(tl.float32)
            if TOTALS:
                tj = tl.load(part_total + h * pl_head + t + slot * pl_slot, mask=some & live, other=1.0)
                oj = (oj * _unary(tj, "rcp", HARDWARE)[:, None]).to(tl.bfloat16).to(tl.float32)
            acc, total = _merged(oj, exp(lj - top), acc, total, live)
        if SEPARATE:
            mine = tl.load(
                own + t * own_row + h[:, None] * own_head + d[None, :], mask=some[:, None], other=0.0
            )
            acc, total = _merged(mine.to(tl.float32), exp(own_l - top), acc, total, some)
        if SINK:
            total = total + exp(sink - top)
        y = tl.div_rn(acc, tl.broadcast_to(total[:, None], (HEADS, D))).to(tl.bfloat16)
        if not SEPARATE and not SINK:
            slot = tl.zeros([], tl.int64) + (first % SLOTS if WINDOWED else 0)
            alone = tl.load(part + slot * part_slot, mask=some[:, None], other=0.0)
            if TOTALS:
                tj = tl.load(part_total + h * pl_head + t + slot * pl_slot, mask=some, other=1.0)
                alone = alone * _unary(tj, "rcp", HARDWARE)[:, None]
            y = tl.where(last == first, alone.to(tl.bfloat16), y)
        if LSE:
            tl.store(whole_lse + h * wl_head + t, top + log(total), mask=some)
        tl.store(out + t * out_row + h[:, None] * out_head + d[None, :], y, mask=some[:, None])


@triton.jit(do_not_specialize=["B", "entries", "tokens", "kv_segment", "width", "b_row", "t_row"])
def table_kernel(
    q_start: tl.tensor,
    lengths: tl.tensor,
    k_start: tl.tensor,
    blocks: tl.tensor,
    table: tl.tensor,
    pages: tl.tensor,
    B: tl.tensor,
    entries: tl.tensor,
    tokens: tl.tensor,
    kv_segment: tl.tensor,
    width: tl.tensor,
    b_row: tl.tensor,
    t_row: tl.tensor,
    KIND: tl.constexpr,
    FOLDED: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
) -> None:
    e = tl.program_id(0)
    if e == entries:
        tl.store(table + e, tokens)
    else:
        b = e % B
        j = e // B
        q0 = tl.load(q_start + b)
        rows = tl.load(q_start + b + 1) - q0
        length = tl.load(lengths + b)
        start = length - rows
        if KIND == 0:
            segment = start // kv_segment + j
            low = tl.maximum(start, segment * kv_segment)
            high = tl.minimum(length, (segment + 1) * kv_segment)
        else:
            segment = j
            low = start
            high = length
            if KIND == 1:
                low = tl.maximum(start, (segment + 1) * kv_segment)
        count = tl.maximum(high - low, 0)
        if KIND == 2:
            count = tl.where(length > segment * kv_segment, count, 0)
        used = tl.minimum(high - segment * kv_segment, kv_segment)
        used = tl.where(count > 0, used, 0)
        at = tl.where(count > 0, q0 + low - start, 0)
        if FOLDED:
            at += j * tokens
        tl.store(table + e, at)
        tl.store(table + t_row + e, count)
        tl.store(table + 2 * t_row + e, used)
        tl.store(table + 4 * t_row + e, kv_segment * _STEP)
        if PAGE == 0:
            base = tl.load(k_start + b)
            tl.store(table + 3 * t_row + e, tl.where(count > 0, base + segment * kv_segment, 0))
        else:
            tl.store(table + 3 * t_row + e, 0)
            per = kv_segment // PAGE
            for first in range(0, per, PAGES):
                w = first + tl.arange(0, PAGES)
                block = segment * per + w
                real = (w < per) & (w * PAGE < used) & (block < width)
                found = tl.load(blocks + b.to(tl.int64) * b_row + block, mask=real, other=0)
                tl.store(pages + e.to(tl.int64) * per + w, found, mask=w < per)


def launch_merge(
    own: Tensor | None,
    own_lse: Tensor | None,
    parts: Tensor,
    part_lse: Tensor,
    position: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    *,
    kv_segment: int,
    window: int = 0,
    totals: Tensor | None = None,
    whole_lse: Tensor | None = None,
    hardware: bool = True,
) -> None:
    """Merge each row's segments into `out [T, H, D]`, and its log-sum-exp into `whole_lse [H, T]` where that is given.

    With `own [T, H, D]` and `own_lse [H, T]`, `parts [n, T, H, D]` and `part_lse [n, H, T]` hold the segments before a row's
    own, and `out` must be `own` itself, `whole_lse` be `own_lse`: rows in their first segment are not touched, unless there are
    sinks. Without `own`, part j is segment j, or with a `window` each segment modulo their number. With `totals`, laid out as
    `part_lse`, the parts are fp32 and still to be divided by them.
    """
    T, H, D = out.shape
    if not T:
        return
    separate = own is not None and own_lse is not None
    a = out if own is None else own
    b = part_lse[0] if own_lse is None else own_lse
    elements = 512 if T < 64 else 4096  # free of bits
    heads = min(power_of_two(H), max(1, elements // D))
    merge_kernel[(T, -(-H // heads))](
        a,
        b,
        parts,
        part_lse,
        position,
        out if sinks is None else sinks,
        out,
        b if whole_lse is None else whole_lse,
        kv_segment,
        window,
        H,
        *(a.stride(0), a.stride(1), b.stride(0)),
        *(parts.stride(0), parts.stride(1), parts.stride(2), part_lse.stride(0), part_lse.stride(1)),
        *(out.stride(0), out.stride(1), 0 if whole_lse is None else whole_lse.stride(0)),
        part_lse if totals is None else totals,
        SLOTS=len(parts),
        D=D,
        HEADS=heads,
        SEPARATE=separate,
        SINK=sinks is not None,
        TOTALS=totals is not None,
        WINDOWED=window > 0,
        LSE=whole_lse is not None,
        HARDWARE=hardware,
        num_warps=4,
        enable_fp_fusion=False,
    )


def launch_tables(
    kind: int,
    q_start: Tensor,
    lengths: Tensor,
    k_start: Tensor | None,
    blocks: Tensor | None,
    table: Tensor,
    pages: Tensor | None,
    *,
    tokens: int,
    kv_segment: int,
    page: int,
    folded: bool,
) -> None:
    """Fill `table [5, entries + 1]` and `pages [entries, kv_segment / page]` for one call of a provider, on the device.

    Entry e = j * B + b belongs to request b, whose rows are q_start[b] .. q_start[b + 1] and whose keys, this step's included,
    number lengths[b]; they lie from k_start[b] on, or in the pages blocks[b]. OWN: the rows in the j-th of the segments that the
    rows touch, with that segment's keys. PAST: the rows beyond segment j, with its keys. SINGLE: all rows (one) and segment j.
    The rows of the table: first query row (and `tokens` at the end), number of rows, number of keys, first key, and the total
    that lets every row of a PAST entry see every key. `folded` shifts the rows of entry j by j * tokens.
    """
    entries = table.shape[1] - 1
    assert table.shape[0] == ROWS_OF_TABLE
    assert entries % len(lengths) == 0
    table_kernel[(entries + 1,)](
        q_start,
        lengths,
        lengths if k_start is None else k_start,
        lengths if blocks is None else blocks,
        table,
        table if pages is None else pages,
        len(lengths),
        entries,
        tokens,
        kv_segment,
        0 if blocks is None else blocks.shape[1],
        0 if blocks is None else blocks.stride(0),
        table.stride(0),
        KIND=kind,
        FOLDED=folded,
        PAGE=0 if blocks is None else page,
        PAGES=256,
        num_warps=4,
    )
