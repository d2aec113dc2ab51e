# SPDX-License-Identifier: Apache-2.0
"""A hand-off of products that other kernels make, such as the experts': they read and write symmetric memory themselves.

A stage goes on from the accumulators in this rank's inbox and writes its own into the next rank's; words say which row block has
come. Row blocks follow one another, so a rank works on one while the next rank works on the one before. As with gathered rows, a
rank that has given up waiting still writes, without announcing it, so one that comes back later than the room's patience may have
computed from that; its next product then says that the group is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.linear.hopper.handoff.buffers import RoomError
from isoexec.kernels.linear.hopper.handoff.moves import beside, collect, join, mark, move, side

if TYPE_CHECKING:
    from torch import Tensor

    from isoexec.kernels.linear.hopper.handoff.buffers import Room
    from isoexec.kernels.linear.hopper.transport import Make

__all__ = ["hand_off"]


def hand_off(make: Make, out: Tensor, room: Room, *, stages: int, blocks: int, name: str) -> None:
    """Fill contiguous `out [rows, width]` on every rank (`transport.Transport.hand_off`), in launches that the room holds.

    Each launch is cut into `blocks` of rows. Raises `RoomError` where not even a row fits, `DomainError` for stages that are no
    whole laps around the ranks.
    """
    rows, width = out.shape
    require(
        stages > 0 and stages % room.ranks == 0,
        f"sm90_handoff {name}",
        f"{stages} stages over {room.ranks} ranks",
        "whole laps around the ranks",
    )
    most = min(room.elements // width, 2 * room.elements // (width * out.itemsize))
    if most < 1:
        raise RoomError(f"max_elements of at least {width * max(1, out.itemsize // 2)}", f"{room.elements}")
    for first in range(0, rows, most):
        _launch(make, out, room, first, min(most, rows - first), stages // room.ranks, blocks)


def _launch(make: Make, out: Tensor, room: Room, first: int, rows: int, laps: int, blocks: int) -> None:
    rank, ranks, width = room.rank, room.ranks, out.shape[1]
    before, behind = (rank - 1) % ranks, (rank + 1) % ranks
    per_block = -(-rows // blocks)
    cuts = [(a, min(a + per_block, rows)) for a in range(0, rows, per_block)]
    inbox, outbox = (room.inbox(peer)[: rows * width].view(rows, width) for peer in (rank, behind))
    areas = [room.results(peer, out.dtype)[: rows * width].view(rows, width) for peer in range(ranks)]
    leaving = side(room, 1)
    mark(room, "open")
    for lap in range(laps):
        stage = lap * ranks + rank
        for slot, (a, b) in enumerate(cuts):
            here, acc = slice(first + a, first + b), None
            if stage:
                # rank 0 goes on from the lap before
                mark(room, "await", slot, peer=before, ahead=lap + (rank > 0))
                acc = inbox[a:b]
            if stage + 1 < laps * ranks:
                make(stage, here, acc, torch.float32, outbox[a:b])
                mark(room, "raise_came", slot, peer=behind, ahead=lap + 1)
                continue
            make(stage, here, acc, out.dtype, out[here])
            with beside(leaving) as stream:
                for peer in range(ranks - 1):
                    move(areas[peer][a:b], out[here], "engine", stream)
                mark(room, "raise_ready", slot, ahead=laps)
    if rank == ranks - 1:
        join(leaving)
    whole = out[first : first + rows]
    collect(
        *(room, areas[rank], whole),
        per=rows,
        slots=len(cuts),
        per_slot=per_block,
        owner=ranks - 1,
        ahead=laps,
    )
    mark(room, "close", ahead=laps)
