# SPDX-License-Identifier: Apache-2.0
"""Which tile serves how many rows of which weight, read from `table.json`; a weight that is not listed is refused.

Every provider has the same bits, so the table is tuning: a step without a tile, and all rows above the last step, are
cuBLASLt's. One row is always the Triton chain's.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoexec.kernels.domain import DomainError
from isoexec.kernels.linear.hopper.kernel import Tile

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["shapes", "tile_for", "tiles"]

PATH = Path(__file__).with_name("table.json")


@cache
def tiles() -> Mapping[tuple[int, int], tuple[tuple[int, Tile | None], ...]]:
    """(N, K) -> ((most rows, tile or None for the library), ...) in ascending order of rows."""
    return {(e["N"], e["K"]): _steps(e) for e in json.loads(PATH.read_text())["weights"]}


def _steps(entry: dict[str, Any]) -> tuple[tuple[int, Tile | None], ...]:
    steps = tuple(
        (step["up_to"], Tile(**step["tile"]) if step["tile"] else None) for step in entry["few_rows"]
    )
    limits = [limit for limit, _ in steps]
    assert steps[0][1] is not None, "a single row needs the Triton chain"
    assert limits == sorted(set(limits)), "row limits ascend"
    assert all(entry["K"] % tile.depth == 0 for _, tile in steps if tile), "a tile's depth divides K"
    return steps


def shapes() -> tuple[tuple[int, int], ...]:
    """Every (N, K) the table lists."""
    return tuple(tiles())


def tile_for(N: int, K: int, M: int) -> Tile | None:
    """The tile for M rows, or None where the library serves them. Raises `DomainError` for an unlisted weight."""
    if (N, K) not in tiles():
        raise DomainError(
            "sm90_linear",
            f"weight [{N}, {K}]",
            f"the weights certified on this arch, {sorted(shapes())}; add another to tuning.py, tune it, and run the gate again",
        )
    return next((tile for limit, tile in tiles()[N, K] if limit >= M), None)
