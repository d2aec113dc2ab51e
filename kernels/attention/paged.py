# SPDX-License-Identifier: Apache-2.0
"""Engine attention: queries of one step over a paged cache, by a plan made once a step and used by every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.attention.naive import QUERY_TILE
from isoexec.kernels.attention.tile import attend, check_heads
from isoexec.kernels.domain import DomainError
from isoexec.kernels.library import define

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["PagedPlan", "attention_paged"]

KEYS = 2**13  # keys gathered at a time; changes no bit
WIDE = 4  # tiles of a long prefill that share one gather; changes no bit


class PagedPlan:
    """Tiles of one engine step.

    `starts` [requests + 1]: first query token of each request, and the end. `seq_lens` [requests]: keys each request has once
    this step's are written. `group`: query heads to a KV head. Decode (one token), short and long prefill tiles are kept
    apart, so that the element-wise work of a decode tile is one token's; longest first, so that a batch wastes little.
    """

    def __init__(
        self,
        starts: Sequence[int],
        seq_lens: Sequence[int],
        group: int,
        *,
        kv_segment: int = 32,
        query_tile: int = QUERY_TILE,
    ) -> None:
        if query_tile != QUERY_TILE:
            raise DomainError("attention", f"query_tile {query_tile}", f"query_tile {QUERY_TILE}")
        if not 1 <= group <= QUERY_TILE:
            raise DomainError("attention", f"a group of {group} heads", f"1 to {QUERY_TILE}")
        if len(starts) != len(seq_lens) + 1:
            raise DomainError(
                "attention",
                f"{len(starts)} starts for {len(seq_lens)} requests",
                "one start a request and the end",
            )
        self.group = group
        self.kv_segment = kv_segment
        per = QUERY_TILE // group
        widths: dict[int, list[tuple[int, int, int, int]]] = {1: [], per: [], WIDE * per: []}
        for request, length in enumerate(seq_lens):
            a, end = int(starts[request]), int(starts[request + 1])
            before = int(length) - (end - a)
            if before < 0:
                raise DomainError(
                    "attention",
                    f"request {request}: {end - a} queries, {length} keys",
                    "at least as many keys as queries",
                )
            keys = before
            while a < end:
                left = end - a
                width = WIDE * per if left >= WIDE * per else per if left > 1 else 1
                n = min(width, left)
                keys += n
                widths[width].append((keys, a, n, request))
                a += n
        self.batches: list[tuple[Tensor, Tensor, Tensor, int, int, bool]] = []
        for width, tiles in widths.items():
            tiles.sort(key=lambda t: -t[0])
            first = 0
            while first < len(tiles):
                count = max(1, KEYS // tiles[first][0])
                self._add(tiles[first : first + count], width)
                first += count

    def _add(self, tiles: list[tuple[int, int, int, int]], width: int) -> None:
        last, first, count, request = torch.tensor(tiles).unbind(1)
        step = torch.arange(width)
        valid = step < count.unsqueeze(1)
        token = torch.where(valid, first.unsqueeze(1) + step, -1)
        # a row of padding sees what the tile's last row sees: any limit does, nothing reads it
        limit = torch.minimum((last - count).unsqueeze(1) + step + 1, last.unsqueeze(1))
        visible = int(limit.min())
        segments = -(-tiles[0][0] // self.kv_segment)
        limit = limit.repeat_interleave(self.group, 1)
        self.batches.append((token, request, limit, visible, segments, bool(valid.all())))


def _paged(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    token: Tensor,
    request: Tensor,
    limit: Tensor,
    visible: int,
    segments: int,
    full: bool,
    scale: float,
    kv_segment: int,
    out: Tensor,
) -> None:
    _, KV, block, D2 = cache.shape
    D, H = D2 // 2, q.shape[1]
    group = H // KV
    n, width = token.shape
    in_block = block // kv_segment
    j = torch.arange(segments)
    blocks = block_table.index_select(0, request)[:, j // in_block].to(torch.int64)  # [n, segments]
    pieces = (blocks.unsqueeze(1) * KV + torch.arange(KV).unsqueeze(1)) * in_block + j % in_block
    kv = cache.view(-1, kv_segment * D2).index_select(0, pieces.view(-1)).to(torch.float32)
    kv = kv.view(n * KV, segments * kv_segment, D2)
    rows = width * group
    tile = q.index_select(0, (token if full else token.clamp(min=0)).view(-1)).to(torch.float32).mul_(scale)
    tile = tile.view(n, width, KV, group, D).permute(0, 2, 4, 1, 3)
    M = -(-rows // QUERY_TILE) * QUERY_TILE
    columns = torch.zeros(n, KV, D, M, dtype=torch.float32)
    columns[..., :rows].unflatten(3, (width, group)).copy_(tile)
    if visible < segments * kv_segment:
        limit = limit.repeat_interleave(KV, 0)
    o, _, _ = attend(columns.view(n * KV, D, M), kv[..., :D], kv[..., D:], limit, visible, rows, kv_segment)
    o = o.unflatten(1, (width, group)).unflatten(0, (n, KV)).transpose(1, 2).reshape(n * width, H, D)
    flat = token.view(-1)
    if not full:
        keep = flat >= 0
        flat, o = flat[keep], o[keep]
    out.index_copy_(0, flat, o.to(out.dtype))


def _paged_fake(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    token: Tensor,
    request: Tensor,
    limit: Tensor,
    visible: int,
    segments: int,
    full: bool,
    scale: float,
    kv_segment: int,
    out: Tensor,
) -> None:
    return None


_op = define(
    "attention_paged(Tensor q, Tensor cache, Tensor block_table, Tensor token, Tensor request, Tensor limit, "
    "int visible, int segments, bool full, float scale, int kv_segment, Tensor(a!) out) -> ()",
    _paged,
    _paged_fake,
)


def attention_paged(
    q: Tensor, cache: Tensor, block_table: Tensor, plan: PagedPlan, scale: float, out: Tensor
) -> None:
    """Write attention of `q [tokens, H, D]` over a paged cache into `out [tokens, H, D]`.

    `cache [blocks, KV, block, 2 * D]` is contiguous, keys first in the last dimension, block a multiple of kv_segment;
    `block_table [requests, blocks a request]` holds block numbers. What a block holds past a request's length is masked, but
    must be finite. Bits are those of `attention_varlen`.
    """
    _, KV, block, D2 = cache.shape
    group = check_heads(q, q.shape[1], KV, D2 // 2, plan.kv_segment)
    if group != plan.group or q.shape[2] * 2 != D2:
        raise DomainError(
            "attention",
            f"q {list(q.shape)} and cache {list(cache.shape)} with a plan for groups of {plan.group}",
            "the head layout of the plan and of the cache",
        )
    if block % plan.kv_segment or not cache.is_contiguous():
        raise DomainError(
            "attention",
            f"cache blocks of {block} keys, contiguous {cache.is_contiguous()}",
            f"contiguous blocks that hold whole segments of {plan.kv_segment}",
        )
    for token, request, limit, visible, segments, full in plan.batches:
        _op(
            q,
            cache,
            block_table,
            token,
            request,
            limit,
            visible,
            segments,
            full,
            float(scale),
            plan.kv_segment,
            out,
        )
