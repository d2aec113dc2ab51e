# SPDX-License-Identifier: Apache-2.0
"""Schedules in which operands travel and every rank walks the whole K: the same chain, by the library or the few-row kernel.

`by_rows` sends weights to all and each row to the rank that computes it: (M + ranks N) K / ranks^2 elements of bf16 a peer, and
no result in the form by rows. The hand-off sends M N of fp32. `by_columns` needs a weight that is sharded by N.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.linear.hopper import cublaslt
from isoexec.kernels.linear.hopper.handoff.moves import beside, collect, join, mark, move, side, spread
from isoexec.kernels.linear.hopper.kernel import Tile
from isoexec.kernels.linear.hopper.kernel import launch as walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from isoexec.kernels.linear.hopper.handoff.buffers import Room
    from isoexec.kernels.linear.hopper.handoff.moves import Mover

__all__ = ["by_columns", "by_rows", "bytes_by_rows"]


def product(x: Tensor, w: Tensor, out: Tensor, *, turned: bool, tile: Tile | None = None) -> None:
    """Write `x [M, K] @ w [N, K]^T` (`w [K, N]` where turned) to `out`: the few-row chain with a tile, else cuBLASLt."""
    if tile is not None:
        require(not turned, "handoff", "a turned weight with the few-row chain", "the library")
        walk(x, w, out, tile)
        return
    require(
        len(x) > 1,
        "handoff",
        "one row for the library",
        "a tile of the few-row chain, whose bits one row has too",
    )
    cublaslt.check()
    other = w if turned else w.t()
    if out.dtype == torch.float32:
        torch.mm(x, other, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x, other, out=out)


def bytes_by_rows(per: int, N: int, K: int) -> int:
    """Inbox that `by_rows` needs for `per` rows a rank: a whole weight and the rows over the whole K."""
    return 2 * K * (N + per)


def by_rows(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    room: Room,
    *,
    each: bool,
    parts: Sequence[int],
    turned: bool,
    blocks: int,
    mover: Mover,
) -> None:
    """`out` = the product over every rank's K, this rank computing rows [rank * per, (rank + 1) * per) in `blocks`.

    `x [M, k]` and `w [N, k]` (`[k, N]` where turned) hold this rank's k = K / ranks in `parts`, one a lap; parts of a lap are in
    rank order, laps in order. `out` is [M, N] where `each` rank gets all, else [M / ranks, N]. Copies go on after a peer is lost,
    so one that comes back later than the room's patience may compute from them; its next product then says that it is lost.
    """
    M, k = x.shape
    N = out.shape[1]
    R, rank = room.ranks, room.rank
    per = -(-M // R)
    room.require_inbox(bytes_by_rows(per, N, R * k))
    if each:
        room.require_results(out)
    inboxes = [room.inbox(peer, torch.bfloat16) for peer in range(R)]
    shape = (R * k, N) if turned else (N, R * k)
    weights = [box[: N * R * k].view(shape) for box in inboxes]
    gathered = [box[N * R * k :][: per * R * k].view(per, R * k) for box in inboxes]
    bounds = [(owner * per, min((owner + 1) * per, M)) for owner in range(R)]
    per_block = -(-per // blocks)
    starts = [0, *accumulate(parts)]
    # in the whole K, in this rank's, and how much
    places = [(start * R + rank * part, start, part) for start, part in zip(starts, parts, strict=False)]

    def send_weights(peer: int, stream: int) -> None:
        for there, here, part in places:
            if turned:
                move(weights[peer][there : there + part], w[here : here + part], mover, stream)
            else:
                move(weights[peer][:, there : there + part], w[:, here : here + part], mover, stream)

    def send_rows(peer: int, block: int, stream: int) -> None:
        first, end = bounds[peer]
        a, b = block * per_block, min((block + 1) * per_block, end - first)
        if a < b:
            for there, here, part in places:
                rows = x[first + a : first + b, here : here + part]
                move(gathered[peer][a:b, there : there + part], rows, mover, stream)

    arriving, leaving = side(room, 0), side(room, 1)
    mark(room, "open")
    with beside(arriving) as stream:
        for turn in range(1, R):
            send_weights((rank + turn) % R, stream)
        for block in range(blocks):
            for turn in range(1, R):
                send_rows((rank + turn) % R, block, stream)
            mark(room, "raise_came", block)
    own = torch.cuda.current_stream().cuda_stream if arriving is not None else 0
    send_weights(rank, own)
    first, end = bounds[rank]
    mine = out[first:end] if each else out
    for block in range(blocks):
        send_rows(rank, block, own)
        a, b = block * per_block, min((block + 1) * per_block, end - first)
        mark(room, "await", block, gathered[rank][a:b] if a < b else None)
        if a < b:
            product(gathered[rank][a:b], weights[rank], mine[a:b], turned=turned)
        if each:
            with beside(leaving) as stream:
                if a < b:
                    for turn in range(1, R):
                        area = room.results((rank + turn) % R, out.dtype)[: M * N].view(M, N)
                        move(area[first + a : first + b], mine[a:b], mover, stream)
                mark(room, "raise_ready", block)
    join(arriving)
    if each:
        join(leaving)
        area = room.results(rank, out.dtype)[: M * N].view(M, N)
        collect(room, area, out, per=per, slots=blocks, per_slot=per_block)
    mark(room, "close")


def by_columns(
    x: Tensor, w_columns: Tensor, out: Tensor, room: Room, *, each: bool, tile: Tile | None
) -> None:
    """`out` from `x [M, K / ranks]` and this rank's columns `w_columns [N / ranks, K]`: gather, walk, exchange."""
    M, k = x.shape
    n = w_columns.shape[0]
    room.require_inbox(2 * M * k * room.ranks)
    room.require_results(out)
    whole = torch.empty(M, room.ranks * k, dtype=x.dtype, device=x.device)
    spread(room, x, room.inbox(room.rank, x.dtype), whole, step=0)
    own = torch.empty(M, n, dtype=out.dtype, device=x.device)
    product(whole, w_columns, own, turned=False, tile=tile)
    spread(room, own, room.results(room.rank, out.dtype), out, step=0 if each else len(out))
