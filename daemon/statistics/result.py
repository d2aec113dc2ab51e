# SPDX-License-Identifier: Apache-2.0
"""Turns sums into statistics. Formulas, their sources and their signs: docs/statistics.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isoexec.contracts.detail import Bucket
from isoexec.contracts.window import PairStats
from isoexec.daemon.statistics.places import FROM_END, POSITIONS, Groups
from isoexec.daemon.statistics.sequences import SequenceSums
from isoexec.daemon.statistics.sums import State, Sums

__all__ = ["QUANTILES", "Detail", "detail_of", "stats_of"]

QUANTILES = (0.5, 0.9, 0.99, 0.999)

Doubles = npt.NDArray[np.float64]

# fewer sequences than this tell nothing of how tokens of one sequence hang together
_SEQUENCES = 10


@dataclass(frozen=True, kw_only=True)
class Detail:
    """What is known of a pair beside `PairStats`. Nats unless said; NaN where too little was seen."""

    k2: float = math.nan
    quantiles: Mapping[float, float]
    sign_z: float = math.nan
    rho_z_capped: float = math.nan
    chi2: float = math.nan
    ess_share: float = math.nan
    clip_share: float = math.nan
    exp_abs_mean: float = math.nan
    perplexity_ratio: float = math.nan
    probability_diff_mean: float = math.nan
    probability_diff_std: float = math.nan
    probability_diff_max: float = math.nan
    lag1: float = math.nan
    length_slope: float = math.nan
    length_correlation: float = math.nan
    sequences: int = 0
    sequences_equal: int = 0
    sequence_mean_d: float = math.nan
    sequence_abs_mean_d: float = math.nan
    sequence_mean_abs_d: float = math.nan
    sequence_lowest_mean_d: float = math.nan
    sequence_highest_mean_d: float = math.nan
    sequence_perplexity_ratio: float = math.nan
    sequence_ratio_mean: float = math.nan
    sequence_ess_share: float = math.nan
    sequence_chi2: float = math.nan
    sequence_quantiles: Mapping[float, float]
    worst_sequences: tuple[float, ...] = ()
    by_position: tuple[Bucket, ...] = ()
    by_distance_to_end: tuple[Bucket, ...] = ()
    by_label: Mapping[str, tuple[Bucket, ...]]


def stats_of(pair: tuple[str, str], state: State, groups: Groups, unpaired: Mapping[str, int]) -> PairStats:
    """Give the statistics that windows keep."""
    sums, n = state.sums, state.sums.finite
    counts = PairStats(
        pair=pair,
        tokens=int(sums.tokens),
        bitwise_equal=int(sums.tokens - sums.unequal),
        nonfinite=int(sums.nonfinite),
        exact_zero=int(sums.filled),
        positive=int(sums.positive),
        id_mismatch=int(sums.id_mismatch),
        unpaired=dict(unpaired),
        histogram=tuple(int(count) for count in state.histogram.coarse),
    )
    if n == 0:
        return counts
    mean, second = sums.d1 / n, sums.d2 / n
    variance = _variance(sums)
    fourth = sums.d4 / n - 4 * mean * sums.d3 / n + 6 * mean * mean * second - 3 * mean**4
    moved = sums.moved
    position, distance, half = groups.by_position(), groups.by_distance(), groups.by_half()
    values = {
        "mean_d": mean,
        "mean_abs_d": sums.abs1 / n,
        "max_abs_d": sums.largest,
        "p99_abs_d": state.histogram.quantiles((0.99,), sums.largest)[0.99],
        "std_d": math.sqrt(variance),
        "kurtosis": fourth / (variance * variance) if variance * variance > 0 else math.nan,
        "r_ratio": -2.0 * mean / second if second > 0 else math.nan,
        "share_negative": _ratio(sums.negative, moved),
        "k1": -mean,
        "k3": sums.k3 / n,
        "rho_mean": 1.0 + sums.excess1 / n,
        "rho_z": _z(sums.excess1 / n, math.sqrt(max(sums.excess2 / n - (sums.excess1 / n) ** 2, 0.0) / n)),
        "first_token_mean_abs_d": _mean_abs(position[:, 0]),
        "last_token_mean_abs_d": _mean_abs(distance[:, 0]),
        "position_growth": _ratio(_mean_abs(half[:, 1]), _mean_abs(half[:, 0])),
        "correlation": _correlation(sums, variance),
        "grid_share": _ratio(sums.on_grid, moved),
    }
    fields = {name: getattr(counts, name) for name in counts.__dataclass_fields__}
    return PairStats(**(fields | values))


def detail_of(state: State, groups: Groups, sequences: SequenceSums) -> Detail:
    """Give the statistics that windows do not keep."""
    sums, n = state.sums, state.sums.finite
    quantiles = state.histogram.quantiles(QUANTILES, sums.largest)
    worst = tuple(sequences.worst)
    of_sequences = sequences.means.quantiles(QUANTILES, max(worst, default=0.0))
    labels = {
        name: tuple(_bucket(name, label, row) for label, row in sorted(rows.items()))
        for name, rows in sorted(groups.labels.items())
    }
    if n == 0:
        return Detail(quantiles=quantiles, sequence_quantiles=of_sequences, by_label=labels)
    moved, m = sums.moved, sequences.count
    weight = n + sums.excess1
    squares = n + 2 * sums.excess1 + sums.excess2
    probability = _ratio(sums.probability1, n)
    slope, correlation = _length(sums, n)
    return Detail(
        k2=sums.d2 / n / 2,
        quantiles=quantiles,
        sign_z=(moved - 2 * sums.negative) / math.sqrt(moved) if moved else math.nan,
        rho_z_capped=_capped_z(sums, sequences),
        chi2=(2 * sums.excess1 + sums.excess2) / n,
        ess_share=weight * weight / (n * squares),
        clip_share=sums.clipped / n,
        exp_abs_mean=1.0 + sums.exp_abs / n,
        perplexity_ratio=_exp(-sums.d1 / n),
        probability_diff_mean=probability,
        probability_diff_std=math.sqrt(max(_ratio(sums.probability2, n) - probability**2, 0.0)),
        probability_diff_max=sums.largest_probability,
        lag1=_lag(sums, _variance(sums)),
        length_slope=slope * 1000.0,
        length_correlation=correlation,
        sequences=m,
        sequences_equal=sequences.all_equal,
        sequence_mean_d=sequences.mean_d / m,
        sequence_abs_mean_d=sequences.abs_mean_d / m,
        sequence_mean_abs_d=sequences.mean_abs_d / m,
        sequence_lowest_mean_d=sequences.lowest_mean_d,
        sequence_highest_mean_d=sequences.highest_mean_d,
        sequence_perplexity_ratio=sequences.inverse_geometric / m,
        sequence_ratio_mean=sequences.ratio / m,
        sequence_ess_share=_ratio(sequences.ratio**2, m * sequences.ratio_square),
        sequence_chi2=sequences.ratio_square / m - 1.0,
        sequence_quantiles=of_sequences,
        worst_sequences=worst,
        by_position=_buckets("position", POSITIONS, groups.by_position()),
        by_distance_to_end=_buckets("from_end", FROM_END, groups.by_distance()),
        by_label=labels,
    )


def _buckets(by: str, edges: tuple[int, ...], table: Doubles) -> tuple[Bucket, ...]:
    return tuple(_bucket(by, label, row) for label, row in zip(_ranges(edges), table.T, strict=True))


def _ranges(edges: tuple[int, ...]) -> Iterable[str]:
    for low, high in zip(edges, (*edges[1:], None), strict=True):
        yield f"{low}+" if high is None else str(low) if high == low + 1 else f"{low}-{high - 1}"


def _bucket(by: str, label: str, row: Doubles) -> Bucket:
    tokens, finite, unequal, size, d, square, excess = (float(value) for value in row)
    mean = d / finite if finite else math.nan
    return Bucket(
        by=by,
        label=label,
        tokens=int(tokens),
        finite=int(finite),
        unequal=int(unequal),
        mean_d=mean,
        mean_abs_d=size / finite if finite else math.nan,
        std_d=math.sqrt(max(square / finite - mean * mean, 0.0)) if finite else math.nan,
        rho_mean=1.0 + excess / finite if finite else math.nan,
    )


def _mean_abs(row: Doubles) -> float:
    return float(row[3] / row[1]) if row[1] else math.nan


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom > 0 else math.nan


def _exp(value: float) -> float:
    return math.exp(min(max(value, -700.0), 700.0))


def _variance(sums: Sums) -> float:
    mean = sums.d1 / sums.finite
    return max(sums.d2 / sums.finite - mean * mean, 0.0)


def _z(off: float, deviation: float) -> float:
    if deviation > 0:
        return off / deviation
    return 0.0 if off == 0 else math.copysign(math.inf, off)


def _correlation(sums: Sums, variance: float) -> float:
    """Give the correlation of both sides from that of the first with d: two near sides do not cancel."""
    n = sums.finite
    x = sums.x / n
    of_x = sums.xx / n - x * x
    with_d = sums.xd / n - x * sums.d1 / n
    of_y = of_x + 2 * with_d + variance
    # beside a rounding error of xx a spread says nothing
    if min(of_x, of_y) <= 1e-6 * sums.xx / n:
        return math.nan
    return min(max((of_x + with_d) / math.sqrt(of_x * of_y), -1.0), 1.0)


def _lag(sums: Sums, variance: float) -> float:
    if sums.lag_pairs < 2 or variance == 0:
        return math.nan
    m = sums.lag_pairs
    return (sums.lag_product / m - sums.lag_first / m * sums.lag_second / m) / variance


def _length(sums: Sums, n: float) -> tuple[float, float]:
    """Give slope (nats a position) and correlation of abs d over the position in its sequence."""
    place, size = sums.place / n, sums.abs1 / n
    spread = sums.place_square / n - place * place
    covariance = sums.place_abs / n - place * size
    variance = sums.d2 / n - size * size
    if spread <= 0:
        return math.nan, math.nan
    correlation = covariance / math.sqrt(spread * variance) if variance > 0 else math.nan
    return covariance / spread, correlation


def _capped_z(sums: Sums, sequences: SequenceSums) -> float:
    """Give the standard errors by which E[exp(d)] = 1 fails, whatever the tails.

    Where E[exp(d)] = 1, E[min(exp(d), c)] lies at most as much below 1 as the trainer's policy has probability
    beyond the cap. That share is bounded by what was seen beyond the cap, and by the mirror image of what was
    seen below 1/c, three standard deviations of a Poisson count up; only what lies outside that counts.
    """
    n, m = sums.finite, sequences.count
    off = sums.capped1 / n
    variance = max(sums.capped2 / n - off * off, 0.0) * n
    if m >= _SEQUENCES:
        # tokens of one sequence are not independent of each other: sums of sequences are
        clustered = (
            sequences.capped_square - 2 * off * sequences.capped_length + off * off * sequences.length_square
        )
        variance = max(variance, clustered * m / (m - 1))
    error = math.sqrt(variance) / n
    if off >= 0:
        return _z(off, error)
    mirrored = (sums.far_below + 3 * math.sqrt(sums.far_below + 1)) / n
    short = off + max(mirrored, sums.beyond / n)
    return _z(short, error) if short < 0 else 0.0
