# SPDX-License-Identifier: Apache-2.0
"""Which schedule serves a product, read from `table.json`; every one has the same bits, so the table is tuning.

Every rank must choose the same, so the choice rests on sizes alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoexec.kernels.domain import DomainError
from isoexec.kernels.linear.hopper.handoff.kernel import Cut
from isoexec.kernels.linear.hopper.kernel import Tile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isoexec.kernels.linear.hopper.handoff.moves import Mover

__all__ = ["Form", "Schedule", "choose", "fitted"]

PATH = Path(__file__).with_name("table.json")
Form = Literal["all", "rows"]
Product = Literal["row", "gradient", "columns"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`chain` with a cut, `rows` in blocks by a mover, or `columns` with the few-row chain's tile or the library (None)."""

    kind: Literal["chain", "rows", "columns"]
    cut: Cut | None = None
    blocks: int = 1
    mover: Mover = "engine"
    tile: Tile | None = None


def _schedule(entry: Mapping[str, Any]) -> Schedule:
    made = dict(entry)
    if made.get("cut"):
        made["cut"] = Cut(**made["cut"])
    if made.get("tile"):
        made["tile"] = Tile(**made["tile"])
    return Schedule(**made)


@cache
def _steps() -> Mapping[tuple[Any, ...], tuple[tuple[int, Schedule], ...]]:
    """(product, form, N, K, ranks) -> ((most rows, schedule), ...); N, K and ranks are 0 where a step serves any."""
    table = json.loads(PATH.read_text())
    found = {}
    for entry in table["products"]:
        steps = tuple((step["up_to"], _schedule(step["schedule"])) for step in entry["steps"])
        limits = [limit for limit, _ in steps]
        assert limits == sorted(set(limits)), "row limits ascend"
        assert limits[-1] >= 1 << 30, "the last step serves any number of rows"
        generic = not (entry["N"] or entry["K"] or entry["ranks"])
        assert not (generic and any(schedule.kind == "rows" for _, schedule in steps)), (
            "what serves any size fits any room"
        )
        found[entry["product"], entry["form"], entry["N"], entry["K"], entry["ranks"]] = steps
    return found


def choose(
    M: int,
    N: int,
    K: int,
    ranks: int,
    form: Form = "all",
    product: Product = "row",
    elements: int | None = None,
    itemsize: int = 2,
) -> Schedule:
    """The schedule for M rows of a product with N results a row over a K of which each rank holds a share.

    Where a room of `elements` cannot hold what `rows` gathers (results of `itemsize` bytes), the chain serves, in as many
    launches as it takes; the room has the same size on every rank.
    """
    steps = _steps()
    any_size = steps[product, form, 0, 0, 0]
    own = steps.get((product, form, N, K, ranks), any_size)
    chosen = next(schedule for limit, schedule in own if limit >= M)
    if chosen.kind == "rows" and elements is not None:
        gathered = 2 * K * (N + -(-M // ranks))
        received = M * N * itemsize if form == "all" else 0
        if gathered > 4 * elements or received > 2 * elements:
            return next(schedule for limit, schedule in any_size if limit >= M)
    return chosen


def fitted(cut: Cut, part: int) -> int:
    """The cut's depth, or the largest smaller one that divides a lap's share of K."""
    for depth in (cut.depth, 64, 32, 16):
        if depth <= cut.depth and part % depth == 0:
            return depth
    raise DomainError("handoff", f"{part} of K on a rank in a lap", "a multiple of 16, the step of the chain")
