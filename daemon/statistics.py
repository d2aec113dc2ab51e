# SPDX-License-Identifier: Apache-2.0
"""Statistics of d over paired tokens, from the raw bits of both sides, added up batch by batch.

Counts come before averages: bitwise equality is counted on the integers, non-finite pairs are counted and
leave everything else. Sums are float64. The 99th percentile is exact up to `RETAINED` tokens a window, and from
every k-th token above.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from isoexec.contracts.window import FILLED_BELOW, HISTOGRAM_EDGES, PairStats

__all__ = ["RETAINED", "PairAccumulator"]

RETAINED = 4_000_000
"""Values of abs d kept for the percentile, at most."""

# largest abs d that enters exp(d): beyond it the sum of squares of rho would overflow float64
_RHO_CLIP = 300.0
_EDGES = np.asarray(HISTOGRAM_EDGES, dtype=np.float32)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class PairAccumulator:
    """Adds up what is known of one pair of cases in one window."""

    def __init__(self, pair: tuple[str, str], *, retained: int = RETAINED) -> None:
        self.pair = pair
        self.tokens = 0
        self.bitwise_equal = 0
        self.nonfinite = 0
        self.exact_zero = 0
        self.positive = 0
        self.id_mismatch = 0
        self.unpaired: dict[str, int] = {}
        self.sum_abs = 0.0
        self.histogram = np.zeros(len(HISTOGRAM_EDGES) + 1, np.int64)
        self._retained = retained
        self._powers = np.zeros(5)  # sums of d^0 .. d^4
        self._sides = np.zeros(5)  # sums of x, y, xx, yy, xy
        self._rho = np.zeros(2)  # sums of rho, rho^2
        self._k3 = 0.0
        self._max = 0.0
        self._negative = 0
        self._moved = 0
        self._on_grid = 0
        self._first = np.zeros(2)  # sum, count
        self._last = np.zeros(2)
        self._early = np.zeros(2)
        self._late = np.zeros(2)
        self._kept: list[npt.NDArray[np.float64]] = []
        self._kept_count = 0
        self._stride = 1

    def count_unpaired(self, role: str, tokens: int) -> None:
        self.unpaired[role] = self.unpaired.get(role, 0) + tokens

    def add(
        self,
        first: Floats,
        second: Floats,
        lengths: npt.NDArray[np.int64],
        first_ids: Ints | None = None,
        second_ids: Ints | None = None,
    ) -> None:
        """Take logprobs [n] and [n], in the order of the pair, of sequences of `lengths` one after the other."""
        n = int(first.shape[0])
        if n == 0:
            return
        a_bits, b_bits = first.view(np.int32), second.view(np.int32)
        self.tokens += n
        self.bitwise_equal += int(np.count_nonzero(a_bits == b_bits))
        if first_ids is not None and second_ids is not None:
            self.id_mismatch += int(np.count_nonzero(first_ids != second_ids))
        # a near-certain token rounds to 0.0 by itself; a filled one is 0.0 where the other side is clearly below
        filled = ((first == 0) & (second < FILLED_BELOW)) | ((second == 0) & (first < FILLED_BELOW))
        self.exact_zero += int(np.count_nonzero(filled))
        self.positive += int(np.count_nonzero((first > 0) | (second > 0)))
        finite = np.isfinite(first) & np.isfinite(second)
        self.nonfinite += n - int(np.count_nonzero(finite))
        x, y = first.astype(np.float64), second.astype(np.float64)
        with np.errstate(invalid="ignore"):
            d = y - x
        self._add_positions(np.abs(d), finite, lengths)
        if not finite.all():
            x, y, d = x[finite], y[finite], d[finite]
        if d.size:
            self._add_finite(x, y, d)

    def _add_finite(
        self, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], d: npt.NDArray[np.float64]
    ) -> None:
        size = np.abs(d)
        square = d * d
        self._powers += (d.size, d.sum(), square.sum(), (square * d).sum(), (square * square).sum())
        self._sides += (x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum())
        clipped = np.clip(d, -_RHO_CLIP, _RHO_CLIP)
        grown = np.expm1(clipped)
        rho = grown + 1.0
        self._rho += (rho.sum(), (rho * rho).sum())
        self._k3 += float((grown - clipped).sum())
        self._max = max(self._max, float(size.max()))
        self._negative += int(np.count_nonzero(d < 0))
        moved = d != 0
        self._moved += int(np.count_nonzero(moved))
        scaled = d * 32.0
        self._on_grid += int(np.count_nonzero(moved & (scaled == np.rint(scaled))))
        self.sum_abs += float(size.sum())
        with np.errstate(over="ignore"):
            buckets = np.searchsorted(_EDGES, size.astype(np.float32), side="left")
        self.histogram += np.bincount(buckets, minlength=self.histogram.size)
        self._keep(size)

    def _add_positions(
        self, size: npt.NDArray[np.float64], finite: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]
    ) -> None:
        lengths = lengths[lengths > 0]
        ends = np.cumsum(lengths)
        starts = ends - lengths
        place = np.arange(size.size) - np.repeat(starts, lengths)
        late = 2 * place >= np.repeat(lengths, lengths)
        for sums, chosen in (
            (self._first, starts[finite[starts]]),
            (self._last, (ends - 1)[finite[ends - 1]]),
            (self._early, finite & ~late),
            (self._late, finite & late),
        ):
            picked = size[chosen]
            np.add(sums, (picked.sum(), picked.size), out=sums)

    def _keep(self, size: npt.NDArray[np.float64]) -> None:
        kept = size[:: self._stride]
        self._kept.append(kept)
        self._kept_count += kept.size
        while self._kept_count > self._retained:
            thinned = np.concatenate(self._kept)[::2].copy()
            self._kept, self._kept_count = [thinned], thinned.size
            self._stride *= 2

    def result(self) -> PairStats:
        """Give the statistics so far; means of nothing are NaN."""
        n, s1, s2, s3, s4 = (float(value) for value in self._powers)
        counts: dict[str, Any] = {
            "pair": self.pair,
            "tokens": self.tokens,
            "bitwise_equal": self.bitwise_equal,
            "nonfinite": self.nonfinite,
            "exact_zero": self.exact_zero,
            "positive": self.positive,
            "id_mismatch": self.id_mismatch,
            "unpaired": dict(self.unpaired),
            "histogram": tuple(int(count) for count in self.histogram),
        }
        if n == 0:
            return PairStats(**counts)
        mean, second = s1 / n, s2 / n
        variance = max(second - mean * mean, 0.0)
        fourth = s4 / n - 4 * mean * s3 / n + 6 * mean * mean * second - 3 * mean**4
        rho = float(self._rho[0]) / n
        return PairStats(
            **counts,
            mean_d=mean,
            mean_abs_d=self.sum_abs / n,
            max_abs_d=self._max,
            p99_abs_d=float(np.quantile(np.concatenate(self._kept), 0.99)) if self._kept else math.nan,
            std_d=math.sqrt(variance),
            kurtosis=fourth / (variance * variance) if variance * variance > 0 else math.nan,
            r_ratio=-2.0 * mean / second if second > 0 else math.nan,
            share_negative=self._negative / self._moved if self._moved else math.nan,
            k1=-mean,
            k3=self._k3 / n,
            rho_mean=rho,
            rho_z=_z(rho, float(self._rho[1]) / n, n),
            first_token_mean_abs_d=_mean(self._first),
            last_token_mean_abs_d=_mean(self._last),
            position_growth=_ratio(_mean(self._late), _mean(self._early)),
            correlation=_correlation(self._sides, n),
            grid_share=self._on_grid / self._moved if self._moved else math.nan,
        )


def _mean(sums: npt.NDArray[np.float64]) -> float:
    return float(sums[0] / sums[1]) if sums[1] else math.nan


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom > 0 else math.nan


def _z(mean: float, square: float, n: float) -> float:
    deviation = math.sqrt(max(square - mean * mean, 0.0) / n)
    if deviation > 0:
        return (mean - 1.0) / deviation
    return 0.0 if mean == 1.0 else math.copysign(math.inf, mean - 1.0)


def _correlation(sums: npt.NDArray[np.float64], n: float) -> float:
    x, y, xx, yy, xy = (float(value) / n for value in sums)
    spread = (xx - x * x) * (yy - y * y)
    return (xy - x * y) / math.sqrt(spread) if spread > 0 else math.nan
