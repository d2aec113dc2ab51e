# SPDX-License-Identifier: Apache-2.0
"""The continuing chain: one launch a rank takes a tile's accumulator from the rank before, walks its own K and hands it on.

A tile travels in the order in which the tensor core's registers hold it, so neither side rearranges anything: stores and loads
are 16 bytes a thread, 512 a warp, without shared memory. The last rank rounds and sends results in plain rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from isoexec.kernels.linear.hopper.handoff import protocol
from isoexec.kernels.linear.hopper.handoff.protocol import finish, reach, tell, words_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from isoexec.kernels.linear.hopper.handoff.buffers import Room

__all__ = ["Cut", "call_of", "chain_kernel", "launch", "tiles_of"]

_CAME, _READY, _LAUNCH = protocol.CAME, protocol.READY, protocol.LAUNCH
_ACCUMULATOR, _RESULT, _ROOM = protocol.ACCUMULATOR, protocol.RESULT, protocol.ROOM


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a product is cut into tiles: free of bits, but the same on every rank, for tiles travel as they are."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8  # row blocks that take the columns together
    per_sm: int = 1  # programs an SM should hold
    swapped: bool = False  # weights are the left operand
    prefetch: int = 0  # bytes of each weight row asked into the L2 while the accumulator is on its way


@triton.jit
def pack(acc: tl.tensor, A: tl.constexpr, B: tl.constexpr, W: tl.constexpr) -> tl.tensor:
    """[A, B] -> [A * B] in the order of the registers of W warps: (repeat, warp, half, row of 8) x (block, quad, pair)."""
    v = tl.reshape(acc, (A // (16 * W), W, 2, 8, B // 8, 4, 2))
    v = tl.permute(v, (0, 4, 1, 3, 5, 2, 6))
    return tl.reshape(v, (A * B,))


@triton.jit
def unpack(flat: tl.tensor, A: tl.constexpr, B: tl.constexpr, W: tl.constexpr) -> tl.tensor:
    """The inverse of `pack`."""
    v = tl.reshape(flat, (A // (16 * W), B // 8, W, 8, 4, 2, 2))
    v = tl.permute(v, (0, 2, 5, 3, 1, 4, 6))
    return tl.reshape(v, (A, B))


@triton.jit
def _place(t: tl.tensor, row_tiles: tl.tensor, column_tiles: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    width = GROUP * column_tiles
    first = (t // width) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + (t % width) % height, (t % width) // height


@triton.jit
def _apart(bases: tl.tensor, peer: tl.tensor, RANK: tl.constexpr, BYTES: tl.constexpr) -> tl.tensor:
    """Elements from this rank's symmetric memory to a peer's; as an offset it keeps what is known of a pointer's alignment."""
    return tl.multiple_of((tl.load(bases + peer) - tl.load(bases + RANK)) // BYTES, 16)


@triton.jit(do_not_specialize=["per", "stride"])
def chain_kernel(
    x: tl.tensor,
    w: tl.tensor,
    w_at: tl.tensor,
    out: tl.tensor,
    inbox: tl.tensor,
    outbox: tl.tensor,
    bases: tl.tensor,
    state: tl.tensor,
    mirror: tl.tensor,
    results: tl.tensor,
    patience: tl.tensor,
    per: tl.tensor,
    stride: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    LAPS: tl.constexpr,
    STARTS: tl.constexpr,
    EACH: tl.constexpr,
    TURNED: tl.constexpr,
    SWAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS: tl.constexpr,
    PREFETCH: tl.constexpr,
    TIMED: tl.constexpr,
) -> None:
    """Every tile of `x [., K] @ w [N, K]^T` (`w [K, N]` where TURNED), K in LAPS parts: after each a tile goes round the ranks.

    Parts are equal, or begin and end at STARTS.
    Rows come in blocks of `per` that lie `stride` apart, one block where every rank gets EACH result and one an owner else.
    """
    A: tl.constexpr = COLUMNS if SWAP else ROWS
    B: tl.constexpr = ROWS if SWAP else COLUMNS
    W: tl.constexpr = WARPS if A >= 16 * WARPS else A // 16
    NEXT: tl.constexpr = (RANK + 1) % RANKS
    BEFORE: tl.constexpr = (RANK + RANKS - 1) % RANKS
    SIZE: tl.constexpr = ROWS * COLUMNS
    BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    LAST: tl.constexpr = RANKS - 1
    owners: tl.constexpr = 1 if EACH else RANKS
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    in_block = tl.cdiv(per, ROWS)
    row_tiles = in_block * owners
    column_tiles = tl.cdiv(N, COLUMNS)
    tiles = row_tiles * column_tiles
    words = words_of(bases, RANK)
    last = tl.load(state + _LAUNCH).to(tl.int32)
    alive = tl.full((), 1, tl.int32)
    flat = tl.arange(0, SIZE)
    asked = tl.full((), 0, tl.int32)
    UNEQUAL: tl.constexpr = STARTS is not None
    K_lap = K // LAPS
    for lap in tl.static_range(LAPS):
        for t in range(pid, tiles, programs):
            i, j = _place(t, row_tiles, column_tiles, GROUP)
            owner = i // in_block
            in_owner = (i % in_block) * ROWS
            first_row = owner * stride + in_owner
            first_col = j * COLUMNS
            if lap == 0 and RANK == 0:
                acc = tl.zeros((A, B), tl.float32)
            else:
                if PREFETCH > 0:
                    column = tl.minimum(first_col + tl.arange(0, COLUMNS), N - 1)
                    ahead = w_at + column.to(tl.int64) * K
                    tl.inline_asm_elementwise(
                        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                        "=r,l,r",
                        [ahead, tl.full((COLUMNS,), PREFETCH, tl.int32)],
                        dtype=tl.int32,
                        is_pure=False,
                        pack=1,
                    )
                number = last + (lap if RANK == 0 else lap + 1)
                alive = reach(
                    words + _CAME + t, number, alive, _ACCUMULATOR, BEFORE, state, mirror, patience, TIMED
                )
                acc = unpack(tl.load(inbox + t * SIZE + flat, cache_modifier=".cg"), A, B, W)
            if UNEQUAL:
                begin = STARTS[lap]
                end = STARTS[lap + 1]
            else:
                begin = lap * K_lap
                end = begin + K_lap
            for k in range(begin, end, DEPTH):
                if SWAP and TURNED:
                    acc = tl.dot(w.load([k, first_col]).T, x.load([first_row, k]).T, acc)
                elif SWAP:
                    acc = tl.dot(w.load([first_col, k]), x.load([first_row, k]).T, acc)
                elif TURNED:
                    acc = tl.dot(x.load([first_row, k]), w.load([k, first_col]), acc)
                else:
                    acc = tl.dot(x.load([first_row, k]), w.load([first_col, k]).T, acc)
            if asked == 0:
                # nobody may still read what the last launch left with them
                for peer in tl.static_range(RANKS):
                    if peer == NEXT or (RANK == LAST and peer != RANK):
                        alive = reach(words + peer, last, alive, _ROOM, peer, state, mirror, patience, TIMED)
                asked += 1
            if lap == LAPS - 1 and RANK == LAST:
                row = in_owner + tl.arange(0, ROWS)
                col = first_col + tl.arange(0, COLUMNS)
                acc = tl.where(alive != 0, acc, float("nan"))
                if SWAP:
                    at = row.to(tl.int64)[None, :] * N + col[:, None]
                    real = (row < per)[None, :] & (col < N)[:, None]
                else:
                    at = row.to(tl.int64)[:, None] * N + col[None, :]
                    real = (row < per)[:, None] & (col < N)[None, :]
                result = acc.to(out.dtype.element_ty)
                if EACH:
                    tl.store(out + at, result, mask=real)
                    if alive != 0:
                        for peer in tl.static_range(RANKS - 1):
                            tl.store(results + _apart(bases, peer, RANK, BYTES) + at, result, mask=real)
                        for peer in tl.static_range(RANKS - 1):
                            tell(words_of(bases, peer) + _READY + t, last + LAPS)
                else:
                    # where the owner may still read its results, they go to this rank's own, which nobody reads
                    mine = (out.to(tl.int64) - results.to(tl.int64)) // BYTES
                    there = tl.where(alive != 0, _apart(bases, owner, RANK, BYTES), 0)
                    there = tl.where(owner == RANK, mine, there)
                    tl.store(results + tl.multiple_of(there, 16) + at, result, mask=real)
                    if (owner != RANK) & (alive != 0):
                        tell(words_of(bases, owner) + _READY + t, last + LAPS)
            elif alive != 0:  # else the next rank may still read what lies there
                tl.store(outbox + t * SIZE + flat, pack(acc, A, B, W))
                tell(words_of(bases, NEXT) + _CAME + t, last + lap + 1)
    if RANK != LAST:
        for t in range(pid, tiles, programs):
            i, j = _place(t, row_tiles, column_tiles, GROUP)
            if EACH or i // in_block == RANK:
                alive = reach(
                    words + _READY + t, last + LAPS, alive, _RESULT, LAST, state, mirror, patience, TIMED
                )
                row = (i % in_block) * ROWS + tl.arange(0, ROWS)
                col = j * COLUMNS + tl.arange(0, COLUMNS)
                at = row.to(tl.int64)[:, None] * N + col[None, :]
                real = (row < per)[:, None] & (col < N)[None, :]
                result = tl.load(results + at, mask=real, other=0.0, cache_modifier=".cg")
                result = tl.where(alive != 0, result, float("nan"))
                tl.store(out + at, result.to(out.dtype.element_ty), mask=real)
    finish(last, LAPS, programs, bases, state, RANK, RANKS)


def tiles_of(cut: Cut, per: int, N: int, owners: int) -> int:
    """How many tiles cover `owners` blocks of `per` rows and N columns."""
    return owners * -(-per // cut.rows) * -(-N // cut.columns)


def call_of(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    room: Room,
    cut: Cut,
    *,
    per: int,
    stride: int,
    each: bool,
    parts: Sequence[int],
    turned: bool = False,
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and options of `launch`, for those who only compile."""
    N, K = out.shape[1], x.shape[1]
    tiles = tiles_of(cut, per, N, 1 if each else room.ranks)
    arguments = (
        TensorDescriptor.from_tensor(x, [cut.rows, cut.depth]),
        TensorDescriptor.from_tensor(w, [cut.depth, cut.columns] if turned else [cut.columns, cut.depth]),
        w,
        out,
        room.inbox(room.rank),
        room.inbox((room.rank + 1) % room.ranks),
        room.bases,
        room.state,
        room.mirror,
        room.results(room.rank, out.dtype),
        room.patience,
        per,
        stride,
        N,
        K,
    )
    options = {
        "RANK": room.rank,
        "RANKS": room.ranks,
        "LAPS": len(parts),
        "STARTS": None if len(set(parts)) == 1 else (0, *accumulate(parts)),
        "EACH": each,
        "TURNED": turned,
        "SWAP": cut.swapped,
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "DEPTH": cut.depth,
        "GROUP": cut.group,
        "WARPS": cut.warps,
        "PREFETCH": 0 if turned else min(cut.prefetch, 2 * K),
        "TIMED": x.device.type == "cuda",
        "num_warps": cut.warps,
        "num_stages": cut.stages,
        "enable_fp_fusion": False,
    }
    return (min(tiles, room.processors * cut.per_sm),), arguments, options


def launch(x: Tensor, w: Tensor, out: Tensor, room: Room, cut: Cut, **sizes: Any) -> None:
    """Do this rank's part of one product; every rank of the group must call it with the same sizes (see `call_of`).

    `x [rows, K]` starts at this launch's first row, `out [per, N]` takes the results that this rank gets; where not `each`, rank
    o's rows start at `o * stride`. K lies in `parts`, one a lap, each a multiple of the cut's depth.
    """
    grid, arguments, options = call_of(x, w, out, room, cut, **sizes)
    chain_kernel[grid](*arguments, **options)
