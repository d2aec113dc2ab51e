# SPDX-License-Identifier: Apache-2.0
"""The detail of a window: rules find its numbers and its buckets by name, and what it lacks is unknown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts.detail import BREAKDOWNS, NUMBERS, Bucket, PairDetail
from isoexec.contracts.rules import Rule
from isoexec.contracts.signals import SIGNALS
from isoexec.contracts.verdict import RuleHistory, Verdict, evaluate
from isoexec.contracts.window import PairStats, Window, WindowError

PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"


def bucket(by: str, label: str, mean_abs_d: float, finite: int = 1000) -> Bucket:
    return Bucket(
        by=by,
        label=label,
        tokens=finite,
        finite=finite,
        unequal=finite,
        mean_d=math.nan,
        mean_abs_d=mean_abs_d,
        std_d=0.1,
        rho_mean=1.0,
    )


def window(detail: PairDetail | None) -> Window:
    pair = PairStats(pair=("engine_decode", "trainer_score"), tokens=1000, mean_abs_d=0.1, detail=detail)
    return Window(run="r", regime="bf16_dense", monitor_only=False, step=1, weight_version=1, pairs=(pair,))


def judged(signal: str, one: Window, bound: float = 0.0) -> Verdict:
    (verdict,) = evaluate([Rule(name="mine", signal=signal, bound=bound)], one, RuleHistory())
    return verdict


@pytest.mark.parametrize("name", NUMBERS)
def test_a_rule_bounds_a_number_and_does_not_know_one_that_is_not_there(name: str) -> None:
    number = NUMBERS[name]
    there = judged(number.signal, window(PairDetail(numbers={name: -0.25})))
    assert there.value == number.judged(-0.25)
    assert there.outcome == ("violation" if number.judged(-0.25) > 0 else "pass")
    for lacking in (None, PairDetail(), PairDetail(numbers={name: math.nan})):
        verdict = judged(number.signal, window(lacking))
        assert (verdict.outcome, verdict.action, verdict.value) == ("unknown", "warn", None)
        assert name in verdict.message


@pytest.mark.parametrize("by", BREAKDOWNS)
def test_a_rule_bounds_the_worst_bucket_and_names_it(by: str) -> None:
    detail = PairDetail(
        buckets=(
            bucket(by, "clean", 0.01, 3000),
            bucket(by, "bad", 0.5),
            bucket(by, "few", 9.0, 19),  # too few tokens to say anything
            bucket("another", "x", 7.0),
        )
    )
    verdict = judged(f"worst_{by}_abs_d", window(detail), bound=0.1)
    assert (verdict.outcome, verdict.value) == ("violation", 0.5)
    assert (verdict.evidence["by"], verdict.evidence["label"]) == (by, "bad")
    assert verdict.evidence["mean_abs_d_elsewhere"] == pytest.approx((3000 * 0.01 + 19 * 9.0) / 3019)
    for lacking in (None, PairDetail(), PairDetail(buckets=(bucket(by, "few", 9.0, 19),))):
        assert judged(f"worst_{by}_abs_d", window(lacking)).outcome == "unknown"


def test_a_window_gives_its_detail_back_bit_for_bit() -> None:
    numbers = {name: math.pi / (place + 1) for place, name in enumerate(NUMBERS)}
    numbers |= {"chi2": math.inf, "lag1": math.nan}
    one = window(
        PairDetail(numbers=numbers, worst_sequences=(0.3, 0.1), buckets=(bucket("engine", "e", 0.1),))
    )
    back = Window.from_dict(json.loads(json.dumps(one.to_dict(), sort_keys=True, allow_nan=False)))
    assert back.to_dict() == one.to_dict()
    (detail,) = (pair.detail for pair in back.pairs)
    assert detail is not None
    assert detail.number("k2") == numbers["k2"]
    assert detail.number("chi2") == math.inf
    assert math.isnan(detail.buckets[0].mean_d)


@pytest.mark.parametrize(
    ("detail", "says"),
    [
        ({"numbers": {"k4": 1.0}}, "there is no number 'k4'"),
        ({"numbers": 3}, "PairDetail cannot be read"),
        ({"numbers": {"k2": "high"}}, "PairDetail cannot be read"),
        ({"buckets": [{"by": "engine"}]}, "Bucket cannot be read"),
        ({"buckets": [3]}, "Bucket must be a map"),
        ({"quantiles": {}}, "PairDetail has no field 'quantiles'"),
        (7, "PairDetail must be a map"),
    ],
)
def test_a_detail_of_another_shape_is_refused_by_name(detail: Any, says: str) -> None:
    data = window(None).to_dict()
    data["pairs"][0]["detail"] = detail
    with pytest.raises(WindowError, match=says):
        Window.from_dict(data)


def test_the_page_of_statistics_names_every_signal_that_a_rule_can_bound() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in SIGNALS if f"`{name}`" not in text] == []
