# SPDX-License-Identifier: Apache-2.0
"""The segments of attention.mma_segments/1 and attention.mma_window/1 by an own kernel, prefill and decode alike.

A program takes the heads of one KV group at neighbouring tokens over one segment. It walks the blocks that any of its rows
sees, from the last to the first; a block that a row does not see leaves the row's numbers as they are, so tokens a tile,
warps and stages are free of bits. The weights of a block are added by taking halves apart until single keys are left, in the
order of their index, which is the order the specification names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.attention.hopper.kernel import _unary, lane_total, log_sum_exp
from isoexec.kernels.attention.hopper.naive import BLOCK, WINDOW_BLOCK, constants
from isoexec.kernels.hopper.arithmetic import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DECODE",
    "PREFILL",
    "WINDOW",
    "Tile",
    "cache_of",
    "launch_map",
    "launch_tiles",
    "place_of",
    "tile_of",
    "tokens_of",
    "weigh",
]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Free of bits: query rows of a tile, warps, stages of the loads."""

    rows: int
    warps: int
    stages: int


PREFILL = {
    64: Tile(rows=128, warps=8, stages=3),
    128: Tile(rows=64, warps=8, stages=2),
    256: Tile(rows=64, warps=8, stages=1),
}
WINDOW = {**PREFILL, 256: Tile(rows=64, warps=8, stages=2)}
DECODE = {
    64: Tile(rows=16, warps=4, stages=3),
    128: Tile(rows=16, warps=4, stages=3),
    256: Tile(rows=16, warps=8, stages=2),
}


def tokens_of(tile: Tile, group: int) -> int:
    """Tokens a tile holds, with `group` rows for each."""
    return max(1, tile.rows // group)


@triton.jit
def _first(x: tl.tensor, ROWS: tl.constexpr, N: tl.constexpr) -> tl.tensor:
    """[ROWS, 4, N] -> [ROWS, 4]: the first of each, in the layout in which `in_order` meets it."""
    if N == 1:
        return tl.reshape(x, (ROWS, 4))
    else:  # noqa: RET505 - Triton compiles both branches unless the condition decides
        low, _ = tl.split(tl.permute(tl.reshape(x, (ROWS, 4, 2, N // 2)), (0, 1, 3, 2)))
        return _first(low, ROWS, N // 2)


@triton.jit
def in_order(
    lanes: tl.tensor, x: tl.tensor, r: tl.tensor, FIRST: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr
) -> tl.tensor:
    """Lanes [ROWS, 4] and x [ROWS, 4, N]: x's numbers added one after the other, the first by fma(lanes, r, .) if FIRST."""
    if N == 1:
        one = tl.reshape(x, (ROWS, 4))
        return tl.fma(lanes, r, one) if FIRST else lanes + one
    else:  # noqa: RET505 - Triton compiles both branches unless the condition decides
        low, high = tl.split(tl.permute(tl.reshape(x, (ROWS, 4, 2, N // 2)), (0, 1, 3, 2)))
        lanes = in_order(lanes, low, r, FIRST, ROWS, N // 2)
        return in_order(lanes, high, r, False, ROWS, N // 2)


@triton.jit
def by_lane(p: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """[rows, keys] -> [rows, lane, order in it]: key = 8 a + 2 lane + b, order = 2 a + b."""
    order = tl.permute(tl.reshape(p, (ROWS, WIDTH // 8, 4, 2)), (0, 2, 1, 3))
    return tl.reshape(order, (ROWS, 4, WIDTH // 4))


@triton.jit
def weigh(
    s: tl.tensor,
    m: tl.tensor,
    lanes: tl.tensor,
    c: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A block's weights [ROWS, WIDTH], the fade of what was before it, the lanes with its weights, and the new maximum.

    A score that is not seen is -inf; not MASKED says that every row sees one.
    """
    high = tl.maximum(m, tl.max(s, axis=1))
    base = tl.where(high == float("-inf"), 0.0, high) if MASKED else high
    r = _unary((m - base) * c, "ex2", HARDWARE)
    cs = tl.full([ROWS, WIDTH], 1.0, tl.float32) * c
    p = _unary(tl.fma(s, cs, tl.zeros([ROWS, WIDTH], tl.float32) - (base * c)[:, None]), "ex2", HARDWARE)
    # the fade takes the weights' way, so that it meets them in their layout and nothing is moved between threads
    fade = _first(by_lane(tl.broadcast_to(r[:, None], (ROWS, WIDTH)), ROWS, WIDTH), ROWS, WIDTH // 4)
    return p, r, in_order(lanes, by_lane(p, ROWS, WIDTH), fade, True, ROWS, WIDTH // 4), high


@triton.jit
def place_of(
    pages: tl.tensor,
    at: tl.tensor,
    real: tl.tensor,
    x_page: tl.tensor,
    x_row: tl.tensor,
    y_page: tl.tensor,
    y_row: tl.tensor,
    PAGE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where the keys `at` of a sequence begin in each of two caches: keys in a row, or looked up by page."""
    if PAGE == 0:
        x = at.to(tl.int64) * x_row
        y = at.to(tl.int64) * y_row
    else:
        page = tl.load(pages + at // PAGE, mask=real, other=0).to(tl.int64)
        x = page * x_page + (at % PAGE) * x_row
        y = page * y_page + (at % PAGE) * y_row
    return x, y


@triton.jit
def tile_of(
    spans: tl.tensor,
    owners: tl.tensor,
    b: tl.tensor,
    s_row: tl.tensor,
    w_row: tl.tensor,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Request b's first row and number of rows, the program's first of them, and positions of its first and last token."""
    tokens = tl.load(spans + s_row + b)
    before = tl.load(spans + 2 * s_row + b) - tokens
    token0 = tl.load(owners + w_row + tl.program_id(0)) * TOKENS
    return (
        tl.load(spans + b),
        tokens,
        token0,
        before + token0,
        before + tl.minimum(token0 + TOKENS, tokens) - 1,
    )


@triton.jit
def cache_of(
    spans: tl.tensor,
    pages: tl.tensor,
    b: tl.tensor,
    segment: tl.tensor,
    s_row: tl.tensor,
    p_row: tl.tensor,
    PAGE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where a segment of request b begins among what `place_of` counts, and its pages."""
    if PAGE == 0:
        base = segment + tl.load(spans + 3 * s_row + b)
        own = pages
    else:
        base = segment
        own = pages + b.to(tl.int64) * p_row
    return base, own


@triton.jit
def _block(
    x: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    segment: tl.tensor,
    used: tl.tensor,
    low: tl.tensor,
    limit: tl.tensor,
    m: tl.tensor,
    o: tl.tensor,
    lanes: tl.tensor,
    c: tl.tensor,
    k_page: tl.tensor,
    k_row: tl.tensor,
    v_page: tl.tensor,
    v_row: tl.tensor,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One block of keys for every row of the tile; not MASKED says that all rows see all of its keys."""
    col = tl.arange(0, WIDTH)
    d = tl.arange(0, D)
    key = start + col
    real = (col < KEYS) & (key < used)
    at_k, at_v = place_of(pages, segment + key, real, k_page, k_row, v_page, v_row, PAGE)
    if MASKED or WIDTH != KEYS:
        y = tl.load(k + at_k[None, :] + d[:, None], mask=real[None, :], other=0.0)
    else:
        y = tl.load(k + at_k[None, :] + d[:, None])
    s = tl.dot(x, y, tl.zeros([ROWS, WIDTH], tl.float32))
    if MASKED:
        seen = (col < KEYS)[None, :] & (key[None, :] < limit[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] >= low[:, None])
        s = tl.where(seen, s, float("-inf"))
    elif WIDTH != KEYS:
        s = tl.where((col < KEYS)[None, :], s, float("-inf"))
    p, r, lanes, high = weigh(s, m, lanes, c, ROWS, WIDTH, MASKED, HARDWARE)
    if MASKED or WIDTH != KEYS:
        z = tl.load(v + at_v[:, None] + d[None, :], mask=real[:, None], other=0.0)
    else:
        z = tl.load(v + at_v[:, None] + d[None, :])
    o = tl.dot(p.to(tl.bfloat16), z, o * r[:, None])
    return high, o, lanes


@triton.jit(
    do_not_specialize=[
        "requests",
        "kv_segment",
        "window",
        "slots",
        "s_row",
        "w_row",
        "p_row",
        "l_slot",
        "l_head",
    ]
)
def tile_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    spans: tl.tensor,
    owners: tl.tensor,
    pages: tl.tensor,
    requests: tl.tensor,
    kv_segment: tl.tensor,
    window: tl.tensor,
    slots: tl.tensor,
    c: tl.tensor,
    c_ln2: tl.tensor,
    s_row: tl.tensor,
    w_row: tl.tensor,
    p_row: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_page: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_page: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    o_slot: tl.tensor,
    o_row: tl.tensor,
    o_head: tl.tensor,
    l_slot: tl.tensor,
    l_head: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> None:
    b = tl.load(owners + tl.program_id(0))
    if b < requests:
        q0, tokens, token0, p0, p1 = tile_of(spans, owners, b, s_row, w_row, TOKENS)
        j = tl.program_id(2)
        if WINDOWED:
            j += tl.maximum(p0 - window + 1, 0) // kv_segment
        segment = j * kv_segment
        used = tl.minimum(p1 + 1 - segment, kv_segment)
        if used > 0:
            kv = tl.program_id(1)
            r = tl.arange(0, ROWS)
            token = token0 + r // GROUP
            head = kv * GROUP + r % GROUP
            some = (r < TOKENS * GROUP) & (token < tokens)
            d = tl.arange(0, D)
            row = (q0 + token).to(tl.int64)
            x = tl.load(
                q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=some[:, None], other=0.0
            )
            position = p0 - token0 + token
            limit = tl.minimum(position + 1 - segment, kv_segment)
            low = position - window + 1 - segment if WINDOWED else limit
            last = (used - 1) // KEYS
            if WINDOWED:  # few blocks, all of them masked
                outer = tl.maximum(p0 - window + 1 - segment, 0) // KEYS - 1
            else:  # up to `outer` every row sees every key
                outer = tl.minimum(tl.maximum(p0 + 1 - segment, 0), used) // KEYS - 1
            base, own_pages = cache_of(spans, pages, b, segment, s_row, p_row, PAGE)
            k += kv * k_head
            v += kv * v_head
            m = tl.full([ROWS], float("-inf"), tl.float32)
            o = tl.zeros([ROWS, D], tl.float32)
            lanes = tl.zeros([ROWS, 4], tl.float32)
            for half in tl.static_range(1 if WINDOWED else 2):
                top = last if half == 0 else outer
                for n in range(last - outer if half == 0 else outer + 1):
                    m, o, lanes = _block(
                        *(x, k, v, own_pages, (top - n) * KEYS, base, used, low, limit, m, o, lanes, c),
                        *(k_page, k_row, v_page, v_row),
                        *(D, KEYS, WIDTH, ROWS, PAGE, half == 0, WINDOWED, HARDWARE),
                    )
            total = lane_total(lanes)
            # a row that sees nothing here leaves its place as it is: the merge does not read it
            written = some & (limit > 0)
            if WINDOWED:
                written = written & (low < kv_segment)
            slot = (j % slots).to(tl.int64)
            y = o * _unary(total, "rcp", HARDWARE)[:, None]
            at = out + slot * o_slot + row[:, None] * o_row + head[:, None] * o_head + d[None, :]
            tl.store(at, y.to(tl.bfloat16), mask=written[:, None])
            one = log_sum_exp(m, total, c_ln2, HARDWARE)
            tl.store(lse + slot * l_slot + head * l_head + row, one, mask=written)


@triton.jit(do_not_specialize=["requests", "unit", "count", "w_row"], do_not_specialize_on_alignment=["rows"])
def map_kernel(
    rows: tl.tensor,
    owners: tl.tensor,
    requests: tl.tensor,
    unit: tl.tensor,
    count: tl.tensor,
    w_row: tl.tensor,
    MOST: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """Whose each tile is, and which of its own: requests in order, each with whole tiles of `unit` rows."""
    b = tl.arange(0, MOST)
    real = b < requests
    tiles = tl.cdiv(tl.load(rows + b, mask=real, other=0), unit)
    ends = tl.cumsum(tiles, 0)
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    before = (ends[None, :] <= place[:, None]) & real[None, :]
    owner = tl.sum(before.to(tl.int32), axis=1)
    first = tl.sum(tl.where(before, tiles[None, :], 0), axis=1)
    tl.store(owners + place, owner, mask=place < count)
    tl.store(owners + w_row + place, place - first, mask=place < count)


def launch_map(rows: Tensor, owners: Tensor, *, unit: int) -> None:
    """Fill owners [2, count] from the requests' rows [B]: tile i is request owners[0, i]'s tile owners[1, i], or nobody's."""
    requests, count = len(rows), owners.shape[1]
    most = power_of_two(requests)
    places = max(1, min(64, 8192 // most))
    map_kernel[(-(-count // places),)](
        rows, owners, requests, unit, count, owners.stride(0), MOST=most, PLACES=places, num_warps=4
    )


def launch_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Tensor,
    lse: Tensor,
    spans: Tensor,
    owners: Tensor,
    pages: Tensor | None,
    *,
    scale: float,
    kv_segment: int,
    window: int,
    segments: int,
    tile: Tile,
    tokens: int,
    hardware: bool = True,
) -> None:
    """Every row over every segment it sees: parts [slots, T, H, D] bf16 and lse [slots, H, T], segment j in slot j % slots.

    spans [4, B]: a request's first row, rows, keys and first key; owners from `launch_map` by `tokens`.
    `window` is the keys a row sees at most, its own included, or 0 for all; `segments` bounds those that one tile touches.
    """
    _, H, D = q.shape
    KV = k.shape[-2]
    group = H // KV
    keys = WINDOW_BLOCK[D] if window else BLOCK[D]
    c, c_ln2 = constants(scale)
    tile_kernel[(owners.shape[1], KV, segments)](
        *(q, k, v, parts, lse, spans, owners, spans if pages is None else pages),
        *(spans.shape[1], kv_segment, window, len(parts), c, c_ln2),
        *(spans.stride(0), owners.stride(0), 0 if pages is None else pages.stride(0)),
        *(q.stride(0), q.stride(1)),
        *(k.stride(0), k.stride(-3), k.stride(-2), v.stride(0), v.stride(-3), v.stride(-2)),
        *(parts.stride(0), parts.stride(1), parts.stride(2), lse.stride(0), lse.stride(1)),
        GROUP=group,
        D=D,
        KEYS=keys,
        WIDTH=power_of_two(keys),
        TOKENS=tokens,
        ROWS=max(16, power_of_two(tokens * group)),
        PAGE=0 if pages is None else k.shape[1],
        WINDOWED=window > 0,
        HARDWARE=hardware,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
