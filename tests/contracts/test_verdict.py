# SPDX-License-Identifier: Apache-2.0
"""Judging windows: bounds, patience, silence, monitor-only runs, baselines, and replay."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoexec.contracts.causes import CAUSES
from isoexec.contracts.detail import PairDetail
from isoexec.contracts.rules import DEFAULT_RULES, Rule
from isoexec.contracts.signals import SIGNALS
from isoexec.contracts.verdict import (
    BASELINE_MIN,
    RuleHistory,
    Verdict,
    evaluate,
    guard_state,
    overall,
    replay,
)
from isoexec.contracts.window import (
    REGIMES,
    EnvironmentBreak,
    FieldDifference,
    PairStats,
    RegionBreak,
    SamplingBreak,
    Silence,
    TopologyBreak,
    WeightBreak,
    Window,
    WindowError,
)

EMPTY = RuleHistory()


def pair(mean_abs_d: float = 0.0, **values: Any) -> PairStats:
    equal = mean_abs_d == 0
    base: dict[str, Any] = {
        "pair": ("engine_decode", "trainer_score"),
        "tokens": 1000,
        "bitwise_equal": 1000 if equal else 3,
        "mean_d": 0.0,
        "mean_abs_d": mean_abs_d,
        "max_abs_d": mean_abs_d * 5,
        "p99_abs_d": mean_abs_d * 3,
        "std_d": mean_abs_d,
        "kurtosis": math.nan if equal else 4.0,
        "r_ratio": math.nan if equal else 0.9,
        "share_negative": math.nan if equal else 0.5,
        "k1": 0.0,
        "k3": mean_abs_d**2,
        "rho_mean": 1.0,
        "rho_z": 0.0,
        "detail": PairDetail(numbers={"rho_z_capped": 0.0}),
    }
    return PairStats(**(base | values))


def engine_pair(mean_abs_d: float = 0.0) -> PairStats:
    return pair(mean_abs_d, pair=("engine_decode", "engine_prefill"))


def window(*pairs: PairStats, regime: str = "bitwise", **facts: Any) -> Window:
    values: dict[str, Any] = {"monitor_only": False, "step": 7, "weight_version": 7} | facts
    return Window(run="r", regime=regime, pairs=pairs, **values)


def clean(regime: str = "bitwise", **facts: Any) -> Window:
    return window(pair(), engine_pair(), regime=regime, **facts)


def judge(w: Window, history: RuleHistory = EMPTY) -> dict[str, Verdict]:
    return {v.rule: v for v in evaluate(DEFAULT_RULES(w.regime), w, history)}


@pytest.mark.parametrize("regime", REGIMES)
def test_a_clean_window_passes_every_rule_but_the_baseline_that_is_not_there_yet(regime: str) -> None:
    verdicts = judge(clean(regime))
    assert {v.outcome for n, v in verdicts.items() if not n.startswith("baseline")} == {"pass"}
    assert all(v.action in ("none", "dryrun") for v in verdicts.values())
    assert guard_state(list(verdicts.values())) == "ok"


def test_nothing_seen_is_never_a_pass() -> None:
    w = window(silence=(Silence(role="engine", what="hello", age_seconds=None),))
    verdicts = judge(w)
    for rule in ("handshake", "topology", "kernel_replaced", "canary", "environment", "unequal", "unpaired"):
        assert verdicts[rule].outcome == "unknown", rule
    assert verdicts["silence"].outcome == "unknown"
    assert verdicts["silence"].action == "warn"
    assert "engine has sent no hello" in verdicts["silence"].message
    assert guard_state(list(verdicts.values())) == "unknown"


SUBJECTS = {
    "hello": {"handshake", "topology", "kernel_replaced", "canary", "environment", "silence"},
    "attestation": {"topology", "kernel_replaced", "canary", "environment", "silence"},
    "weights": {"weights_stale", "weights_unequal", "weights_unchanged", "silence"},
    "logprobs": {
        *("unequal", "unobserved", "decode_prefill", "nonfinite", "exact_zero", "positive", "id_mismatch"),
        *("unpaired", "silence"),
    },
    "probe": {"silence"},
}


@pytest.mark.parametrize("what", SUBJECTS)
def test_a_silent_subject_leaves_every_claim_on_it_unknown(what: Any) -> None:
    verdicts = judge(clean(silence=(Silence(role="trainer", what=what, age_seconds=40.0),)))
    assert {n for n, v in verdicts.items() if v.outcome == "unknown"} == SUBJECTS[what]
    assert not [n for n, v in verdicts.items() if v.outcome == "violation"]


def test_a_violation_that_was_seen_outranks_what_was_not_seen() -> None:
    w = window(pair(0.01), silence=(Silence(role="trainer", what="logprobs", age_seconds=9.0),))
    assert judge(w)["unequal"].outcome == "violation"


def test_unreadable_tensors_are_unknown_not_equal() -> None:
    w = clean(weights=(WeightBreak(name="w", kind="unknown", engine_version=3, trainer_version=3),))
    assert judge(w)["weights_unequal"].outcome == "unknown"
    assert "could not be read, w first" in judge(w)["weights_unequal"].message


def test_a_missing_statistic_is_unknown() -> None:
    w = window(pair(0.001, k3=math.nan), regime="bf16_dense")
    verdicts = judge(w)
    assert verdicts["k3.halt"].outcome == "unknown"
    assert verdicts["mean_abs_d.halt"].outcome == "pass"


REGION = {
    "role": "engine",
    "source": "h:1:0",
    "region": "norm",
    "wanted": "rms_norm.tree/1",
    "found": "native",
}
FACTS: dict[str, tuple[dict[str, Any], str]] = {
    "handshake": ({"handshake": (FieldDifference(path="p", engine=1, trainer=2),)}, "contract_differs"),
    "topology": (
        {
            "topology_breaks": (
                TopologyBreak(role="engine", source="h:1:0", axis="TP", found=3, admitted="{1, 2}"),
            )
        },
        "topology",
    ),
    "kernel_replaced": ({"region_breaks": (RegionBreak(**REGION, kind="object"),)}, "kernel_replaced"),
    "canary": ({"region_breaks": (RegionBreak(**REGION, kind="canary"),)}, "canary"),
    "environment": (
        {
            "environment_breaks": (
                EnvironmentBreak(
                    role="engine", source="h:1:0", name="torch", wanted="2.13.0", found="2.12.1"
                ),
            )
        },
        "environment",
    ),
    "weights_stale": (
        {"weights": (WeightBreak(name="w", kind="stale", engine_version=6, trainer_version=7),)},
        "weights_stale",
    ),
    "weights_unequal": (
        {"weights": (WeightBreak(name="w", kind="zero", engine_version=7, trainer_version=7),)},
        "weights_unequal",
    ),
    "sampling": ({"sampling": (SamplingBreak(field="temperature", engine=0.6, trainer=1.0),)}, "sampling"),
}


@pytest.mark.parametrize("rule", FACTS)
def test_a_broken_promise_halts_a_bitwise_run_at_once_and_names_its_cause(rule: str) -> None:
    facts, cause = FACTS[rule]
    w = clean(**facts)
    verdicts = judge(w)
    assert [n for n, v in verdicts.items() if v.outcome == "violation"] == [rule]
    assert (verdicts[rule].action, verdicts[rule].cause) == ("halt", cause)
    assert verdicts[rule].runbook == f"dashboards/runbook.md#{cause}"
    assert CAUSES[cause] in verdicts[rule].message
    assert verdicts[rule].evidence["count"] == 1
    assert guard_state(list(verdicts.values())) == "halt"


@pytest.mark.parametrize("rule", FACTS)
def test_a_monitor_only_run_is_never_halted_and_has_no_contract_to_break(rule: str) -> None:
    facts, _ = FACTS[rule]
    verdicts = judge(window(pair(0.5), monitor_only=True, **facts))
    assert "halt" not in {v.action for v in verdicts.values()}
    assert verdicts["unequal"].action == "warn"
    contract = {r.name for r in DEFAULT_RULES("bitwise") if SIGNALS[r.signal].scope == "contract"}
    assert len(contract) == 5
    assert not contract & verdicts.keys()


def test_one_unequal_token_breaks_a_bitwise_run() -> None:
    verdict = judge(window(pair(1e-12, bitwise_equal=999), engine_pair()))["unequal"]
    assert (verdict.outcome, verdict.action, verdict.value) == ("violation", "halt", 1.0)


def test_a_value_at_the_bound_passes_and_just_above_it_does_not() -> None:
    rule = Rule(name="r", signal="mean_abs_d", bound=0.02)
    at, above = 0.02, math.nextafter(0.02, 1)
    assert evaluate([rule], window(pair(at)), EMPTY)[0].outcome == "pass"
    assert evaluate([rule], window(pair(above)), EMPTY)[0].outcome == "violation"


def test_the_worst_pair_is_judged() -> None:
    rule = Rule(name="r", signal="mean_abs_d", bound=0.02)
    worse = pair(0.3, pair=("engine_decode", "trainer_fwd"))
    (verdict,) = evaluate([rule], window(pair(0.001), worse, engine_pair(0.9)), EMPTY)
    assert verdict.value == 0.3
    assert verdict.evidence["pair"] == "engine_decode:trainer_fwd"


def halt_actions(values: list[float]) -> list[str]:
    rule = Rule(name="r", signal="mean_abs_d", bound=0.1, patience=3, action="halt")
    windows = [window(pair(v) if v >= 0 else pair(0, tokens=0), regime="bf16_dense") for v in values]
    return [verdicts[0].action for _, verdicts in replay([rule], windows)]


def test_patience_counts_windows_in_a_row_and_warns_before() -> None:
    assert halt_actions([0.2, 0.2, 0.05, 0.2, 0.2, 0.2, 0.2]) == [
        *("warn", "warn", "none", "warn", "warn", "halt", "halt")
    ]


def test_an_unknown_window_neither_adds_to_a_streak_nor_ends_it() -> None:
    unknown = -1.0
    # on_unknown `warn` is lowered to `dryrun` while its own streak is shorter than the patience
    assert halt_actions([0.2, 0.2, unknown, 0.2]) == ["warn", "warn", "dryrun", "halt"]


def test_on_unknown_can_halt_a_run_that_must_not_go_blind() -> None:
    rule = Rule(name="r", signal="region_breaks", action="halt", on_unknown="halt", patience=2)
    blind = window(pair(), silence=(Silence(role="engine", what="attestation", age_seconds=90.0),))
    outcomes = [(v[0].outcome, v[0].action) for _, v in replay([rule], [blind, blind])]
    assert outcomes == [("unknown", "warn"), ("unknown", "halt")]


def test_a_rule_over_several_windows_judges_their_mean() -> None:
    rule = Rule(name="r", signal="mean_abs_d", bound=0.1, window=3)
    windows = [window(pair(v)) for v in (0.0, 0.0, 0.25, 0.25)]
    outcomes = [v[0].outcome for _, v in replay([rule], windows)]
    assert outcomes == ["pass", "pass", "pass", "violation"]


def baseline(values: list[float]) -> list[tuple[str, str]]:
    rule = Rule(name="b", signal="baseline_ratio", bound=4.0, window=32, action="halt", on_unknown="dryrun")
    windows = [window(pair(v), regime="bf16_dense") for v in values]
    return [(v[0].outcome, v[0].action) for _, v in replay([rule], windows)]


def test_a_run_is_compared_with_its_own_past() -> None:
    outcomes = baseline([0.01] * BASELINE_MIN + [0.039, 0.041])
    assert outcomes[:BASELINE_MIN] == [("unknown", "dryrun")] * BASELINE_MIN
    assert outcomes[BASELINE_MIN:] == [("pass", "none"), ("violation", "halt")]


def test_a_fault_does_not_become_the_new_normal() -> None:
    outcomes = baseline([0.01] * BASELINE_MIN + [0.1] * 40)
    assert {o for o, _ in outcomes[BASELINE_MIN:]} == {"violation"}


def test_a_ratio_of_two_negligible_mismatches_is_not_a_violation() -> None:
    assert baseline([0.0] * BASELINE_MIN + [0.0015])[-1] == ("pass", "none")


def test_rho_is_off_only_where_the_test_is_sure() -> None:
    unsure = window(pair(0.01, rho_mean=1.5, rho_z=4.0), regime="bf16_dense")
    off: dict[str, Any] = {"rho_mean": 0.91, "rho_z": -80.0, "share_negative": 1.0}
    heavy_tails = window(pair(0.01, **off), regime="bf16_dense")  # of the capped test, 0
    sure = window(pair(0.01, **off, detail=PairDetail(numbers={"rho_z_capped": -80.0})), regime="bf16_dense")
    of_old = window(pair(0.01, **off, detail=None), regime="bf16_dense")
    assert judge(unsure)["rho.halt"].outcome == "pass"
    assert judge(heavy_tails)["rho.halt"].outcome == "pass"
    for one in (sure, of_old):
        verdict = judge(one)["rho.halt"]
        assert (verdict.outcome, verdict.cause) == ("violation", "support_renormalised")


def test_an_engine_that_disagrees_with_itself_is_blamed() -> None:
    verdict = judge(window(pair(0.01), engine_pair(0.01)))["decode_prefill"]
    assert (verdict.outcome, verdict.action, verdict.cause) == ("violation", "halt", "engine_decode_prefill")


def test_a_window_without_a_rescore_is_unknown_and_only_recorded() -> None:
    verdict = judge(window(pair()))["decode_prefill"]
    assert (verdict.outcome, verdict.action) == ("unknown", "dryrun")


def test_drops_and_lost_partners_warn() -> None:
    w = clean(dropped=1)
    assert judge(w)["drops"].action == "warn"
    lost = window(pair(unpaired={"engine": 60}), engine_pair())
    assert judge(lost)["unpaired"].outcome == "violation"
    assert judge(lost)["unpaired"].value == pytest.approx(60 / 1060)


def test_no_rule_for_a_regime_is_said_aloud() -> None:
    rule = Rule(name="r", signal="k3", regime="fp8")
    (verdict,) = evaluate([rule], clean("bitwise"), EMPTY)
    assert (verdict.rule, verdict.outcome, verdict.action) == ("no_rule", "unknown", "warn")
    assert guard_state([]) == "unknown"


def test_the_strongest_action_decides() -> None:
    verdicts = evaluate(DEFAULT_RULES("bitwise"), clean(dropped=3, **FACTS["topology"][0]), EMPTY)
    top = overall(verdicts)
    assert top is not None
    assert top.rule == "topology"
    assert overall([]) is None


def test_evaluate_changes_neither_history_nor_window() -> None:
    w = window(pair(0.5))
    history = EMPTY.after(evaluate(DEFAULT_RULES("bitwise"), w, EMPTY))
    before = dataclasses.asdict(history)
    first = evaluate(DEFAULT_RULES("bitwise"), w, history)
    assert evaluate(DEFAULT_RULES("bitwise"), w, history) == first
    assert dataclasses.asdict(history) == before


def test_verdicts_are_plain_json() -> None:
    verdicts = judge(window(pair(0.5, max_abs_d=math.inf), engine_pair(), **FACTS["canary"][0]))
    for verdict in verdicts.values():
        assert json.loads(json.dumps(verdict.to_dict(), allow_nan=False))["rule"] == verdict.rule


def test_a_window_survives_the_journal() -> None:
    everything: dict[str, Any] = {}
    for facts, _ in FACTS.values():
        everything |= facts
    w = window(
        pair(0.1, max_abs_d=math.inf, unpaired={"engine": 3}, histogram=(1, 2, 3)),
        silence=(Silence(role="trainer", what="weights", age_seconds=None),),
        dropped=4,
        **everything,
    )
    text = json.dumps(w.to_dict(), allow_nan=False)
    assert repr(Window.from_dict(json.loads(text))) == repr(w)  # NaN is not equal to itself


@settings(max_examples=60, deadline=None)
@given(st.floats(), st.floats(), st.integers(0, 2**40))
def test_any_float_survives_the_journal(a: float, b: float, tokens: int) -> None:
    w = window(PairStats(pair=("engine_decode", "trainer_fwd"), tokens=tokens, mean_abs_d=a, rho_z=b))
    back = Window.from_dict(json.loads(json.dumps(w.to_dict(), allow_nan=False)))
    assert repr(back) == repr(w)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": 1}, "no field 'extra'"),
        ({"pairs": 3}, "must be a list"),
        ({"pairs": [3]}, "must be a map"),
        ({"pairs": [{"tokens": 1}]}, "pair"),
        ({"pairs": [{"pair": ["a", "b"], "mean_d": "high"}]}, "cannot be read"),
        ({"step": None}, ""),
    ],
)
def test_a_damaged_window_is_refused(change: dict[str, Any], words: str) -> None:
    data = clean().to_dict() | change
    if change == {"step": None}:
        del data["step"]
        words = "step"
    with pytest.raises(WindowError, match=words):
        Window.from_dict(data)
