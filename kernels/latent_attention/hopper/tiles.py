# SPDX-License-Identifier: Apache-2.0
"""The segments of attention.latent_segments/1 by an own kernel, prefill and decode alike.

All heads share a key's row, so a program takes the heads of neighbouring tokens, or a part of one token's heads, over one
segment, and reads each latent row once, as key and as value. It walks the blocks that any of its rows sees, from the last to
the first; a block that a row does not see leaves the row's numbers as they are, so rows a tile, warps and stages are free. Latent
rows are held in halves of 256, which a thread reads by the same addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.attention.hopper.kernel import _unary, lane_total, log_sum_exp
from isoexec.kernels.attention.hopper.naive import constants
from isoexec.kernels.attention.hopper.tiles import Tile, cache_of, place_of, tile_of, weigh
from isoexec.kernels.hopper.arithmetic import power_of_two
from isoexec.kernels.latent_attention.hopper.naive import BLOCK, LATENT, ROPE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PREFILL", "decode_tile", "heads_of", "launch_tiles", "rows_of", "tokens_of"]

PREFILL = Tile(rows=64, warps=8, stages=2)
_DECODE = (Tile(rows=16, warps=4, stages=2), Tile(rows=32, warps=8, stages=2))


def decode_tile(heads: int) -> Tile:
    """The smallest tile that holds a token's heads, or as many as there may be in one."""
    return next((tile for tile in _DECODE if heads <= tile.rows), PREFILL)


def heads_of(tile: Tile, heads: int) -> int:
    """How many of a token's heads a tile holds: all, or as many as make equal tiles of them."""
    return -(-heads // -(-heads // tile.rows))


def tokens_of(tile: Tile, heads: int) -> int:
    """How many tokens a tile holds."""
    return max(1, tile.rows // heads)


def rows_of(rows: int) -> int:
    """Rows of a program that has this many: a tensor-core step's at least, and a power of two."""
    return max(16, power_of_two(rows))


@triton.jit
def _block(
    x: tl.tensor,
    y_left: tl.tensor,
    y_right: tl.tensor,
    k_rope: tl.tensor,
    latent: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    segment: tl.tensor,
    used: tl.tensor,
    limit: tl.tensor,
    m: tl.tensor,
    o_left: tl.tensor,
    o_right: tl.tensor,
    lanes: tl.tensor,
    c: tl.tensor,
    r_page: tl.tensor,
    r_row: tl.tensor,
    c_page: tl.tensor,
    c_row: tl.tensor,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """One block of keys for every row of the tile; not MASKED says that all rows see all of its keys."""
    turn = tl.arange(0, TURN)
    d = tl.arange(0, HALF)
    key = start + tl.arange(0, KEYS)
    real = key < used
    at_r, at_c = place_of(pages, segment + key, real, r_page, r_row, c_page, c_row, PAGE)
    if MASKED:
        turned = tl.load(k_rope + at_r[None, :] + turn[:, None], mask=real[None, :], other=0.0)
        rows_left = tl.load(latent + at_c[:, None] + d[None, :], mask=real[:, None], other=0.0)
        rows_right = tl.load(latent + at_c[:, None] + (d + HALF)[None, :], mask=real[:, None], other=0.0)
    else:
        turned = tl.load(k_rope + at_r[None, :] + turn[:, None])
        rows_left = tl.load(latent + at_c[:, None] + d[None, :])
        rows_right = tl.load(latent + at_c[:, None] + (d + HALF)[None, :])
    s = tl.dot(y_left, rows_left.T, tl.dot(x, turned, tl.zeros([ROWS, KEYS], tl.float32)))
    s = tl.dot(y_right, rows_right.T, s)
    if MASKED:
        s = tl.where(key[None, :] < limit[:, None], s, float("-inf"))
    p, r, lanes, high = weigh(s, m, lanes, c, ROWS, KEYS, MASKED, HARDWARE)
    low = p.to(tl.bfloat16)
    o_left = tl.dot(low, rows_left, o_left * r[:, None])
    o_right = tl.dot(low, rows_right, o_right * r[:, None])
    return high, o_left, o_right, lanes


@triton.jit(do_not_specialize=["requests", "kv_segment", "heads", "p_row"])
def tile_kernel(
    q_rope: tl.tensor,
    q_latent: tl.tensor,
    k_rope: tl.tensor,
    latent: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    spans: tl.tensor,
    owners: tl.tensor,
    pages: tl.tensor,
    requests: tl.tensor,
    kv_segment: tl.tensor,
    heads: tl.tensor,
    c: tl.tensor,
    c_ln2: tl.tensor,
    s_row: tl.tensor,
    w_row: tl.tensor,
    p_row: tl.tensor,
    qr_row: tl.tensor,
    qr_head: tl.tensor,
    ql_row: tl.tensor,
    ql_head: tl.tensor,
    r_page: tl.tensor,
    r_row: tl.tensor,
    c_page: tl.tensor,
    c_row: tl.tensor,
    o_slot: tl.tensor,
    o_row: tl.tensor,
    o_head: tl.tensor,
    l_slot: tl.tensor,
    l_head: tl.tensor,
    GROUP: tl.constexpr,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    HARDWARE: tl.constexpr,
) -> None:
    b = tl.load(owners + tl.program_id(0))
    if b < requests:
        q0, tokens, token0, p0, p1 = tile_of(spans, owners, b, s_row, w_row, TOKENS)
        j = tl.program_id(2)
        segment = j * kv_segment
        used = tl.minimum(p1 + 1 - segment, kv_segment)
        if used > 0:
            r = tl.arange(0, ROWS)
            token = token0 + r // GROUP
            head = tl.program_id(1) * GROUP + r % GROUP
            some = (r < TOKENS * GROUP) & (token < tokens) & (head < heads)
            turn = tl.arange(0, TURN)
            d = tl.arange(0, HALF)
            row = (q0 + token).to(tl.int64)
            x = tl.load(
                q_rope + row[:, None] * qr_row + head[:, None] * qr_head + turn[None, :],
                mask=some[:, None],
                other=0.0,
            )
            to_y = q_latent + row[:, None] * ql_row + head[:, None] * ql_head + d[None, :]
            y_left = tl.load(to_y, mask=some[:, None], other=0.0)
            y_right = tl.load(to_y + HALF, mask=some[:, None], other=0.0)
            limit = tl.minimum(p0 - token0 + token + 1 - segment, kv_segment)
            last = (used - 1) // KEYS
            # up to `outer` every row sees every key
            outer = tl.minimum(tl.maximum(p0 + 1 - segment, 0), used) // KEYS - 1
            base, own_pages = cache_of(spans, pages, b, segment, s_row, p_row, PAGE)
            m = tl.full([ROWS], float("-inf"), tl.float32)
            o_left = tl.zeros([ROWS, HALF], tl.float32)
            o_right = tl.zeros([ROWS, HALF], tl.float32)
            lanes = tl.zeros([ROWS, 4], tl.float32)
            for half in tl.static_range(2):
                top = last if half == 0 else outer
                for n in range(last - outer if half == 0 else outer + 1):
                    m, o_left, o_right, lanes = _block(
                        *(x, y_left, y_right, k_rope, latent, own_pages, (top - n) * KEYS, base, used, limit),
                        *(m, o_left, o_right, lanes, c, r_page, r_row, c_page, c_row),
                        *(TURN, HALF, KEYS, ROWS, PAGE, half == 0, HARDWARE),
                    )
            total = lane_total(lanes)
            # a row that sees nothing here leaves its place as it is: the merge does not read it
            written = some & (limit > 0)
            scaled = _unary(total, "rcp", HARDWARE)[:, None]
            slot = j.to(tl.int64)
            at = out + slot * o_slot + row[:, None] * o_row + head[:, None] * o_head + d[None, :]
            tl.store(at, (o_left * scaled).to(tl.bfloat16), mask=written[:, None])
            tl.store(at + HALF, (o_right * scaled).to(tl.bfloat16), mask=written[:, None])
            one = log_sum_exp(m, total, c_ln2, HARDWARE)
            tl.store(lse + slot * l_slot + head * l_head + row, one, mask=written)


def launch_tiles(
    q_rope: Tensor,
    q_latent: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    parts: Tensor,
    lse: Tensor,
    spans: Tensor,
    owners: Tensor,
    pages: Tensor | None,
    *,
    scale: float,
    kv_segment: int,
    tile: Tile,
    tokens: int,
    hardware: bool = True,
) -> None:
    """Every row over every segment it sees: parts [n, T, H, 512] bf16 and lse [n, H, T], segment by segment.

    q_rope [T, H, 64], q_latent [T, H, 512], k_rope [keys, 64] and latent [keys, 512], or [pages, page, ...] with `pages`.
    spans [4, B]: a request's first row, rows, keys and first key; owners from `attention.hopper.tiles.launch_map` by `tokens`.
    """
    _, H, _ = q_latent.shape
    group = heads_of(tile, H)
    c, c_ln2 = constants(scale)
    tile_kernel[(owners.shape[1], -(-H // group), len(parts))](
        *(q_rope, q_latent, k_rope, latent, parts, lse, spans, owners, spans if pages is None else pages),
        *(spans.shape[1], kv_segment, H, c, c_ln2),
        *(spans.stride(0), owners.stride(0), 0 if pages is None else pages.stride(0)),
        *(q_rope.stride(0), q_rope.stride(1), q_latent.stride(0), q_latent.stride(1)),
        *(k_rope.stride(0), k_rope.stride(-2), latent.stride(0), latent.stride(-2)),
        *(parts.stride(0), parts.stride(1), parts.stride(2), lse.stride(0), lse.stride(1)),
        GROUP=group,
        TURN=ROPE,
        HALF=LATENT // 2,
        KEYS=BLOCK,
        TOKENS=tokens,
        ROWS=rows_of(tokens * group),
        PAGE=0 if pages is None else latent.shape[1],
        HARDWARE=hardware,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
