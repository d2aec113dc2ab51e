# SPDX-License-Identifier: Apache-2.0
"""The classifier on streams from a real model's logits, and the way of its word into verdict, journal and status."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoexec.contracts.causes import CAUSES, classify
from isoexec.contracts.rules import DEFAULT_RULES
from isoexec.contracts.verdict import RuleHistory, evaluate
from isoexec.contracts.window import REGIMES, Window, WindowError
from isoexec.daemon.diagnosis.classify import Finding, diagnose
from isoexec.daemon.diagnosis.pairs import Point, RawPairs
from isoexec.daemon.diagnosis.sentences import sentence
from isoexec.daemon.judge import marker_of

sys.path.insert(0, str(Path(__file__).with_name("streams")))
from streams import KINDS, Stream, clean, stream  # type: ignore[import-not-found]


def found(one: Stream) -> tuple[Finding, ...]:
    return diagnose(one.pairs, one.regime, settings=one.settings, history=one.history)


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_named_first_and_its_sentence_holds_numbers_or_a_fix(kind: str) -> None:
    cause, strengths, _ = KINDS[kind]
    first = found(stream(kind, 11, 30_000, strengths[len(strengths) // 2]))[0]
    assert first.id == cause, first
    assert first.id in CAUSES
    assert first.text
    assert "{" not in first.text
    assert "nan" not in first.text


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("tokens", [500, 4000, 30_000])
def test_a_clean_window_is_not_blamed(regime: str, tokens: int) -> None:
    for seed in range(3):
        assert found(clean(regime, seed, tokens)) == ()


def test_one_unequal_bit_is_enough_where_bitwise_was_promised() -> None:
    one = clean("bitwise", 1, 4000)
    second = one.pairs.second.copy()
    at = int(np.argmin(second))
    second[at] = np.nextafter(second[at], np.float32(0))
    assert found(dataclasses.replace(one, pairs=dataclasses.replace(one.pairs, second=second)))


def test_the_sentence_names_a_declared_temperature_and_the_setting() -> None:
    text = found(stream("raw against processed, T declared", 3, 30_000, 0.6))[0].text
    assert text == (
        "rollout logprobs are raw, the trainer divides by T=0.6; set logprobs_mode=processed_logprobs"
    )
    guessed = found(stream("raw against processed", 3, 30_000, 0.6))[0].text
    assert "a temperature below 1;" in guessed


def test_the_engine_that_is_off_is_named() -> None:
    assert found(stream("one engine", 5, 30_000, 0.3))[0].evidence["engine"] == 3


def test_without_labels_a_fault_that_only_labels_show_is_not_given_another_label() -> None:
    one = stream("prefix hits", 5, 30_000, 0.3)
    blind = dataclasses.replace(one.pairs, prefix_hit=None)
    assert found(dataclasses.replace(one, pairs=blind))[0].id not in ("prefix_cache", "one_engine", "padding")


def test_small_dense_noise_without_a_history_is_unclear_and_says_what_would_tell() -> None:
    one = stream("noise above the regime", 5, 30_000, 0.03)
    (first,) = found(dataclasses.replace(one, history=()))
    assert first.id == "unclear"
    assert first.text.startswith(
        "unclear: the numbers fit numeric_noise or other_policy; more tokens, a prefill rescore"
    )


def test_growth_over_steps_is_unclear_where_nobody_saw_whether_weights_moved() -> None:
    one = stream("ageing state", 5, 30_000, 0.1)
    unseen = tuple(dataclasses.replace(point, moved=None) for point in one.history)
    assert found(dataclasses.replace(one, history=unseen))[0].id == "unclear"


def test_the_same_pairs_give_the_same_diagnosis() -> None:
    one = stream("expert flips", 5, 30_000, 0.05)
    assert found(one) == found(one)


def test_few_tokens_are_not_enough_for_a_statistical_cause() -> None:
    one = stream("stale weights, no history", 5, 200, 0.3)
    assert one.pairs.first.size < 400
    assert found(one) == ()


def test_the_classifier_needs_no_torch() -> None:
    code = "import sys, isoexec.daemon.diagnosis.classify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("lengths", np.asarray([3]), "lengths: wanted numbers from 1 up that add to 4, found 3"),
        ("second", np.zeros(4), "second: wanted float32, found float64"),
        ("starts", np.zeros(3, np.int64), r"starts: wanted shape \(1,\), found \(3,\)"),
    ],
)
def test_pairs_of_a_wrong_shape_are_refused_by_name(field: str, value: Any, says: str) -> None:
    good: dict[str, Any] = {
        "first": np.zeros(4, np.float32),
        "second": np.zeros(4, np.float32),
        "lengths": np.asarray([4]),
    }
    with pytest.raises(ValueError, match=says):
        RawPairs(**good | {field: value})


def test_every_cause_without_a_sentence_of_its_own_has_its_plain_one() -> None:
    assert sentence("topology", {}) == CAUSES["topology"]
    assert Point(step=1, mean_abs_d=0.1).moved is None


# the way into a verdict


def window(**values: Any) -> Window:
    data: dict[str, Any] = {
        "run": "r", "regime": "bf16_dense", "monitor_only": False, "step": 1, "weight_version": 1,
        "pairs": [{"pair": ["engine_decode", "trainer_score"], "tokens": 1000, "mean_abs_d": 0.3, "max_abs_d": 2.0,
                   "k3": 0.1, "rho_mean": 1.3, "rho_z": 40.0, "kurtosis": 5.0, "share_negative": 0.2, "mean_d": 0.1}],
        "diagnosis": [{"pair": ["engine_decode", "trainer_score"], "cause": "raw_against_processed",
                       "text": "the trainer divides by T=0.6", "evidence": {"rho_z": 40.0}}],
    }  # fmt: skip
    return Window.from_dict(data | values)


def test_a_window_keeps_its_diagnosis_and_verdict_and_marker_say_it() -> None:
    one = window()
    assert Window.from_dict(one.to_dict()).diagnosis == one.diagnosis
    assert classify(one)[0].text == "the trainer divides by T=0.6"
    verdicts = evaluate(DEFAULT_RULES("bf16_dense"), one, RuleHistory())
    (worst,) = [v for v in verdicts if v.rule == "mean_abs_d.halt"]
    assert worst.cause == "raw_against_processed"
    assert worst.message.endswith("likely cause: the trainer divides by T=0.6")
    assert worst.evidence["diagnosis"]["rho_z"] == 40.0
    assert marker_of(one, [worst]).cause == "raw_against_processed: the trainer divides by T=0.6"


def test_without_a_diagnosis_the_statistics_speak() -> None:
    assert classify(window(diagnosis=[]))[0].id == "raw_against_processed"
    assert classify(window(diagnosis=[]))[0].text == CAUSES["raw_against_processed"]


def test_a_diagnosis_that_lacks_a_field_is_refused() -> None:
    with pytest.raises(WindowError, match="Diagnosis cannot be read"):
        window(diagnosis=[{"pair": ["a", "b"], "cause": "topology"}])
