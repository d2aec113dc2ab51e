# SPDX-License-Identifier: Apache-2.0
"""What a window keeps of a pair beside `PairStats`: more numbers, and where the mismatch lies.

`NUMBERS` is the catalogue: a window keeps these numbers, rules name them, docs/statistics.md has their formulas. A number that
a window lacks is NaN, which rules read as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["BREAKDOWNS", "FEW_TOKENS", "NUMBERS", "Bucket", "Number", "PairDetail", "mean_abs_d"]

FEW_TOKENS = 20
"""Finite tokens of a bucket below which its mean says nothing."""

BREAKDOWNS: dict[str, str] = {
    "position": "range of positions in the response",
    "from_end": "range of distances to the last token",
    "engine": "process that sampled",
    "trainer": "process that scored",
    "prefix_hit": "requests with a prefix-cache hit, and without",
    "pack_index": "place in the trainer's pack",
    "padding": "left-padded rows of the trainer, and others",
}
"""What a mismatch is broken down by."""


def _same(value: float) -> float:
    return value


def _off_1(value: float) -> float:
    return abs(value - 1.0)


def _loss(value: float) -> float:
    return 1.0 - value


@dataclass(frozen=True, kw_only=True)
class Number:
    """One number of `PairDetail`. `signal` is the name by which a rule bounds `judged(value)`; `text` says what that is."""

    signal: str
    text: str
    unit: str = ""
    judged: Callable[[float], float] = _same


def _number(signal: str, text: str, unit: str = "", judged: Callable[[float], float] = _same) -> Number:
    return Number(signal=signal, text=text, unit=unit, judged=judged)


NUMBERS: dict[str, Number] = {
    "k2": _number("k2", "k2, E[d^2] / 2", "nats"),
    "p50_abs_d": _number("p50_abs_d", "median of abs d", "nats"),
    "p90_abs_d": _number("p90_abs_d", "90th percentile of abs d", "nats"),
    "p99_abs_d": _number("p99_abs_d", "99th percentile of abs d", "nats"),
    "p999_abs_d": _number("p999_abs_d", "99.9th percentile of abs d", "nats"),
    "sign_z": _number("sign_z", "standard errors by which the signs of d are off even", judged=abs),
    "rho_z_capped": _number(
        "rho_z_capped", "standard errors by which E[rho] is off 1, whatever the tails", judged=abs
    ),
    "chi2": _number("chi2", "E[rho^2] - 1"),
    "ess_share": _number(
        "ess_loss", "share of the sample that importance weights lose, 1 - ESS / n", "ratio", _loss
    ),
    "clip_share": _number("clip_share", "share of rho outside [0.8, 1.2]", "ratio"),
    "exp_abs_mean": _number("exp_abs_mean", "E[exp(abs d)]"),
    "perplexity_ratio": _number("perplexity_shift", "distance of exp(-E[d]) from 1", judged=_off_1),
    "probability_diff_mean": _number("probability_diff_mean", "mean difference of probabilities"),
    "probability_diff_std": _number("probability_diff_std", "deviation of the difference of probabilities"),
    "probability_diff_max": _number("probability_diff_max", "largest difference of probabilities"),
    "lag1": _number("lag1", "correlation of d with the next d of its sequence, either sign", judged=abs),
    "length_slope": _number("length_slope", "growth of abs d in 1,000 positions", "nats"),
    "length_correlation": _number("length_correlation", "correlation of abs d with the position"),
    "sequences": _number("sequences", "sequences with a finite pair"),
    "sequences_unequal": _number("sequences_unequal", "sequences in which a bit differs"),
    "sequence_mean_d": _number(
        "sequence_mean_d", "mean over sequences of mean d, either sign", "nats", judged=abs
    ),
    "sequence_abs_mean_d": _number("sequence_abs_mean_d", "mean over sequences of the size of mean d", "nats"),
    "sequence_mean_abs_d": _number("sequence_mean_abs_d", "mean over sequences of mean abs d", "nats"),
    "sequence_lowest_mean_d": _number(
        "sequence_lowest_mean_d", "size of the lowest mean d of a sequence", "nats", judged=abs
    ),
    "sequence_highest_mean_d": _number(
        "sequence_highest_mean_d", "size of the highest mean d of a sequence", "nats", judged=abs
    ),
    "sequence_perplexity_ratio": _number(
        "sequence_perplexity_shift", "distance of the mean perplexity ratio of sequences from 1", judged=_off_1
    ),
    "sequence_ratio_mean": _number(
        "sequence_ratio_shift", "distance of the mean ratio of whole sequences from 1", judged=_off_1
    ),
    "sequence_ess_share": _number(
        "sequence_ess_loss", "share of the sequences that their weights lose, 1 - ESS / m", "ratio", _loss
    ),
    "sequence_chi2": _number("sequence_chi2", "E[w^2] - 1 of the ratios of whole sequences"),
    "sequence_p50_abs_d": _number("sequence_p50_abs_d", "median over sequences of mean abs d", "nats"),
    "sequence_p90_abs_d": _number("sequence_p90_abs_d", "90th percentile over sequences of mean abs d", "nats"),
    "sequence_p99_abs_d": _number("sequence_p99_abs_d", "99th percentile over sequences of mean abs d", "nats"),
    "sequence_p999_abs_d": _number(
        "sequence_p999_abs_d", "99.9th percentile over sequences of mean abs d", "nats"
    ),
    "sequence_worst_abs_d": _number("sequence_worst_abs_d", "largest mean abs d of a sequence", "nats"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One bucket of a breakdown. Counts are tokens, means are over the finite ones in nats, NaN of none."""

    by: str  # one of BREAKDOWNS
    label: str
    tokens: int
    finite: int
    unequal: int
    mean_d: float
    mean_abs_d: float
    std_d: float
    rho_mean: float


@dataclass(frozen=True, kw_only=True)
class PairDetail:
    """Numbers by name (see NUMBERS), the largest mean abs d of a sequence in nats, and the buckets of every breakdown.

    Raises ValueError for a number that the catalogue does not have.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    worst_sequences: tuple[float, ...] = ()
    buckets: tuple[Bucket, ...] = ()

    def __post_init__(self) -> None:
        if unknown := sorted(self.numbers.keys() - NUMBERS.keys()):
            raise ValueError(f"there is no number {unknown[0]!r}; there are {', '.join(NUMBERS)}")

    def number(self, name: str) -> float:
        """Give a number of NUMBERS, NaN where this window lacks it."""
        return self.numbers.get(name, math.nan)

    def breakdown(self, by: str) -> tuple[Bucket, ...]:
        """Give the buckets of a breakdown; none where it was not seen."""
        return tuple(bucket for bucket in self.buckets if bucket.by == by)

    def worst(self, by: str) -> Bucket | None:
        """Give the bucket with the largest mean abs d among those with FEW_TOKENS finite tokens and more."""
        told = [one for one in self.breakdown(by) if one.finite >= FEW_TOKENS]
        return max(told, key=lambda one: one.mean_abs_d, default=None)

    def elsewhere(self, bucket: Bucket) -> float:
        """Give mean abs d of the rest of a bucket's breakdown, in nats; NaN where there is no rest."""
        return mean_abs_d(one for one in self.breakdown(bucket.by) if one is not bucket)


def mean_abs_d(buckets: Iterable[Bucket]) -> float:
    """Give mean abs d over the finite tokens of buckets, in nats; NaN of none."""
    told = [one for one in buckets if one.finite]
    finite = sum(one.finite for one in told)
    return math.fsum(one.finite * one.mean_abs_d for one in told) / finite if finite else math.nan
