# SPDX-License-Identifier: Apache-2.0
"""Products and schedules that `handoff.py` tries on several GPUs, and what each was expected to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import subjects  # type: ignore[import-not-found]  # noqa: F401 - puts the package on the path
from torch import Tensor

from isoexec.kernels.linear.hopper.handoff.kernel import Cut
from isoexec.kernels.linear.hopper.handoff.schedule import Schedule
from isoexec.kernels.linear.hopper.kernel import Tile

__all__ = ["CASES", "FORMS", "ROWS", "Case", "candidates", "cut", "label", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One product: `N` results a row over a K of which each rank holds its share."""

    name: str
    product: str  # row, gradient, columns
    N: int
    K: int
    laps: int = 1

    def parts(self, x: Tensor) -> list[int]:
        """The laps of a rank's `x [M, K / ranks]`."""
        return [x.shape[1] // self.laps] * self.laps


CASES = (
    Case(name="8B o", product="row", N=4096, K=4096),
    Case(name="8B down", product="row", N=4096, K=12288),
    Case(name="35B out", product="row", N=2048, K=4096),
    Case(name="8B gate_up gradient", product="gradient", N=4096, K=24576, laps=2),
    Case(name="8B qkv gradient", product="gradient", N=4096, K=6144),
    Case(name="8B o", product="columns", N=4096, K=4096),
    Case(name="8B down", product="columns", N=4096, K=12288),
    Case(name="35B out", product="columns", N=2048, K=4096),
)
ROWS = (8192, 64, 256, 16, 1024, 128, 16384, 1, 4096, 2)  # what matters most first: time may end
FORMS = ("all", "rows")


def cut(rows: int, columns: int, depth: int, warps: int, stages: int, **free: Any) -> Schedule:
    made = Cut(rows=rows, columns=columns, depth=depth, warps=warps, stages=stages, **free)
    return Schedule(kind="chain", cut=made)


def tile(kind: Any, rows: int, columns: int, depth: int, warps: int, stages: int) -> Schedule:
    made = Tile(kind=kind, rows=rows, columns=columns, depth=depth, warps=warps, stages=stages)
    return Schedule(kind="columns", tile=made)


def candidates(case: Case, M: int) -> list[Schedule]:
    """Schedules worth a trial, the likeliest first."""
    height = min(64, max(16, 1 << (M - 1).bit_length()))
    if case.product == "columns":
        if M > 256:
            return [Schedule(kind="columns")]
        found = [tile("swapped", height, 64, 128, 4, 4), tile("maps", height, 32, 128, 4, 6)]
        return [*found, tile("swapped", height, 64, 64, 4, 8), Schedule(kind="columns")]
    if M <= 256:
        found = [
            cut(height, 64, 128, 4, 4, swapped=True, prefetch=16384),
            cut(height, 64, 128, 4, 4, swapped=True),
            cut(height, 64, 128, 4, 6 if height <= 32 else 5, swapped=True, prefetch=16384),
            cut(height, 64, 64, 4, 8, swapped=True, prefetch=16384),
            cut(height, 64, 256, 4, 3 if height <= 32 else 2, swapped=True, prefetch=16384),
            cut(height, 128, 128, 8, 4, swapped=True, prefetch=16384),
            cut(height, 32, 128, 4, 6, prefetch=16384),
            cut(height, 32, 256, 4, 3 if height <= 32 else 2, prefetch=16384),
        ]
        return [*found, *([cut(128, 64, 64, 4, 6), cut(128, 128, 64, 8, 4)] if M >= 128 else [])]
    if M <= 1024:
        return [
            cut(128, 128, 64, 8, 4),
            cut(128, 128, 64, 8, 3, per_sm=2),
            cut(64, 128, 64, 4, 4, per_sm=2),
            cut(128, 64, 64, 4, 4, per_sm=2),
            cut(128, 256, 64, 8, 4),
            Schedule(kind="rows", blocks=1, mover="engine"),
            Schedule(kind="rows", blocks=1, mover="kernel"),
        ]
    return [
        cut(128, 128, 64, 8, 3, per_sm=2),
        cut(128, 256, 64, 8, 4),
        Schedule(kind="rows", blocks=2, mover="engine"),
        Schedule(kind="rows", blocks=4, mover="engine"),
        cut(128, 256, 64, 8, 3),
        cut(256, 128, 64, 8, 4),
        cut(128, 128, 64, 4, 3, per_sm=2),
        Schedule(kind="rows", blocks=1, mover="engine"),
        Schedule(kind="rows", blocks=2, mover="kernel"),
        cut(128, 128, 64, 8, 3, per_sm=2, group=4),
        cut(128, 128, 64, 8, 3, per_sm=2, group=16),
        cut(128, 256, 64, 8, 4, group=4),
        cut(128, 256, 64, 8, 4, group=16),
        cut(128, 128, 128, 8, 3),
    ]


# What is expected, written before it was measured: rates of an H200 as docs/results/kernels-h200.md has them, NVLink as its
# data sheet has it less a sixth, and guesses for a launch and for a hop (store, fence, poll, load)
LIBRARY, CHAIN, LINK, MEMORY, LAUNCH_US, HOP_US = 730e6, 640e6, 380e3, 4.0e6, 2.5, 4.0  # flop, bytes a us


def predicted(case: Case, M: int, form: str, ranks: int, one: Schedule | None) -> float:
    """Microseconds of a schedule; of the library and NCCL where None."""
    N, K = case.N, case.K
    flops, weights = 2 * M * N * K / ranks, 2 * N * K / ranks

    def walk(rate: float, share: float = 1.0) -> float:
        return max(flops * share / rate, weights / MEMORY)

    shares = (ranks - 1) / ranks
    results = 2 * M * N * shares / LINK
    if one is None:
        return LAUNCH_US + walk(LIBRARY) + 10 + results * (2 if form == "all" else 1)
    if one.kind == "columns":
        gathered = 2 * M * K * shares / LINK
        sent = results if form == "all" else results / ranks
        return 3 * LAUNCH_US + 2 * HOP_US + walk(LIBRARY) + gathered + sent
    if one.kind == "rows":
        moved = (2 * N * K * shares + 2 * M * K * shares / ranks) / LINK
        first = (2 * N * K * shares + 2 * M * K * shares / ranks / one.blocks) / LINK
        tail = results / one.blocks if form == "all" else 0.0
        return 4 * LAUNCH_US + HOP_US + max(first + walk(LIBRARY), moved + walk(LIBRARY) / one.blocks) + tail
    assert one.cut is not None
    tiles = -(-M // one.cut.rows) * -(-N // one.cut.columns)
    waves = max(1.0, tiles / (132 * one.cut.per_sm))
    first = walk(CHAIN) / waves
    stream = 4 * M * N / LINK * case.laps
    return LAUNCH_US + max(walk(CHAIN), stream) + (ranks - 1) * (first + HOP_US) + HOP_US


def label(one: Schedule) -> str:
    if one.kind == "rows":
        return f"rows {one.blocks} blocks, {one.mover}"
    if one.kind == "columns":
        return f"columns {'library' if one.tile is None else _shape(one.tile)}"
    assert one.cut is not None
    more = (
        f" group {one.cut.group}"
        + (" swapped" if one.cut.swapped else "")
        + (" prefetch" if one.cut.prefetch else "")
    )
    return f"chain {_shape(one.cut)} x{one.cut.per_sm}{more}"


def _shape(t: Cut | Tile) -> str:
    return f"{t.rows}x{t.columns}x{t.depth} w{t.warps} s{t.stages}"
