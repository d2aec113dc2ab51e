# SPDX-License-Identifier: Apache-2.0
"""When a step is complete: both sides there and quiet, or late; nothing is judged twice and nothing gets lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoexec.contracts.wire import Logprobs, Step
from isoexec.daemon.clock import FairClock
from isoexec.daemon.config import Config
from isoexec.daemon.window import StepBuilder, StepState

CONFIG = Config(state_dir=Path(), quiet_seconds=0.1, settle_seconds=2.0, window_seconds=60.0)


def logprobs(
    case: str,
    step: int,
    names: str = "a",
    values: Any = (-1.0,),
    version: int | None = None,
    source: str = "s",
) -> Logprobs:
    n, k = len(names), len(values)
    return Logprobs(
        run="r",
        role="engine" if case.startswith("engine") else "trainer",
        source=source,
        case=case,
        step=step,
        weight_version=step if version is None else version,
        digests=np.frombuffer(b"".join(name.encode() * 16 for name in names), np.uint8).reshape(n, 16),
        lengths=np.full(n, k, np.int32),
        starts=np.zeros(n, np.int32),
        logprobs=np.tile(np.asarray(values, np.float32), n),
        tokens=np.zeros(n * k, np.int32),
    )


def done(step: int) -> Step:
    return Step(run="r", role="trainer", source="s", step=step)


def builder(config: Config = CONFIG) -> StepBuilder:
    return StepBuilder(config, pending_tokens=1000)


def taken(steps: StepBuilder, now: float, **flags: bool) -> StepState | None:
    state = steps.due(now, **flags)
    return None if state is None else steps.close(state, now)


def by_side(state: StepState) -> dict[str, int]:
    """Tokens that met nothing, whatever the reason."""
    found: dict[str, int] = {}
    for one in state.never_paired():
        found[one.role] = found.get(one.role, 0) + one.tokens
    return found


def test_a_complete_step_is_due_once_it_is_quiet() -> None:
    steps = builder()
    steps.logprobs(logprobs("engine_decode", 1), 0.0)
    steps.logprobs(logprobs("trainer_score", 1), 0.0)
    assert taken(steps, 50.0) is None  # nobody said that the step is over
    steps.step(done(1), 50.0)
    assert taken(steps, 50.05) is None
    state = taken(steps, 50.2)
    assert state is not None
    assert state.reported
    assert [stats.tokens for stats in state.stats()] == [1]
    assert taken(steps, 500.0) is None


def test_a_mismatch_of_one_engine_shows_under_its_name() -> None:
    steps = builder()
    steps.logprobs(logprobs("engine_decode", 1, "ab", source="good"), 0.0)
    steps.logprobs(logprobs("engine_decode", 1, "c", (-1.5,), source="bad"), 0.0)
    steps.logprobs(logprobs("trainer_score", 1, "abc", source="rank0"), 0.0)
    (sums,) = steps.open[1].accumulators.values()
    labels = sums.detail().by_label
    assert [(one.label, one.tokens, one.unequal, one.mean_d) for one in labels["engine"]] == [
        ("bad", 1, 1, 0.5),
        ("good", 2, 0, 0.0),
    ]
    assert [(one.label, one.tokens) for one in labels["trainer"]] == [("rank0", 3)]


def test_a_step_ends_when_the_trainer_begins_the_next() -> None:
    steps = builder()
    for step, name in ((1, "a"), (2, "b")):
        steps.logprobs(logprobs("engine_decode", step, name), float(step))
        steps.logprobs(logprobs("trainer_score", step, name), float(step))
    state = taken(steps, 2.5)
    assert state is not None
    assert state.step == 1
    assert not state.reported
    assert taken(steps, 2.5) is None


def test_tokens_that_wait_are_waited_for_and_then_counted() -> None:
    steps = builder()
    steps.logprobs(logprobs("engine_decode", 1, "ab"), 0.0)
    steps.logprobs(logprobs("trainer_score", 1, "ac"), 0.0)
    steps.step(done(1), 0.0)
    assert taken(steps, 1.0) is None
    state = taken(steps, 2.0)
    assert state is not None
    assert by_side(state) == {"engine": 1, "trainer": 1}
    (stats,) = state.stats()
    assert stats.unpaired == {"engine": 1, "trainer": 1}


def test_a_missing_side_is_waited_for_longer_and_then_judged_as_it_is() -> None:
    steps = builder()
    steps.logprobs(logprobs("engine_decode", 1), 0.0)
    steps.step(done(1), 0.0)
    assert taken(steps, 59.0) is None
    state = taken(steps, 60.0)
    assert state is not None
    assert state.roles == {"engine"}
    assert by_side(state) == {"engine": 1}


def test_a_step_that_nobody_ends_is_judged_when_nothing_comes() -> None:
    steps = builder()
    steps.logprobs(logprobs("engine_decode", 1), 0.0)
    assert taken(steps, 59.0) is None
    assert taken(steps, 60.0) is not None


def test_a_trainer_case_seen_before_is_waited_for() -> None:
    steps = builder()
    for step, cases in ((1, ("trainer_score", "trainer_fwd")), (2, ("trainer_score",))):
        steps.logprobs(logprobs("engine_decode", step, str(step)), float(step))
        for case in cases:
            steps.logprobs(logprobs(case, step, str(step)), float(step))
        steps.step(done(step), float(step))
    assert taken(steps, 2.5) is not None
    assert taken(steps, 2.5) is None
    steps.logprobs(logprobs("trainer_fwd", 2, "2"), 2.6)
    state = taken(steps, 2.9)
    assert state is not None
    assert {stats.pair: stats.tokens for stats in state.stats()} == {
        ("engine_decode", "trainer_fwd"): 1,
        ("engine_decode", "trainer_score"): 1,
    }


def test_weights_that_are_awaited_hold_a_step_for_a_while() -> None:
    steps = builder()
    steps.logprobs(logprobs("engine_decode", 1), 0.0)
    steps.logprobs(logprobs("trainer_score", 1), 0.0)
    steps.step(done(1), 0.0)
    assert taken(steps, 1.0, weights_awaited=True) is None
    assert taken(steps, 2.0, weights_awaited=True) is not None


def test_rollouts_trained_under_another_number_leave_no_window_of_silence() -> None:
    steps = builder()
    steps.logprobs(logprobs("engine_decode", 0, version=5), 0.0)
    steps.logprobs(logprobs("trainer_score", 1, version=5), 0.0)
    steps.step(done(1), 0.0)
    state = taken(steps, 0.5)
    assert state is not None
    assert state.step == 1
    assert not steps.open


def test_what_comes_late_is_judged_with_the_next_step() -> None:
    steps = builder()
    for step, name in ((1, "a"), (2, "b")):
        steps.logprobs(logprobs("engine_decode", step, name), 0.0)
        steps.logprobs(logprobs("trainer_score", step, name), 0.0)
        steps.step(done(step), 0.0)
        assert taken(steps, 1.0) is not None
    steps.logprobs(logprobs("engine_decode", 1, "z"), 2.0)
    steps.step(done(3), 2.0)
    state = taken(steps, 100.0)
    assert state is not None
    assert state.step == 3
    assert by_side(state) == {"engine": 1}


def test_what_comes_late_does_not_number_steps_that_nobody_did() -> None:
    steps = builder()
    for step in range(1, 4):
        steps.logprobs(logprobs("engine_decode", step, "ab"), 10.0 * step)
        steps.logprobs(logprobs("trainer_score", step, "a"), 10.0 * step)
        steps.step(done(step), 10.0 * step)
        state = taken(steps, 10.0 * step + 2.0)
        assert state is not None
        assert state.step == step
        # a rank that is slow, and the other ranks that say the same step is done
        steps.logprobs(logprobs("trainer_score", step, "b"), 10.0 * step + 3.0)
        steps.step(done(step), 10.0 * step + 3.0)
        assert taken(steps, 10.0 * step + 9.0) is None
    assert steps.closed == 3
    steps.finish_all(50.0)
    state = taken(steps, 53.0, final=True)
    assert state is not None
    assert state.unpaired == {("trainer", "late"): 1}


def test_a_job_that_goes_back_to_an_earlier_step_is_still_judged() -> None:
    steps = builder()
    steps.logprobs(logprobs("engine_decode", 100), 0.0)
    steps.logprobs(logprobs("trainer_score", 100), 0.0)
    steps.step(done(100), 0.0)
    assert taken(steps, 1.0) is not None
    tokens = 0
    for step in range(50, 65):
        now = 10.0 * (step - 49)
        steps.logprobs(logprobs("engine_decode", step, "c"), now)
        steps.logprobs(logprobs("trainer_score", step, "c"), now)
        steps.step(done(step), now)
        state = taken(steps, now + 5.0)
        tokens += sum(stats.tokens for stats in state.stats()) if state else 0
    assert tokens >= 12  # a window a minute


def test_the_end_of_a_run_leaves_no_claim_about_what_was_never_trained() -> None:
    steps = builder()
    steps.logprobs(logprobs("engine_decode", 5), 0.0)
    steps.finish_all(0.0)
    assert taken(steps, 3.0, final=True) is None
    assert not steps.open


def test_other_weight_versions_show_as_a_sampling_difference() -> None:
    steps = builder()
    steps.logprobs(logprobs("engine_decode", 1, version=3), 0.0)
    steps.logprobs(logprobs("trainer_score", 1, version=4), 0.0)
    steps.step(done(1), 0.0)
    state = taken(steps, 5.0)
    assert state is not None
    (difference,) = state.sampling_breaks()
    assert (difference.field, difference.engine, difference.trainer) == ("weight_version", 3, 4)


def test_a_rescore_that_is_sampled_leaves_nobody_unpaired() -> None:
    steps = builder()
    steps.logprobs(logprobs("engine_decode", 1, "ab"), 0.0)
    steps.logprobs(logprobs("engine_prefill", 1, "a"), 0.0)
    steps.logprobs(logprobs("trainer_score", 1, "ab"), 0.0)
    steps.step(done(1), 0.0)
    state = taken(steps, 1.0)
    assert state is not None
    assert not any(stats.unpaired for stats in state.stats())
    assert {stats.pair: stats.tokens for stats in state.stats()} == {
        ("engine_decode", "engine_prefill"): 1,
        ("engine_decode", "trainer_score"): 2,
        ("engine_prefill", "trainer_score"): 1,
    }


@pytest.mark.parametrize("lag", [0, 1])
def test_a_lag_gives_rollouts_one_more_step(lag: int) -> None:
    config = Config(
        state_dir=Path(), quiet_seconds=0.0, settle_seconds=0.0, window_seconds=60.0, lag_steps=lag
    )
    steps = builder(config)
    steps.logprobs(logprobs("engine_decode", 1, "a"), 0.0)
    steps.logprobs(logprobs("engine_decode", 1, "b"), 0.0)
    steps.logprobs(logprobs("trainer_score", 1, "a"), 0.0)
    steps.step(done(1), 0.0)
    first = taken(steps, 1.0)
    assert first is not None
    assert by_side(first) == ({} if lag else {"engine": 1})
    steps.logprobs(logprobs("trainer_score", 2, "b", version=1), 2.0)
    steps.step(done(2), 2.0)
    second = taken(steps, 3.0)
    assert (second is not None) == bool(lag)


def test_the_clock_stands_nearly_still_while_the_daemon_is_behind() -> None:
    clock = FairClock(0.0)
    for now in range(1, 11):  # each time, what waited is still there
        clock.tick(float(now), waiting=5, done=0)
    assert clock.late == pytest.approx(0.9 * 9)
    clock.tick(11.0, waiting=5, done=5)  # caught up with those
    assert clock.late == pytest.approx(0.9 * 9)
    clock.tick(31.0, waiting=0, done=10)  # stopped for 20 s
    assert clock.late == pytest.approx(0.9 * 9 + 19)
