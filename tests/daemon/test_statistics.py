# SPDX-License-Identifier: Apache-2.0
"""The streamed statistics against a plain numpy oracle, and against what each simulated fault looks like."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoexec.contracts.detail import Bucket
from isoexec.contracts.window import HISTOGRAM_EDGES, PairStats
from isoexec.daemon.statistics import (
    FROM_END,
    POSITIONS,
    BitHistogram,
    Detail,
    PairAccumulator,
    places,
)

PAIR = ("engine_decode", "trainer_score")
Floats = npt.NDArray[Any]


# sums of pieces are float32, so that means are right to a few parts in a million of the mean of abs d
CLOSE = 5e-6
# a quantile is read from bins, 128 an octave
BIN = 1 / 128


def gathered(q: Floats, p: Floats, lengths: list[int] | None = None, batches: int = 1) -> PairAccumulator:
    sums = PairAccumulator(PAIR)
    lengths = lengths or [len(q)]
    at = 0
    for part in np.array_split(np.asarray(lengths, np.int64), batches):
        n = int(part.sum())
        sums.add(q[at : at + n].astype(np.float32), p[at : at + n].astype(np.float32), part)
        at += n
    return sums


def accumulate(q: Floats, p: Floats, lengths: list[int] | None = None, batches: int = 1) -> PairStats:
    return gathered(q, p, lengths, batches).result()


def oracle(q: Floats, p: Floats) -> dict[str, float]:
    x, y = q.astype(np.float32), p.astype(np.float32)
    finite = np.isfinite(x) & np.isfinite(y)
    d = y[finite].astype(np.float64) - x[finite].astype(np.float64)
    rho = np.exp(d)
    center = d - d.mean()
    return {
        "mean_d": d.mean(),
        "mean_abs_d": np.abs(d).mean(),
        "max_abs_d": np.abs(d).max(),
        "p99_abs_d": np.quantile(np.abs(d), 0.99),
        "std_d": d.std(),
        "kurtosis": (center**4).mean() / (center**2).mean() ** 2,
        "r_ratio": -2 * d.mean() / (d**2).mean(),
        "share_negative": (d < 0).sum() / (d != 0).sum(),
        "k1": -d.mean(),
        "k3": (rho - 1 - d).mean(),
        "rho_mean": rho.mean(),
        "rho_z": (rho.mean() - 1) / (rho.std() / math.sqrt(d.size)),
        "correlation": np.corrcoef(x[finite].astype(float), y[finite].astype(float))[0, 1],
    }


def test_streamed_statistics_equal_the_oracle_however_they_are_cut() -> None:
    rng = np.random.default_rng(1)
    q = -rng.exponential(1.0, 5000)
    p = q + rng.normal(0, 0.05, 5000)
    q[3], p[9], q[11] = np.nan, -np.inf, np.inf
    lengths = [1, 2, 3, *[50] * 99, 44]
    wanted = oracle(q, p)
    for batches in (1, 7):
        found = accumulate(q, p, lengths, batches)
        assert found.tokens == 5000
        assert found.nonfinite == 3
        for name, value in wanted.items():
            rel = BIN if name == "p99_abs_d" else 3 * CLOSE
            assert getattr(found, name) == pytest.approx(value, rel=rel, abs=2e-7), name
        assert sum(found.histogram) == found.finite


def test_positions_are_taken_within_each_sequence() -> None:
    q = np.zeros(9, np.float32)
    #            |-- 4 tokens --|  |--- 5 tokens ---|
    p = np.array([1, 2, 3, 4, 10, 20, 30, 40, 50], np.float32)
    found = accumulate(q, p, [4, 5])
    assert found.first_token_mean_abs_d == pytest.approx((1 + 10) / 2)
    assert found.last_token_mean_abs_d == pytest.approx((4 + 50) / 2)
    early = (1 + 2 + 10 + 20 + 30) / 5
    late = (3 + 4 + 40 + 50) / 4
    assert found.position_growth == pytest.approx(late / early)


def test_bits_are_compared_as_integers() -> None:
    nan_a, nan_b = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    q = np.array([-1.0, nan_a, nan_a, 0.0, -np.inf, -1.0], np.float32)
    p = np.array([-1.0, nan_a, nan_b, -0.0, -np.inf, np.nextafter(np.float32(-1), np.float32(0))], np.float32)
    found = accumulate(q, p)
    # -1, the same NaN, -inf; not the other NaN, not the two zeros, not one ulp away
    assert found.bitwise_equal == 3
    assert found.nonfinite == 3
    assert found.exact_zero == 0  # both sides are zero, of either sign
    assert found.max_abs_d == pytest.approx(2**-24, rel=1e-6)


def test_zeros_and_positives_are_counted_before_anything_is_averaged() -> None:
    q = np.array([0.0, -0.0, -1.0, 0.5, -2.0, 0.0], np.float32)
    p = np.array([-1.0, -1.0, 0.0, -0.5, -2.0, -1e-7], np.float32)
    found = accumulate(q, p)
    assert found.exact_zero == 3  # the last one is a near-certain token, rounded on one side
    assert found.positive == 1


def test_ids_that_differ_are_counted() -> None:
    sums = PairAccumulator(PAIR)
    ids = np.array([1, 2, 3], np.int32)
    sums.add(
        np.zeros(3, np.float32),
        np.zeros(3, np.float32),
        np.array([3]),
        ids,
        ids + np.array([0, 1, 0], np.int32),
    )
    assert sums.result().id_mismatch == 1


def test_nothing_seen_gives_nan_and_not_zero() -> None:
    for found in (PairAccumulator(PAIR).result(), accumulate(np.array([np.nan]), np.array([1.0]))):
        assert math.isnan(found.mean_abs_d)
        assert math.isnan(found.k3)
        assert math.isnan(found.rho_z)


def test_identical_sides_have_no_mismatch_at_all() -> None:
    q = -np.random.default_rng(0).exponential(1.0, 100)
    found = accumulate(q, q)
    assert found.bitwise_equal == 100
    assert found.mean_abs_d == found.max_abs_d == found.k3 == 0.0
    assert found.rho_mean == 1.0
    assert found.rho_z == 0.0
    assert math.isnan(found.share_negative)
    assert found.histogram[0] == 100


def test_edges_belong_to_the_bucket_below_and_huge_values_to_the_last() -> None:
    edges = np.asarray(HISTOGRAM_EDGES, np.float32)
    p = np.concatenate([edges, [1e30, 11.0]]).astype(np.float32)
    found = accumulate(np.zeros_like(p), p)
    assert found.histogram == (*[1] * len(HISTOGRAM_EDGES), 2)
    assert math.isfinite(found.rho_mean)


def mixed(n: int = 40_000, seed: int = 3) -> tuple[Floats, Floats, list[int]]:
    """Sides with equal, near, far and broken tokens, in sequences of 1 to 900 tokens."""
    rng = np.random.default_rng(seed)
    q = (-rng.exponential(1.0, n)).astype(np.float32)
    wide = rng.choice([0.0, 1e-6, 0.01, 0.3, 2.0], n, p=[0.2, 0.2, 0.4, 0.15, 0.05])
    p = np.minimum(q + rng.normal(0, 1, n) * wide, 0).astype(np.float32)
    q[[5, 9000, 16384, 39_999]] = np.nan
    p[[6, 9000, 20_000]] = -np.inf
    lengths: list[int] = []
    while sum(lengths) < n:
        lengths.append(min(int(rng.integers(1, 900)), n - sum(lengths)))
    return q, p, lengths


def per_sequence(q: Floats, p: Floats, lengths: list[int]) -> list[tuple[Floats, Floats]]:
    """(x, d) of each sequence in float64, NaN where a side is no number."""
    both = np.isfinite(q) & np.isfinite(p)
    with np.errstate(invalid="ignore"):
        d = np.where(both, p.astype(float) - q.astype(float), np.nan)
    ends = np.cumsum(lengths)
    x = np.where(both, q.astype(float), np.nan)
    return list(zip(np.split(x, ends[:-1]), np.split(d, ends[:-1]), strict=True))


def detail_oracle(q: Floats, p: Floats, lengths: list[int]) -> dict[str, float]:
    parts = per_sequence(q, p, lengths)
    x, d = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    place = np.concatenate([np.arange(len(part[1])) for part in parts])
    keep = ~np.isnan(d)
    before = np.concatenate([part[1][:-1] for part in parts])
    after = np.concatenate([part[1][1:] for part in parts])
    both = ~np.isnan(before) & ~np.isnan(after)
    before, after = before[both], after[both]
    x, d, place = x[keep], d[keep], place[keep]
    rho, moved = np.exp(d), d[d != 0]
    gap = np.abs(np.exp(x + d) - np.exp(x))
    sequences = [(part[1][~np.isnan(part[1])]) for part in parts]
    means = np.array([part.mean() for part in sequences if part.size])
    ratios = np.exp(np.clip([part.sum() for part in sequences if part.size], -20, 20))
    return {
        "k2": (d**2).mean() / 2,
        "sign_z": ((moved > 0).sum() - (moved < 0).sum()) / math.sqrt(moved.size),
        "chi2": (rho**2).mean() - 1,
        "ess_share": rho.sum() ** 2 / (rho**2).sum() / d.size,
        "clip_share": ((rho < 0.8) | (rho > 1.2)).mean(),
        "exp_abs_mean": np.exp(np.abs(d)).mean(),
        "perplexity_ratio": math.exp(-d.mean()),
        "probability_diff_mean": gap.mean(),
        "probability_diff_std": gap.std(),
        "probability_diff_max": gap.max(),
        "lag1": ((before * after).mean() - before.mean() * after.mean()) / d.var(),
        "length_slope": 1000 * np.polyfit(place, np.abs(d), 1)[0],
        "length_correlation": np.corrcoef(place, np.abs(d))[0, 1],
        "sequences": means.size,
        "sequence_mean_d": means.mean(),
        "sequence_abs_mean_d": np.abs(means).mean(),
        "sequence_lowest_mean_d": means.min(),
        "sequence_highest_mean_d": means.max(),
        "sequence_perplexity_ratio": np.exp(-means).mean(),
        "sequence_ratio_mean": ratios.mean(),
        "sequence_chi2": (ratios**2).mean() - 1,
    }


@pytest.mark.parametrize("batches", [1, 7])
def test_the_detail_equals_a_plain_oracle_however_it_is_cut(batches: int) -> None:
    q, p, lengths = mixed()
    found = gathered(q, p, lengths, batches).detail()
    for name, value in detail_oracle(q, p, lengths).items():
        assert getattr(found, name) == pytest.approx(value, rel=2e-4, abs=1e-5), name
    d = np.abs(np.concatenate([part[1] for part in per_sequence(q, p, lengths)]))
    for share, value in found.quantiles.items():
        assert value == pytest.approx(np.nanquantile(d, share), rel=BIN, abs=1e-12), share
    worst = sorted(
        (float(np.nanmean(abs(one))) for _, one in per_sequence(q, p, lengths) if np.isfinite(one).any())
    )
    assert found.worst_sequences == pytest.approx(worst[::-1][:16], rel=1e-5)


def test_where_hardly_a_token_differs_each_is_taken_by_itself() -> None:
    rng = np.random.default_rng(8)
    q = (-rng.exponential(1.0, 30_000)).astype(np.float32)
    p = q.copy()
    p[::997] *= np.float32(1.5)
    p[4] = np.nan
    found = gathered(q, p, [100] * 300)
    for name, value in detail_oracle(q, p, [100] * 300).items():
        assert getattr(found.detail(), name) == pytest.approx(value, rel=2e-4, abs=1e-7), name
    for name, value in oracle(q, p).items():
        if name != "p99_abs_d":
            assert getattr(found.result(), name) == pytest.approx(value, rel=CLOSE, abs=1e-9), name
    assert found.result().bitwise_equal == int((q.view(np.int32) == p.view(np.int32)).sum())


def test_a_mismatch_that_follows_the_logprob_is_in_the_correlation() -> None:
    rng = np.random.default_rng(9)
    q = -rng.uniform(0.1, 1.0, 20_000)
    p = 0.96 * q - 0.02 + rng.normal(0, 0.005, q.size)
    x, y = q.astype(np.float32).astype(float), p.astype(np.float32).astype(float)
    assert accumulate(q, p).correlation == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)


def test_breakdowns_equal_the_tokens_they_name() -> None:
    q, p, lengths = mixed()
    found = gathered(q, p, lengths, 3).detail()
    parts = per_sequence(q, p, lengths)
    d = np.concatenate([part[1] for part in parts])
    place = np.concatenate([np.arange(n) for n in lengths])
    to_end = np.concatenate([np.arange(n)[::-1] for n in lengths])
    unequal = q.view(np.int32) != p.view(np.int32)

    def check(buckets: tuple[Bucket, ...], where: Floats, edges: tuple[int, ...]) -> None:
        assert sum(bucket.tokens for bucket in buckets) == len(q)
        for bucket, low, high in zip(buckets, edges, (*edges[1:], 1 << 30), strict=True):
            here = (where >= low) & (where < high)
            these = d[here & ~np.isnan(d)]
            assert (bucket.tokens, bucket.finite, bucket.unequal) == (
                here.sum(), these.size, (here & unequal).sum(),
            )  # fmt: skip
            if these.size:
                wanted = (these.mean(), np.abs(these).mean(), these.std(), np.exp(these).mean())
                seen = (bucket.mean_d, bucket.mean_abs_d, bucket.std_d, bucket.rho_mean)
                assert seen == pytest.approx(wanted, rel=1e-4, abs=1e-6), bucket
            else:
                assert math.isnan(bucket.mean_abs_d)

    check(found.by_position, place, POSITIONS)
    check(found.by_distance_to_end, to_end, FROM_END)
    assert [bucket.label for bucket in found.by_position] == [
        "0", "1-15", "16-127", "128-1023", "1024-4095", "4096-16383", "16384+",
    ]  # fmt: skip


def test_an_attribute_of_a_sequence_breaks_down_its_tokens() -> None:
    q = np.full(12, -1, np.float32)
    p = q + np.repeat(np.array([0, 0.5, 0, 0.25], np.float32), 3)
    sums = PairAccumulator(PAIR)
    attributes: dict[str, list[object]] = {
        "engine": ["a", "b", "a", "b"],
        "prefix_hit": [False, True, True, True],
    }
    sums.add(q, p, np.array([3, 3, 3, 3]), attributes=attributes)
    labels = sums.detail().by_label
    assert {(b.label, b.tokens, b.unequal, b.mean_abs_d) for b in labels["engine"]} == {
        ("a", 6, 0, 0.0),
        ("b", 6, 6, 0.375),
    }
    assert {(b.label, b.tokens, b.mean_abs_d) for b in labels["prefix_hit"]} == {
        ("False", 3, 0.0),
        ("True", 9, 0.25),
    }


@pytest.mark.parametrize("unequal", [0, 3])
def test_equal_batches_count_as_any_others_do(unequal: int) -> None:
    """Batches without an unequal bit take a way of their own: counts by place, sequence and label must be the same."""
    rng = np.random.default_rng(15)
    lengths = [1, 2, 3, 15, 16, 17, 129, 1025, 4097, 16390, *rng.integers(1, 700, 40).tolist()]
    n = sum(lengths)
    q = (-rng.exponential(1.0, n) - 1e-3).astype(np.float32)
    p = q.copy()
    sums, whole = PairAccumulator(PAIR), PairAccumulator(PAIR)
    p[:unequal] *= np.float32(1.25)
    at = 0
    for length in lengths:
        one = slice(at, at + length)
        sums.add(q[one], p[one], np.array([length]), attributes={"rank": [length % 2]})
        at += length
    # one value of another sign keeps the whole of it from the short way
    q[-1], p[-1] = 1.0, 1.0
    whole.add(q, p, np.array(lengths), attributes={"rank": [length % 2 for length in lengths]})
    assert whole.result().positive == 1
    assert sums.result().bitwise_equal == n - unequal
    for name in ("histogram", "tokens", "bitwise_equal", "k3", "position_growth", "first_token_mean_abs_d"):
        assert getattr(sums.result(), name) == pytest.approx(getattr(whole.result(), name), nan_ok=True), name
    found, wanted = sums.detail(), whole.detail()
    for name in Detail.__dataclass_fields__:
        if not name.startswith("by_"):
            assert getattr(found, name) == pytest.approx(getattr(wanted, name), nan_ok=True, rel=1e-5), name
    for name in ("by_position", "by_distance_to_end"):
        for one_, two in zip(getattr(found, name), getattr(wanted, name), strict=True):
            assert (one_.tokens, one_.finite, one_.unequal) == (two.tokens, two.finite, two.unequal), one_
    assert [(b.label, b.tokens, b.finite) for b in found.by_label["rank"]] == [
        (b.label, b.tokens, b.finite) for b in wanted.by_label["rank"]
    ]


def test_an_empty_sequence_keeps_its_label_to_itself() -> None:
    q, p = np.zeros(2, np.float32), np.array([1, 3], np.float32)
    sums = PairAccumulator(PAIR)
    sums.add(q, p, np.array([1, 0, 1]), attributes={"rank": [0, 1, 2]})
    assert [(b.label, b.mean_abs_d) for b in sums.detail().by_label["rank"]] == [("0", 1.0), ("2", 3.0)]


def test_labels_are_bounded_and_no_token_is_lost() -> None:
    sums = PairAccumulator(PAIR)
    n = places.LABEL_LIMIT + 40
    values = np.zeros(n, np.float32)
    sums.add(values, values, np.ones(n, np.int64), attributes={"engine": [f"e{i}" for i in range(n)]})
    buckets = sums.detail().by_label["engine"]
    assert len(buckets) == places.LABEL_LIMIT + 1
    assert sum(bucket.tokens for bucket in buckets) == n
    assert next(bucket.tokens for bucket in buckets if bucket.label == places.OTHER) == 40


def test_what_does_not_fit_is_named() -> None:
    values = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="lengths: wanted a sum of 3"):
        PairAccumulator(PAIR).add(values, values, np.array([4]))
    with pytest.raises(ValueError, match="attribute 'engine': wanted 2 labels, found 1"):
        PairAccumulator(PAIR).add(values, values, np.array([1, 2]), attributes={"engine": ["a"]})
    with pytest.raises(ValueError, match="pair: wanted"):
        PairAccumulator(PAIR).merge(PairAccumulator(("engine_decode", "engine_prefill")))


def test_a_mismatch_that_grows_has_a_slope() -> None:
    place = np.concatenate([np.arange(5000)] * 4)
    q = np.full(20_000, -3.0)
    found = gathered(q, q + 1e-5 * place * np.where(place % 2, 1, -1), [5000] * 4).detail()
    assert found.length_slope == pytest.approx(1e-2, rel=1e-4)
    assert found.length_correlation > 0.999
    assert found.lag1 < -0.9


def test_two_windows_merge_into_what_one_over_both_would_be() -> None:
    q, p, lengths = mixed()
    half = len(lengths) // 2
    cut = sum(lengths[:half])
    whole = gathered(q, p, lengths)
    merged = gathered(q[:cut], p[:cut], lengths[:half])
    merged.count_unpaired("engine", 3)
    other = gathered(q[cut:], p[cut:], lengths[half:])
    other.count_unpaired("engine", 4)
    merged.merge(other)
    assert merged.result().unpaired == {"engine": 7}
    for name in ("tokens", "bitwise_equal", "nonfinite", "exact_zero", "positive", "histogram", "max_abs_d"):
        assert getattr(merged.result(), name) == getattr(whole.result(), name), name
    for name in detail_oracle(q, p, lengths):
        assert getattr(merged.detail(), name) == pytest.approx(
            getattr(whole.detail(), name), rel=1e-5, abs=1e-5
        ), name
    assert merged.detail().quantiles == whole.detail().quantiles
    assert merged.detail().worst_sequences == pytest.approx(whole.detail().worst_sequences)
    for name in ("kurtosis", "r_ratio", "k3", "rho_z", "correlation", "grid_share", "position_growth"):
        assert getattr(merged.result(), name) == pytest.approx(getattr(whole.result(), name), rel=1e-5), name


def test_a_bin_holds_what_lies_in_it_and_edges_split_bins() -> None:
    edges = np.array([0.1, 0.5, 3.0], np.float32)
    histogram = BitHistogram(edges)
    rng = np.random.default_rng(5)
    near = np.concatenate([np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, np.float32(9))])
    values = np.concatenate([near, np.zeros(7), rng.lognormal(-1, 2, 70_000), [1e-45]]).astype(np.float32)
    histogram.add(values)
    assert histogram.zeros == 7
    assert histogram.total == values.size
    wanted = np.bincount(np.searchsorted(edges, values, side="left"), minlength=4)
    assert histogram.coarse.tolist() == wanted.tolist()
    for share in (0.0, 0.01, 0.5, 0.999, 1.0):
        largest = float(values.max())
        low, high = (float(np.quantile(values, share, method=side)) for side in ("lower", "higher"))
        assert low * (1 - BIN) <= histogram.quantiles((share,), largest)[share] <= high * (1 + BIN)


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 0.05, 0.5, 5.0, 400.0, 5000.0])
def test_sums_of_exponentials_hold_for_differences_of_any_size(scale: float) -> None:
    rng = np.random.default_rng(6)
    q = -rng.uniform(0, 9000, 3000) if scale > 100 else -rng.exponential(1.0, 3000)
    p = np.minimum(q + rng.normal(0, scale, q.size), 0)
    x, y = q.astype(np.float32).astype(np.float64), p.astype(np.float32).astype(np.float64)
    d = y - x
    limited = np.clip(d, -300, 300)
    found, detail = gathered(q, p).result(), gathered(q, p).detail()
    for name, got, wanted in (
        ("k3", found.k3, math.fsum(np.expm1(limited) - limited) / d.size),
        ("rho_mean", found.rho_mean, 1 + math.fsum(np.expm1(limited)) / d.size),
        ("exp_abs_mean", detail.exp_abs_mean, 1 + math.fsum(np.expm1(np.abs(limited))) / d.size),
        ("probability", detail.probability_diff_mean, math.fsum(np.abs(np.exp(y) - np.exp(x))) / d.size),
        ("mean_abs_d", found.mean_abs_d, math.fsum(np.abs(d)) / d.size),
    ):
        assert got == pytest.approx(wanted, rel=1e-7, abs=1e-22), name


def test_heavy_tails_of_honest_noise_raise_no_alarm_and_a_wrong_support_does() -> None:
    """d = a with probability 1 / (1 + exp(a)), else -a: E[exp(d)] is 1 for every a, and its variance infinite."""
    rng = np.random.default_rng(12)
    plain, capped = [], []
    for _ in range(150):
        rare = rng.random(20_000) < 0.01
        size = np.where(rare, 3 * np.abs(rng.standard_t(2, 20_000)) + 1, np.abs(rng.normal(0, 0.01, 20_000)))
        sign = np.where(rng.random(20_000) < 1 / (1 + np.exp(np.minimum(size, 500))), 1, -1)
        d = size * sign
        q = np.full(20_000, -3.0, np.float32)
        found = gathered(q, q + d, [200] * 100)
        plain.append(abs(found.result().rho_z))
        capped.append(abs(found.detail().rho_z_capped))
    assert max(capped) < 5
    assert np.count_nonzero(np.array(plain) > 5) > 5
    # the same noise, and a trainer that gives 5 % of its probability to what was never sampled
    found = gathered(q, q + d + math.log(0.95), [200] * 100)
    assert found.detail().rho_z_capped < -10


def test_tokens_that_move_together_widen_the_error_of_the_capped_mean() -> None:
    rng = np.random.default_rng(13)
    q = np.full(20_000, -3.0, np.float32)
    # one factor a sequence: 100 draws, and not 20,000
    off = np.repeat(rng.normal(0.002, 0.05, 100), 200)
    found = gathered(q, q + np.log1p(off), [200] * 100)
    assert abs(found.detail().rho_z_capped) < 3
    assert abs(found.result().rho_z) > 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
)
def test_any_bits_at_all_are_counted_and_never_raise(a: list[int], b: list[int]) -> None:
    n = min(len(a), len(b))
    x, y = (np.array(v[:n], np.uint32).view(np.float32) for v in (a, b))
    with np.errstate(all="ignore"):
        found = accumulate(x, y)
    assert found.bitwise_equal == sum(i == j for i, j in zip(a[:n], b[:n], strict=True))
    assert found.tokens == n
    assert found.nonfinite == int((~(np.isfinite(x) & np.isfinite(y))).sum())
    assert sum(found.histogram) == found.finite


# What each fault of the reports looks like, simulated over 60,000 tokens of a mixed-entropy policy.

Softmax = tuple[Floats, npt.NDArray[np.int64], np.random.Generator]


def log_softmax(z: Floats) -> Floats:
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def policy() -> Softmax:
    rng = np.random.default_rng(11)
    scale = rng.uniform(0.5, 4.0, (60_000, 1))
    logits = rng.normal(0, 1, (60_000, 128)) * scale
    probabilities = np.exp(log_softmax(logits))
    tokens = (probabilities.cumsum(axis=1) > rng.random((60_000, 1))).argmax(axis=1)
    return logits, tokens, rng


def at(logits: Floats, tokens: npt.NDArray[np.int64]) -> Floats:
    return log_softmax(logits)[np.arange(len(tokens)), tokens]


def noise(logits: Floats, tokens: npt.NDArray[np.int64], rng: np.random.Generator) -> tuple[Floats, Floats]:
    return at(logits, tokens), at(logits + rng.normal(0, 0.03, logits.shape), tokens)


def temperature(
    logits: Floats, tokens: npt.NDArray[np.int64], rng: np.random.Generator
) -> tuple[Floats, Floats]:
    cooled = np.exp(log_softmax(logits / 0.6))
    sampled = (cooled.cumsum(axis=1) > rng.random((len(tokens), 1))).argmax(axis=1)
    return at(logits, sampled), at(logits / 0.6, sampled)


def shifted(logits: Floats, tokens: npt.NDArray[np.int64], rng: np.random.Generator) -> tuple[Floats, Floats]:
    q = at(logits, tokens)
    return q, np.roll(q, 1)


def flips(logits: Floats, tokens: npt.NDArray[np.int64], rng: np.random.Generator) -> tuple[Floats, Floats]:
    wide = np.where(rng.random((len(tokens), 1)) < 0.05, 1.0, 0.01)
    return at(logits, tokens), at(logits + rng.normal(0, 1, logits.shape) * wide, tokens)


def grid(logits: Floats, tokens: npt.NDArray[np.int64], rng: np.random.Generator) -> tuple[Floats, Floats]:
    q = np.round(at(logits, tokens) * 8) / 8
    return q, q + rng.choice([0.0, 0.125, -0.125], len(tokens), p=[0.8, 0.1, 0.1])


def renormalised(
    logits: Floats, tokens: npt.NDArray[np.int64], rng: np.random.Generator
) -> tuple[Floats, Floats]:
    q = at(logits, tokens)
    return q + rng.uniform(0.05, 0.12, len(tokens)), q


@pytest.mark.parametrize(
    ("fault", "sees"),
    [
        (
            noise,
            lambda s: s.rho_mean == pytest.approx(1, abs=0.002) and 0.3 < s.r_ratio < 1.6 and s.kurtosis < 8,
        ),
        (temperature, lambda s: s.rho_mean > 1.05 and s.mean_d > 0.02 and s.r_ratio < 0 and s.rho_z > 10),
        (shifted, lambda s: s.mean_abs_d > 1 and abs(s.correlation) < 0.3 and abs(s.r_ratio) < 0.05),
        (flips, lambda s: s.kurtosis > 20 and s.p99_abs_d > 10 * s.mean_abs_d),
        (grid, lambda s: s.grid_share > 0.99),
        (renormalised, lambda s: s.share_negative == 1.0 and s.rho_mean < 0.95 and s.rho_z < -10),
    ],
)
def test_a_fault_shows_its_signature(
    policy: Softmax,
    fault: Callable[[Floats, npt.NDArray[np.int64], np.random.Generator], tuple[Floats, Floats]],
    sees: Callable[[PairStats], bool],
) -> None:
    q, p = fault(*policy)
    stats = accumulate(q, p, [100] * 600)
    assert sees(stats), stats


@pytest.mark.parametrize(
    ("fault", "low", "high"),
    [(noise, -4, 4), (flips, -4, 4), (temperature, 10, 1e9), (shifted, 10, 1e9), (renormalised, -1e9, -10)],
)
def test_the_capped_test_tells_noise_from_a_wrong_distribution(
    policy: Softmax, fault: Callable[..., tuple[Floats, Floats]], low: float, high: float
) -> None:
    q, p = fault(*policy)
    assert low < gathered(q, p, [100] * 600).detail().rho_z_capped < high
