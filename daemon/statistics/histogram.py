# SPDX-License-Identifier: Apache-2.0
"""Counts of non-negative values in fine bins that follow the float32 bits: any quantile to 0.4 %, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

__all__ = ["BitHistogram"]

# the upper half of the bits of a float32 without a sign: 8 bits of the exponent, 7 of the mantissa
_BINS = 1 << 15
_PIECE = 1 << 16
_ROOM = np.empty(_PIECE, np.intp)
_NO_BINS = np.empty(0, np.int64)

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Edges:
    """Coarse edges, the bins that one of them splits, and the coarse bucket of every other bin."""

    values: Floats
    cut: npt.NDArray[np.intp]
    is_cut: npt.NDArray[np.bool_]
    bucket: npt.NDArray[np.intp]


@cache
def _edges(raw: bytes) -> _Edges:
    values = np.frombuffer(raw, np.float32)
    is_cut = np.zeros(_BINS, np.bool_)
    is_cut[values.view(np.uint32) >> 16] = True
    lower = (np.arange(_BINS, dtype=np.uint32) << 16).view(np.float32)
    return _Edges(values, np.flatnonzero(is_cut), is_cut, np.searchsorted(values, lower, side="left"))


class BitHistogram:
    """Bin b holds the values whose upper 16 bits are b, 128 bins an octave; exact zeros are counted beside them.

    Merging adds the counts, so a histogram of many windows is that of all their values.
    """

    def __init__(self, edges: Floats) -> None:
        """`edges` are those of a coarse histogram that is counted exactly beside the fine one; value <= edge."""
        self.zeros = 0
        self._fine: Counts | None = None  # a window of equal bits never needs its 256 KiB
        self._edges = _edges(edges.tobytes())
        self._coarse: Counts = np.zeros(edges.size + 1, np.int64)

    @staticmethod
    def _lower(index: int) -> float:
        return float(np.asarray([index << 16], np.uint32).view(np.float32)[0])

    @property
    def total(self) -> int:
        return self.zeros + (0 if self._fine is None else int(self._fine.sum()))

    @property
    def coarse(self) -> Counts:
        """Counts by the edges given: one for each, then one for what is above."""
        whole = self._coarse.copy()
        whole[0] += self.zeros
        bins, counts = self._occupied()
        kept = ~self._edges.is_cut[bins]
        found = np.bincount(self._edges.bucket[bins[kept]], weights=counts[kept], minlength=whole.size)
        return whole + found[: whole.size].astype(np.int64)

    def _occupied(self) -> tuple[npt.NDArray[np.intp], Counts]:
        """Bins that hold something, and how much."""
        if self._fine is None:
            return _NO_BINS, _NO_BINS
        bins = np.flatnonzero(self._fine)
        return bins, self._fine[bins]

    def _counts(self) -> Counts:
        if self._fine is None:
            self._fine = np.zeros(_BINS, np.int64)
        return self._fine

    def counts(self) -> tuple[Counts, npt.NDArray[np.bool_], Counts, Floats]:
        """Give what `kernel.add_batch` counts into: bins, which of them an edge splits, what is counted by edges, the edges.

        Bin 0 holds no zeros.
        """
        return self._counts(), self._edges.is_cut, self._coarse, self._edges.values

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
            if zeros == values.size:
                return
        self._counts()[: counts.size] += counts
        edges = self._edges
        if edges.cut.size and counts[edges.cut[edges.cut < counts.size]].any():
            split = values[np.flatnonzero(edges.is_cut.take(place))]
            found = np.searchsorted(edges.values, split, side="left")
            self._coarse += np.bincount(found, minlength=self._coarse.size)

    def add_zeros(self, count: int) -> None:
        """Count zeros; a negative number takes back zeros that stood for what is no number."""
        self.zeros += count

    def merge(self, other: BitHistogram) -> None:
        self.zeros += other.zeros
        if other._fine is not None:
            self._counts()[:] += other._fine
        self._coarse += other._coarse

    def quantiles(self, shares: Sequence[float], largest: float) -> dict[float, float]:
        """Give the quantiles of shares in [0, 1], NaN of nothing: off by 1/256 of themselves, never above `largest`."""
        bins, counts = self._occupied()
        running = np.cumsum(counts) + self.zeros
        total = int(running[-1]) if running.size else self.zeros
        found = {}
        for share in shares:
            rank = share * (total - 1)
            if total == 0:
                found[share] = math.nan
            elif rank < self.zeros:
                found[share] = 0.0
            else:
                at = int(np.searchsorted(running, rank, side="right"))
                low, high = (self._lower(int(bins[at]) + step) for step in (0, 1))
                count = int(counts[at])
                inside = min((rank - (int(running[at]) - count) + 0.5) / count, 1.0)
                found[share] = min(low + max(min(high, largest) - low, 0.0) * inside, largest)
        return found
