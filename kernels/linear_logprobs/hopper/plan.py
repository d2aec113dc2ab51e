# SPDX-License-Identifier: Apache-2.0
"""Which provider makes the nodes of so many rows: all have the same bits, so this is tuning."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from isoexec.kernels.linear_logprobs.hopper.kernel import Tile

__all__ = ["BACKWARD_ROWS", "CANDIDATES", "CHUNKS", "FEW_ROWS", "TILES", "Chunks", "plan_for", "spans"]


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The linear's own providers write fp32 logits of some rows and leaves into memory that is used again and again."""

    rows: int
    leaves: int


CANDIDATES = (  # what a GPU may choose from
    Tile(rows=128, columns=128, depth=64, warps=4, stages=3, programs=2),
    Tile(rows=128, columns=128, depth=64, warps=8, stages=3, programs=2),
    Tile(rows=64, columns=256, depth=64, warps=4, stages=2, programs=2),
    Tile(rows=128, columns=256, depth=64, warps=8, stages=3),
    Tile(rows=128, columns=256, depth=64, warps=8, stages=4),
    Tile(rows=128, columns=256, depth=64, warps=8, stages=3, flat=True),
)
MIDDLE = CANDIDATES[4]
TILES = CANDIDATES[5]
CHUNKS = Chunks(rows=2048, leaves=1)
BACKWARD_ROWS = 2048  # rows whose fp32 logits of a leaf exist at the same time in the backward pass
FEW = 64  # up to here weights decide: they are read once, by the linear's provider for so many rows
SOME = 256  # up to here columns are given to programs one tile at a time
FEW_ROWS = Chunks(rows=FEW, leaves=1 << 10)  # every leaf at once


def plan_for(rows: int) -> Tile | Chunks:
    """The provider for so many rows."""
    if rows <= FEW:
        return FEW_ROWS
    return MIDDLE if rows <= SOME else TILES


def spans(rows: int, most: int) -> list[tuple[int, int]]:
    """Cuts of about equal size, at most `most` rows each; one row alone only where there is one."""
    count = -(-rows // most)
    edges = [rows * i // count for i in range(count + 1)] if count else []
    return list(pairwise(edges))
