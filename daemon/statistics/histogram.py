# SPDX-License-Identifier: Apache-2.0
"""Counts of non-negative values in fine bins that follow the float32 bits: any quantile to 0.4 %, in bounded memory."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["BitHistogram"]

# the upper half of the bits of a float32 without a sign: 8 bits of the exponent, 7 of the mantissa
_BINS = 1 << 15
_PIECE = 1 << 15
_ROOM = np.empty(_PIECE, np.intp)

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]


class BitHistogram:
    """Bin b holds the values whose upper 16 bits are b, 128 bins an octave; exact zeros are counted beside them.

    Merging adds the counts, so a histogram of many windows is that of all their values.
    """

    def __init__(self, edges: Floats) -> None:
        """`edges` are those of a coarse histogram that is counted exactly beside the fine one; value <= edge."""
        self.zeros = 0
        self.fine: Counts = np.zeros(_BINS, np.int64)
        self._edges = edges
        self._coarse: Counts = np.zeros(edges.size + 1, np.int64)
        self._cut = np.unique(edges.view(np.uint32) >> 16).astype(np.intp)
        self._is_cut = np.zeros(_BINS, np.bool_)
        self._is_cut[self._cut] = True

    @staticmethod
    def _lower(index: int) -> float:
        return float(np.asarray([index << 16], np.uint32).view(np.float32)[0])

    @property
    def total(self) -> int:
        return self.zeros + int(self.fine.sum())

    @property
    def coarse(self) -> Counts:
        """Counts by the edges given: one for each, then one for what is above."""
        bins = np.arange(_BINS, dtype=np.uint32) << 16
        bucket = np.searchsorted(self._edges, bins.view(np.float32), side="left")
        counts = np.where(self._is_cut, 0, self.fine)
        found = np.bincount(bucket, weights=counts, minlength=self._edges.size + 1)[: self._edges.size + 1]
        whole: Counts = found.astype(np.int64) + self._coarse
        whole[0] += self.zeros
        return whole

    def add(self, values: Floats) -> None:
        """Count float32 values that are finite and have no sign."""
        for at in range(0, values.size, _PIECE):
            self._add(values[at : at + _PIECE])

    def _add(self, values: Floats) -> None:
        place = _ROOM[: values.size]
        np.copyto(place, values.view(np.uint16)[1::2])
        counts = np.bincount(place)
        if counts[0]:
            # the smallest bin holds subnormals too
            zeros = values.size - int(np.count_nonzero(values))
            self.zeros += zeros
            counts[0] -= zeros
        self.fine[: counts.size] += counts
        if self._cut.size and counts[self._cut[self._cut < counts.size]].any():
            split = values[self._is_cut.take(place)]
            found = np.searchsorted(self._edges, split, side="left")
            self._coarse += np.bincount(found, minlength=self._coarse.size)

    def add_zeros(self, count: int) -> None:
        """Count zeros; a negative number takes back zeros that stood for what is no number."""
        self.zeros += count

    def merge(self, other: BitHistogram) -> None:
        self.zeros += other.zeros
        self.fine += other.fine
        self._coarse += other._coarse

    def quantile(self, share: float, largest: float) -> float:
        """Give the quantile of a share in [0, 1], NaN of nothing: off by 1/256 of itself, never above `largest`."""
        total = self.total
        if total == 0:
            return math.nan
        rank = share * (total - 1)
        if rank < self.zeros:
            return 0.0
        running = np.cumsum(self.fine) + self.zeros
        index = int(np.searchsorted(running, rank, side="right"))
        low = self._lower(index)
        high = min(self._lower(index + 1), largest)
        before = int(running[index]) - int(self.fine[index])
        inside = min((rank - before + 0.5) / int(self.fine[index]), 1.0)
        return min(low + max(high - low, 0.0) * inside, largest)
