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

from isoexec.contracts.window import HISTOGRAM_EDGES, PairStats
from isoexec.daemon.statistics import PairAccumulator

PAIR = ("engine_decode", "trainer_score")
Floats = npt.NDArray[Any]


def accumulate(
    q: Floats, p: Floats, lengths: list[int] | None = None, batches: int = 1, **kwargs: Any
) -> PairStats:
    sums = PairAccumulator(PAIR, **kwargs)
    lengths = lengths or [len(q)]
    at = 0
    for part in np.array_split(np.asarray(lengths, np.int64), batches):
        n = int(part.sum())
        sums.add(q[at : at + n].astype(np.float32), p[at : at + n].astype(np.float32), part)
        at += n
    return sums.result()


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
            assert getattr(found, name) == pytest.approx(value, rel=1e-9, abs=1e-12), name
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


def test_beyond_what_is_retained_the_percentile_is_an_estimate_and_the_rest_stays_exact() -> None:
    rng = np.random.default_rng(4)
    q = np.zeros(40_000)
    p = rng.normal(0, 1, 40_000)
    exact, thinned = accumulate(q, p, [100] * 400, 40), accumulate(q, p, [100] * 400, 40, retained=3000)
    assert thinned.mean_abs_d == exact.mean_abs_d
    assert thinned.max_abs_d == exact.max_abs_d
    assert thinned.p99_abs_d == pytest.approx(exact.p99_abs_d, rel=0.1)


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
