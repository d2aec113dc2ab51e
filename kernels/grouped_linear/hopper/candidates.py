# SPDX-License-Identifier: Apache-2.0
"""Tiles of the grouped chain that are worth a trial; `tests/bench/moe_hopper.py --tune` measures them against the library."""

from __future__ import annotations

from isoexec.kernels.grouped_linear.hopper.kernel import REFERENCE, Tile

__all__ = ["TILES"]

TILES = (
    REFERENCE,
    Tile(rows=16, columns=64, depth=128, warps=4, stages=4),
    Tile(rows=16, columns=128, depth=128, warps=4, stages=3),
    Tile(rows=16, columns=32, depth=256, warps=4, stages=3),
    Tile(rows=32, columns=128, depth=64, warps=4, stages=4),
    Tile(rows=64, columns=128, depth=64, warps=4, stages=4),
    Tile(rows=64, columns=256, depth=64, warps=8, stages=3),
    Tile(rows=128, columns=128, depth=64, warps=8, stages=4),
)
