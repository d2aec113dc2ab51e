# SPDX-License-Identifier: Apache-2.0
"""Which tile serves how many rows of which weight in which product, read from `table.json`; other weights are refused.

Every provider has the same bits, so the table is tuning: a step without a tile, and all rows above the last step, are
cuBLASLt's. One row of a forward product is always the Triton chain's, and so is every product that goes on from an accumulator:
a library adds one after its loop over K, which is another expression.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoexec.kernels.domain import DomainError
from isoexec.kernels.linear.hopper.kernel import Tile
from isoexec.kernels.linear.hopper.naive import STEP

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEGREES", "PRODUCTS", "UNTUNED", "Product", "chain_tile", "known", "shapes", "tile_for", "tiles"]

Product = Literal["input", "weight", "continue"]
PRODUCTS: tuple[Product, ...] = ("input", "weight", "continue")
Steps = tuple[tuple[int, Tile | None], ...]

PATH = Path(__file__).with_name("table.json")
DEGREES = (1, 2, 4, 8, 16)  # into how many parts a listed weight may be cut, along either side
ANY = 2**31 - 1  # more rows than there are

_FEW = Tile(kind="swapped", rows=16, columns=64, depth=128, warps=4, stages=6)
_SOME = Tile(kind="swapped", rows=64, columns=128, depth=64, warps=4, stages=6)
_MANY = Tile(kind="maps", rows=128, columns=256, depth=64, warps=8, stages=3)
# for what has not been measured; the first step of a gradient is where libraries have matrix-vector kernels
UNTUNED: Mapping[Product, Steps] = {
    "input": ((16, _FEW),),
    "weight": ((16, _SOME),),
    "continue": ((16, _FEW), (64, _SOME), (ANY, _MANY)),
}
# for a part of a merged shard, which no library is certified for: queries without their keys and values, say
PART: Mapping[str, Steps] = {"input": ((16, _FEW), (ANY, _MANY)), "continue": UNTUNED["continue"]}


@cache
def _read() -> Any:
    return json.loads(PATH.read_text())


@cache
def tiles() -> Mapping[tuple[int, int], Steps]:
    """(N, K) -> ((most rows, tile or None for the library), ...) in ascending order of rows, for forward products."""
    return {(e["N"], e["K"]): _steps(e) for e in _read()["weights"]}


@cache
def _chain_tiles() -> Mapping[tuple[Product, int, int], Steps]:
    held = _read().get("products", {})
    found = {
        (name, e["N"], e["K"]): tuple(
            (ANY if s["up_to"] is None else s["up_to"], Tile(**s["tile"]) if s["tile"] else None)
            for s in e["steps"]
        )
        for name in PRODUCTS
        for e in held.get(name, [])
    }
    for (name, *_), steps in found.items():
        assert steps[0][1] is not None, "the fewest rows need the Triton chain"
        assert name != "continue" or (steps[-1][0] == ANY and all(tile for _, tile in steps)), (
            "no library goes on"
        )
    return found


def _steps(entry: dict[str, Any]) -> Steps:
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


@cache
def _whole(N: int, K: int) -> tuple[int, int] | None:
    """The listed weight that [N, K] is, or of which it is a shard of whole steps."""
    if N % STEP == 0 and K % STEP == 0:
        listed = tiles()
        for parts in DEGREES:
            for whole in ((N * parts, K), (N, K * parts)):
                if whole in listed:
                    return whole
    return None


def known(N: int, K: int) -> tuple[int, int]:
    """The listed weight that [N, K] is, or of which it is a shard of whole steps. Raises `DomainError` where there is none."""
    whole = _whole(N, K)
    if whole is not None:
        return whole
    raise DomainError(
        "sm90_linear",
        f"weight [{N}, {K}]",
        f"the weights certified on this arch, {sorted(shapes())}, and their shards of whole {STEP}s over up to {DEGREES[-1]} "
        "ranks; add another to tuning.py, tune it, and run the gate again",
    )


@cache
def _part(N: int, K: int) -> bool:
    """Whether [N, K] is a part of a listed weight's outputs that is none of its shards."""
    return _whole(N, K) is None and N % STEP == 0 and any(k == K and n > N for n, k in tiles())


def tile_for(N: int, K: int, M: int) -> Tile | None:
    """The tile for a forward product of M rows, or None where the library serves them; `DomainError` as in `known`.

    A shard takes its own weight's tile.
    """
    whole = known(N, K)
    tile = next((tile for limit, tile in tiles()[whole] if limit >= M), None)
    return replace(tile, depth=gcd(tile.depth, K)) if tile else None


def chain_tile(product: Product, N: int, K: int, M: int) -> Tile | None:
    """The tile for another product than the forward one, or None for the library; `DomainError` as in `known`.

    Gradients of inputs and what goes on from them admit parts of a merged shard too: any whole steps of a listed weight's
    outputs, by own chains alone.
    """
    if product in PART and _part(N, K):
        steps = PART[product]
    else:
        whole = known(N, K)
        held = _chain_tiles()
        steps = held.get((product, N, K)) or held.get((product, *whole)) or UNTUNED[product]
    return next((tile for limit, tile in steps if limit >= M), None)
