# SPDX-License-Identifier: Apache-2.0
"""Decode of few requests with the segments' bits: keys in parallel for the scores, columns in parallel for the values.

A segment is one chain, so the library gives it to one multiprocessor per KV head, and few requests leave most of them idle.
But only three things of the chain are serial: a running maximum, which is exact in any order, the sum of the weights, and
each column's own products. So one kernel takes the scores of every block and their maxima, a second all weights, and then
one walks the chain of products for a few columns in each program while another adds the weights up. Free of bits: `Tuning`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from isoexec.kernels.attention.hopper.kernel import _unary, lane_total, log_sum_exp
from isoexec.kernels.attention.hopper.naive import BLOCK, constants
from isoexec.kernels.hopper.arithmetic import power_of_two

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["MOST_GROUP", "Tuning", "aside", "launch_scored", "launch_split"]

MOST_GROUP = 16  # query heads a KV head


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Free of bits: columns a program of the values takes, blocks one of the scores, blocks the sums read at a time.

    `unrolled`: blocks that an iteration of the values takes; its stages are of so many blocks.
    """

    columns: int
    warps: int
    stages: int
    score_blocks: int
    score_warps: int
    score_stages: int
    ahead: int
    unrolled: int = 1


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def aside(device: torch.device) -> Iterator[Callable[[], None]]:
    """Run what is inside on a side stream, after what was asked for until now; what it yields waits for it."""
    if device.type != "cuda":
        yield lambda: None
        return
    main, side = torch.cuda.current_stream(device), _side(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield lambda: main.wait_stream(side)


@triton.jit(do_not_specialize=["B", "tokens", "t_row", "BLOCKS"])
def scores_kernel(
    q: tl.tensor,
    k: tl.tensor,
    table: tl.tensor,
    pages: tl.tensor,
    scores: tl.tensor,
    tops: tl.tensor,
    B: tl.tensor,
    tokens: tl.tensor,
    t_row: tl.tensor,
    p_row: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_page: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.tensor,
    PAGE: tl.constexpr,
    PER: tl.constexpr,
) -> None:
    at = tl.program_id(1)
    e = at // KV
    kv = at % KV
    used = tl.load(table + 2 * t_row + e)
    begin = tl.program_id(0) * PER
    if begin * KEYS < used:
        row = (tl.load(table + e) - (e // B) * tokens).to(tl.int64)
        base = tl.load(table + 3 * t_row + e)
        g = tl.arange(0, 16)
        d = tl.arange(0, D)
        col = tl.arange(0, WIDTH)
        some = g < GROUP
        x = tl.load(
            q + row * q_row + (kv * GROUP + g)[:, None] * q_head + d[None, :], mask=some[:, None], other=0.0
        )
        for u in range(PER):
            i = begin + u
            key = i * KEYS + col
            real = (col < KEYS) & (key < used)
            if PAGE == 0:
                place = (base + key).to(tl.int64) * k_row
            else:
                slot = key // PAGE
                page = tl.load(pages + e.to(tl.int64) * p_row + slot, mask=slot < p_row, other=0).to(tl.int64)
                place = page * k_page + (key % PAGE) * k_row
            y = tl.load(k + place[None, :] + kv * k_head + d[:, None], mask=real[None, :], other=0.0)
            s = tl.dot(x, y, tl.zeros([16, WIDTH], tl.float32))
            s = tl.where(real[None, :], s, float("-inf"))
            block = (at * BLOCKS + i).to(tl.int64)
            written = some[:, None] & ((col < KEYS) & (col * 0 + i * KEYS < used))[None, :]
            tl.store(scores + (block * GROUP + g)[:, None] * KEYS + col[None, :], s, mask=written)
            tl.store(tops + block * GROUP + g, tl.max(s, axis=1), mask=some & (g * 0 + i * KEYS < used))


@triton.jit(do_not_specialize=["t_row", "BLOCKS"])
def weights_kernel(
    table: tl.tensor,
    scores: tl.tensor,
    tops: tl.tensor,
    weights: tl.tensor,
    ordered: tl.tensor,
    fades: tl.tensor,
    pages: tl.tensor,
    lies: tl.tensor,
    c: tl.tensor,
    t_row: tl.tensor,
    p_row: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    CHAINS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.tensor,
    MOST: tl.constexpr,
    PAGE: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> None:
    i = tl.program_id(0)
    at = tl.program_id(1)
    e = at // KV
    used = tl.load(table + 2 * t_row + e)
    if i * KEYS < used:
        g = tl.arange(0, 16)
        col = tl.arange(0, WIDTH)
        some = g < GROUP
        first = (at * BLOCKS).to(tl.int64)
        if at % KV == 0:  # where the values of each key lie, for every KV head; beyond the last key anywhere
            key = i * KEYS + col
            if PAGE == 0:
                place = tl.load(table + 3 * t_row + e) + key
            else:
                slot = key // PAGE
                page = tl.load(pages + e.to(tl.int64) * p_row + slot, mask=slot < p_row, other=0)
                place = page * PAGE + key % PAGE
            place = tl.where((col < KEYS) & (key < used), place, 0)
            tl.store(lies + ((e * BLOCKS).to(tl.int64) + i) * WIDTH + col, place)
        # the chain has come from the last block to this one
        every = tl.arange(0, MOST)
        past = (every > i) & (every * KEYS < used)
        top = tl.load(tops + (first + i) * GROUP + g, mask=some, other=float("-inf"))
        later = tl.load(
            tops + (first + every)[:, None] * GROUP + g[None, :],
            mask=past[:, None] & some[None, :],
            other=float("-inf"),
        )
        m = tl.max(later, axis=0)
        high = tl.maximum(m, top)
        base = tl.where(high == float("-inf"), 0.0, high)
        tl.store(fades + (first + i) * 16 + g, _unary((m - base) * c, "ex2", HARDWARE))
        s = tl.load(
            scores + ((first + i) * GROUP + g)[:, None] * KEYS + col[None, :],
            mask=some[:, None] & (col < KEYS)[None, :],
            other=float("-inf"),
        )
        cs = tl.full([16, WIDTH], 1.0, tl.float32) * c
        p = _unary(tl.fma(s, cs, tl.zeros([16, WIDTH], tl.float32) - (base * c)[:, None]), "ex2", HARDWARE)
        tl.store(weights + ((first + i) * 16 + g)[:, None] * WIDTH + col[None, :], p.to(tl.bfloat16))
        # [order of a lane's additions, head of the group and lane]
        order = (col // 8) * 2 + col % 2
        chain = g[:, None] * 4 + ((col // 2) % 4)[None, :]
        tl.store(
            ordered + ((first + i) * (KEYS // 4) + order[None, :]) * CHAINS + chain,
            p,
            mask=some[:, None] & (col < KEYS)[None, :],
        )


@triton.jit(do_not_specialize=["rows", "t_row", "BLOCKS"])
def sums_kernel(
    table: tl.tensor,
    ordered: tl.tensor,
    fades: tl.tensor,
    tops: tl.tensor,
    total: tl.tensor,
    lse: tl.tensor,
    c_ln2: tl.tensor,
    rows: tl.tensor,
    t_row: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    CHAINS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.tensor,
    MOST: tl.constexpr,
    AHEAD: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> None:
    """The weights of every row added in each lane's order, `AHEAD` blocks read at a time, and what comes of the sums."""
    at = tl.program_id(0)
    e = at // KV
    kv = at % KV
    used = tl.load(table + 2 * t_row + e)
    if used > 0:
        row = tl.load(table + e).to(tl.int64)
        blocks = tl.cdiv(used, KEYS)
        chain = tl.arange(0, CHAINS)
        some = chain // 4 < GROUP
        first = (at * BLOCKS).to(tl.int64)
        lanes = tl.zeros([CHAINS], tl.float32)
        for several in range(tl.cdiv(blocks, AHEAD)):
            for one in tl.static_range(AHEAD):
                i = blocks - 1 - AHEAD * several - one
                live = some & (chain * 0 + i >= 0)  # before the first block: nothing fades, nothing is added
                r = tl.load(fades + (first + i) * 16 + chain // 4, mask=live, other=1.0)
                for a in tl.static_range(KEYS // 4):
                    p = tl.load(
                        ordered + ((first + i) * (KEYS // 4) + a) * CHAINS + chain, mask=live, other=0.0
                    )
                    lanes = tl.fma(lanes, r, p) if a == 0 else lanes + p
        found = lane_total(tl.reshape(lanes, (CHAINS // 4, 4)))
        h = tl.arange(0, CHAINS // 4)
        every = tl.arange(0, MOST)
        highest = tl.max(
            tl.load(
                tops + (first + every)[:, None] * GROUP + h[None, :],
                mask=(every < blocks)[:, None] & (h < GROUP)[None, :],
                other=float("-inf"),
            ),
            axis=0,
        )
        last = log_sum_exp(highest, found, c_ln2, HARDWARE)
        tl.store(total + (kv * GROUP + h) * rows + row, found, mask=h < GROUP)
        tl.store(lse + (kv * GROUP + h) * rows + row, last, mask=h < GROUP)


@triton.jit
def _values_of(
    o: tl.tensor,
    r: tl.tensor,
    values: tl.tensor,
    lie: tl.tensor,
    weight: tl.tensor,
    fade: tl.tensor,
    i: tl.tensor,
    used: tl.tensor,
    v_page: tl.tensor,
    v_row: tl.tensor,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Block i's weighed values added to what was before it, and the fade of the block after."""
    col = tl.arange(0, WIDTH)
    place = tl.load(lie + i * WIDTH)
    if PAGE == 0:  # noqa: SIM108 - Triton would compile both
        at_key = place.to(tl.int64) * v_row
    else:
        at_key = (place // PAGE).to(tl.int64) * v_page + (place % PAGE) * v_row
    real = (col < KEYS) & (i * KEYS + col < used)
    y = tl.load(values + at_key[:, None], mask=real[:, None], other=0.0)
    p = tl.load(weight + i * (16 * WIDTH))
    r_next = tl.load(fade + tl.maximum(i - 1, 0) * 16)
    return tl.dot(p, y, o * r[:, None]), r_next


@triton.jit(do_not_specialize=["t_row", "BLOCKS"])
def values_kernel(
    v: tl.tensor,
    table: tl.tensor,
    lies: tl.tensor,
    weights: tl.tensor,
    fades: tl.tensor,
    out: tl.tensor,
    t_row: tl.tensor,
    v_page: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.tensor,
    PAGE: tl.constexpr,
    UNROLLED: tl.constexpr,
) -> None:
    at = tl.program_id(1)
    e = at // KV
    kv = at % KV
    used = tl.load(table + 2 * t_row + e)
    if used > 0:
        row = tl.load(table + e).to(tl.int64)
        blocks = tl.cdiv(used, KEYS)
        g = tl.arange(0, 16)
        col = tl.arange(0, WIDTH)
        d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        values = v + kv * v_head + d[None, :]
        fade = fades + (at * BLOCKS).to(tl.int64) * 16 + g
        weight = weights + ((at * BLOCKS).to(tl.int64) * 16 + g)[:, None] * WIDTH + col[None, :]
        lie = lies + (e * BLOCKS).to(tl.int64) * WIDTH + col
        o = tl.zeros([16, COLUMNS], tl.float32)
        # a fade is read a block ahead; further would keep Triton from pipelining the loop
        r = tl.load(fade + (blocks - 1) * 16)
        left = blocks % UNROLLED
        if UNROLLED > 1:
            for step in range(left):
                o, r = _values_of(
                    *(o, r, values, lie, weight, fade, blocks - 1 - step, used),
                    *(v_page, v_row, KEYS, WIDTH, PAGE),
                )
        for several in range(blocks // UNROLLED):
            for one in tl.static_range(UNROLLED):
                o, r = _values_of(
                    *(o, r, values, lie, weight, fade, blocks - 1 - left - several * UNROLLED - one, used),
                    *(v_page, v_row, KEYS, WIDTH, PAGE),
                )
        at_row = out + (row * (KV * GROUP) + (kv * GROUP + g))[:, None] * D + d[None, :]
        tl.store(at_row, o, mask=(g < GROUP)[:, None])


def launch_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    pages: Tensor | None,
    *,
    requests: int,
    kv_segment: int,
    scale: float,
    tuning: Tuning,
    hardware: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of a SINGLE table: (o [rows, H, D] before its division, l [H, rows], lse [H, rows]), all fp32.

    `rows` counts a row a request and segment, as the table does. Rows that no entry has are not written.
    """
    T, H, D = q.shape

    def score(grid: tuple[int, int], tables: tuple[Tensor, ...], cut: dict[str, Any]) -> None:
        own, paged, scores, tops = tables
        scores_kernel[grid](
            *(q, k, own, paged, scores, tops, requests, T, own.stride(0), paged.stride(0)),
            *(q.stride(0), q.stride(1), k.stride(0), k.stride(-3), k.stride(-2)),
            **cut,
            D=D,
            PER=tuning.score_blocks,
            num_warps=tuning.score_warps,
            # keys looked up by page are two loads, and stages count both
            num_stages=tuning.score_stages if pages is not None else (tuning.score_stages + 1) // 2,
            enable_fp_fusion=False,
        )

    return launch_scored(
        *(score, v, table, pages),
        rows=(table.shape[1] - 1) // requests * T,  # a request may have no row
        heads=H,
        keys=BLOCK[D],
        kv_segment=kv_segment,
        scale=scale,
        tuning=tuning,
        hardware=hardware,
    )


def launch_scored(
    score: Callable[[tuple[int, int], tuple[Tensor, ...], dict[str, Any]], None],
    v: Tensor,
    table: Tensor,
    pages: Tensor | None,
    *,
    rows: int,
    heads: int,
    keys: int,
    kv_segment: int,
    scale: float,
    tuning: Tuning,
    hardware: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `launch_split`, whose scores of blocks of `keys` are what `score` launches.

    v is [keys, KV, V] or [pages, page, KV, V] bf16, and KV groups of `heads` share keys; `score(grid, (table, pages, scores,
    tops), constants)` writes the scores [GROUP, KEYS] and their maxima [GROUP], both fp32, of every entry, group and block.
    """
    KV, V = v.shape[-2:]
    entries = table.shape[1] - 1
    blocks = -(-kv_segment // keys)
    group = heads // KV
    assert group <= MOST_GROUP
    device = v.device
    chains = 4 * power_of_two(group)
    places = entries * KV * blocks
    width, most = power_of_two(keys), power_of_two(blocks)

    def space(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    scores, tops, fades = space(places * group * keys), space(places * group), space(places * 16)
    weights, ordered = space(places * 16 * width, dtype=torch.bfloat16), space(places * chains * (keys // 4))
    lies = space(entries * blocks * width, dtype=torch.int32)
    out, total, lse = space(rows, heads, V), space(heads, rows), space(heads, rows)
    paged = table if pages is None else pages
    c, c_ln2 = constants(scale)
    both: dict[str, Any] = {"KV": KV, "GROUP": group, "KEYS": keys, "BLOCKS": blocks}
    page = {"WIDTH": width, "PAGE": 0 if pages is None else v.shape[1]}
    plain = {"HARDWARE": hardware, "enable_fp_fusion": False}
    grid = (-(-blocks // tuning.score_blocks), entries * KV)
    score(grid, (table, paged, scores, tops), {**both, **page})
    weights_kernel[(blocks, entries * KV)](
        *(table, scores, tops, weights, ordered, fades, paged, lies, c, table.stride(0), paged.stride(0)),
        **both,
        **page,
        CHAINS=chains,
        MOST=most,
        num_warps=4,
        **plain,
    )
    with aside(device) as join:
        sums_kernel[(entries * KV,)](
            *(table, ordered, fades, tops, total, lse, c_ln2, rows, table.stride(0)),
            **both,
            CHAINS=chains,
            MOST=most,
            AHEAD=tuning.ahead,
            num_warps=1,
            **plain,
        )
    values_kernel[(V // tuning.columns, entries * KV)](
        *(v, table, lies, weights, fades, out, table.stride(0)),
        *(v.stride(0), v.stride(-3), v.stride(-2)),
        **both,
        **page,
        D=V,
        COLUMNS=tuning.columns,
        UNROLLED=tuning.unrolled,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        enable_fp_fusion=False,
    )
    join()
    return out, total, lse
