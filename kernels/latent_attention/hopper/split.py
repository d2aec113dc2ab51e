# SPDX-License-Identifier: Apache-2.0
"""Decode of few requests with the segments' bits, as `attention/hopper/split.py` has it: keys in parallel, then columns.

Only the scores are made otherwise, from both parts of queries and keys. Heads stand in groups that share all keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from isoexec.kernels.attention.hopper.split import MOST_GROUP, Tuning, launch_scored
from isoexec.kernels.latent_attention.hopper.naive import BLOCK, LATENT, ROPE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TUNING", "groups_of", "launch_split"]

TUNING = Tuning(
    columns=32, warps=4, stages=6, score_blocks=1, score_warps=4, score_stages=1, ahead=4, unrolled=2
)


def groups_of(heads: int) -> int:
    """In how many equal groups heads stand: the fewest whose heads fit a step of the tensor cores."""
    return next(n for n in range(-(-heads // MOST_GROUP), heads + 1) if heads % n == 0)


@triton.jit(do_not_specialize=["B", "tokens", "t_row", "BLOCKS"])
def scores_kernel(
    q_rope: tl.tensor,
    q_latent: tl.tensor,
    k_rope: tl.tensor,
    latent: tl.tensor,
    table: tl.tensor,
    pages: tl.tensor,
    scores: tl.tensor,
    tops: tl.tensor,
    B: tl.tensor,
    tokens: tl.tensor,
    t_row: tl.tensor,
    p_row: tl.tensor,
    qr_row: tl.tensor,
    qr_head: tl.tensor,
    ql_row: tl.tensor,
    ql_head: tl.tensor,
    r_page: tl.tensor,
    r_row: tl.tensor,
    c_page: tl.tensor,
    c_row: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    TURN: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.tensor,
    PAGE: tl.constexpr,
    PER: tl.constexpr,
) -> None:
    """As attention's: fp32 scores and their maxima, block by block, of the entries of a table."""
    at = tl.program_id(1)
    e = at // KV
    used = tl.load(table + 2 * t_row + e)
    begin = tl.program_id(0) * PER
    if begin * KEYS < used:
        row = (tl.load(table + e) - (e // B) * tokens).to(tl.int64)
        base = tl.load(table + 3 * t_row + e)
        g = tl.arange(0, 16)
        turn = tl.arange(0, TURN)
        d = tl.arange(0, WIDTH)
        col = tl.arange(0, KEYS)
        some = g < GROUP
        head = at % KV * GROUP + g
        x = tl.load(
            q_rope + row * qr_row + head[:, None] * qr_head + turn[None, :], mask=some[:, None], other=0.0
        )
        y = tl.load(
            q_latent + row * ql_row + head[:, None] * ql_head + d[None, :], mask=some[:, None], other=0.0
        )
        for u in range(PER):
            i = begin + u
            key = i * KEYS + col
            real = key < used
            if PAGE == 0:
                at_r = (base + key).to(tl.int64) * r_row
                at_c = (base + key).to(tl.int64) * c_row
            else:
                slot = key // PAGE
                page = tl.load(pages + e.to(tl.int64) * p_row + slot, mask=slot < p_row, other=0).to(tl.int64)
                at_r = page * r_page + (key % PAGE) * r_row
                at_c = page * c_page + (key % PAGE) * c_row
            turned = tl.load(k_rope + at_r[None, :] + turn[:, None], mask=real[None, :], other=0.0)
            rows = tl.load(latent + at_c[None, :] + d[:, None], mask=real[None, :], other=0.0)
            s = tl.dot(y, rows, tl.dot(x, turned, tl.zeros([16, KEYS], tl.float32)))
            s = tl.where(real[None, :], s, float("-inf"))
            block = (at * BLOCKS + i).to(tl.int64)
            written = some & (g * 0 + i * KEYS < used)
            tl.store(scores + (block * GROUP + g)[:, None] * KEYS + col[None, :], s, mask=written[:, None])
            tl.store(tops + block * GROUP + g, tl.max(s, axis=1), mask=written)


def launch_split(
    q_rope: Tensor,
    q_latent: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    table: Tensor,
    pages: Tensor | None,
    *,
    requests: int,
    kv_segment: int,
    scale: float,
    tuning: Tuning = TUNING,
    hardware: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of a SINGLE table: (o [rows, H, 512] before its division, l [H, rows], lse [H, rows]), all fp32.

    `rows` counts a row a request and segment, as the table does. Rows that no entry has are not written.
    """
    T, H, _ = q_latent.shape
    # all groups have the same values
    values = latent.unsqueeze(-2).expand(*latent.shape[:-1], groups_of(H), LATENT)

    def score(grid: tuple[int, int], tables: tuple[Tensor, ...], cut: dict[str, Any]) -> None:
        own, paged, scores, tops = tables
        scores_kernel[grid](
            *(q_rope, q_latent, k_rope, latent, own, paged, scores, tops, requests, T),
            *(own.stride(0), paged.stride(0)),
            *(q_rope.stride(0), q_rope.stride(1), q_latent.stride(0), q_latent.stride(1)),
            *(k_rope.stride(0), k_rope.stride(-2), latent.stride(0), latent.stride(-2)),
            **{**cut, "WIDTH": LATENT},
            TURN=ROPE,
            PER=tuning.score_blocks,
            num_warps=tuning.score_warps,
            num_stages=tuning.score_stages,
            enable_fp_fusion=False,
        )

    return launch_scored(
        *(score, values, table, pages),
        rows=(table.shape[1] - 1) // requests * T,
        heads=H,
        keys=BLOCK,
        kv_segment=kv_segment,
        scale=scale,
        tuning=tuning,
        hardware=hardware,
    )
