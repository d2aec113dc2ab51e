# SPDX-License-Identifier: Apache-2.0
"""Sums over whole sequences: how they differ from each other, and how much the worst ones carry."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from isoexec.daemon.statistics.histogram import BitHistogram

__all__ = ["WORST", "SequenceSums"]

WORST = 16
"""Largest mean abs d of a sequence that are kept one by one."""

# verl's bound on the log ratio of a sequence before it is exponentiated
_BOUND = 20.0
# batches gathered for one pass over their sequences
_WAITING = 64

Doubles = npt.NDArray[np.float64]


@dataclass(slots=True)
class SequenceSums:
    """Counts and sums over sequences with at least one finite pair; adding two of them gives those of both."""

    count: int = 0
    all_equal: int = 0
    mean_d: float = 0.0
    mean_abs_d: float = 0.0
    abs_mean_d: float = 0.0
    inverse_geometric: float = 0.0  # exp(-mean d)
    ratio: float = 0.0  # exp(sum d)
    ratio_square: float = 0.0
    capped_square: float = 0.0  # of each sequence's sum of the capped ratio - 1
    capped_length: float = 0.0  # the same sum times the length
    length_square: float = 0.0
    lowest_mean_d: float = float("inf")
    highest_mean_d: float = float("-inf")
    worst: list[float] = field(default_factory=list)
    means: BitHistogram = field(default_factory=lambda: BitHistogram(np.empty(0, np.float32)))
    waiting: list[Doubles] = field(default_factory=list)  # rows not yet in the sums

    def add(self, rows: Doubles) -> None:
        """Add rows [sequences, COLUMNS] with the capped ratio as one column more; they are kept, not copied."""
        self.waiting.append(rows)
        if len(self.waiting) >= _WAITING:
            self.settle()

    def settle(self) -> SequenceSums:
        """Take everything in that waits, and give itself."""
        if not self.waiting:
            return self
        rows = np.concatenate(self.waiting)
        self.waiting = []
        _, finite, unequal, size, d, _, _, capped = rows[rows[:, 1] > 0].T
        if finite.size == 0:
            return self
        mean, mean_abs = d / finite, size / finite
        ratio = np.exp(np.clip(d, -_BOUND, _BOUND))
        self.count += int(finite.size)
        self.all_equal += int(np.count_nonzero(unequal == 0))
        self.mean_d += float(mean.sum())
        self.mean_abs_d += float(mean_abs.sum())
        self.abs_mean_d += float(np.abs(mean).sum())
        self.inverse_geometric += float(np.exp(np.clip(-mean, -_BOUND, _BOUND)).sum())
        self.ratio += float(ratio.sum())
        self.ratio_square += float((ratio * ratio).sum())
        self.capped_square += float((capped * capped).sum())
        self.capped_length += float((capped * finite).sum())
        self.length_square += float((finite * finite).sum())
        self.lowest_mean_d = min(self.lowest_mean_d, float(mean.min()))
        self.highest_mean_d = max(self.highest_mean_d, float(mean.max()))
        self.worst = sorted([*self.worst, *np.sort(mean_abs)[-WORST:].tolist()], reverse=True)[:WORST]
        self.means.add(np.minimum(mean_abs, np.finfo(np.float32).max).astype(np.float32))
        return self

    def merge(self, other: SequenceSums) -> None:
        self.settle()
        other.settle()
        special: dict[str, Any] = {
            "lowest_mean_d": min(self.lowest_mean_d, other.lowest_mean_d),
            "highest_mean_d": max(self.highest_mean_d, other.highest_mean_d),
            "worst": sorted([*self.worst, *other.worst], reverse=True)[:WORST],
        }
        self.means.merge(other.means)
        for item in fields(self):
            if item.name not in ("means", "waiting"):
                value = getattr(self, item.name)
                setattr(self, item.name, special.get(item.name, value))
                if item.name not in special:
                    setattr(self, item.name, value + getattr(other, item.name))
