# SPDX-License-Identifier: Apache-2.0
"""The experts' weights that are served, and which tile serves how many rows of which; read from `table.json`.

A weight of any number of experts is listed by its N and K; of a listed one, shares of N or of K over 2, 4 and 8 ranks are served
too. Every provider has the same bits, so tiles are tuning: rows above the last step are the library's, in the layouts in which
its bits are the chain's (`library`); in the others they are a tile's.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from isoexec.kernels.domain import DomainError
from isoexec.kernels.grouped_linear.hopper.kernel import Tile

__all__ = ["LAYOUTS", "PATH", "library_serves", "require_listed", "tile_for", "weights"]

PATH = Path(__file__).with_name("table.json")
SHARES = (1, 2, 4, 8)
LAYOUTS = ("forward", "input", "weight")
Steps = tuple[tuple[int, Tile], ...]


@cache
def _table() -> dict[tuple[int, int], dict[str, Steps]]:
    return {
        (entry["N"], entry["K"]): {
            layout: tuple((step["up_to"], Tile(**step["tile"])) for step in entry.get(layout, ()))
            for layout in LAYOUTS
        }
        for entry in json.loads(PATH.read_text())["weights"]
    }


@cache
def library_serves(layout: str) -> bool:
    """Whether torch's grouped product is admitted for a layout: forward, input gradient or weight gradient."""
    return layout in json.loads(PATH.read_text())["library"]


def weights() -> tuple[tuple[int, int], ...]:
    """Every (N, K) the table lists."""
    return tuple(_table())


@cache
def _served() -> frozenset[tuple[int, int]]:
    return frozenset(
        one for N, K in weights() for share in SHARES for one in ((N // share, K), (N, K // share))
    )


def require_listed(N: int, K: int) -> None:
    """Raise `DomainError` for a weight that is not listed, nor a share of one that is."""
    if (N, K) not in _served():
        raise DomainError(
            "sm90_grouped_linear",
            f"weights [experts, {N}, {K}]",
            f"the weights certified on this arch, {sorted(weights())}, and shares of them; add another to table.json, and run "
            "the gate again",
        )


def tile_for(layout: str, N: int, K: int, rows: int) -> Tile | None:
    """The tile for that many rows of all experts together, or None where the library serves them."""
    steps = _table().get((N, K), {}).get(layout, ())
    return next((tile for limit, tile in steps if limit >= rows), None)
