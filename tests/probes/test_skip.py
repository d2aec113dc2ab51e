# SPDX-License-Identifier: Apache-2.0
"""Scoring is spared only while everything proves that it may be, and never again after one bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoexec.contracts.halting import LeasePage, LeaseState, StateDirectory
from isoexec.contracts.modes import Mode, write_mode
from isoexec.contracts.schema import Contract, library
from isoexec.probes.client import ProbeSettings
from isoexec.probes.pairing import sampled, sequence_digest
from isoexec.probes.skip import ScoreSkip, not_claimed, padded

CLEAN: dict[str, bool | None] = {"engine": True, "trainer": True}
SEQUENCES = [[1, 5, i, 7 * i] for i in range(200)]
ONE_IN = 8


def logprobs(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


LOGPROBS = [logprobs(-0.5, -1.25)]


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract.load(library("qwen3-dense-cpu"))


@pytest.fixture
def page(tmp_path: Path) -> LeasePage:
    directory = StateDirectory(tmp_path).make().run("r")
    directory.path.mkdir(parents=True)
    page = LeasePage.create(directory.lease)
    page.write(LeaseState.OK, ttl_seconds=60.0, step=0)
    return page


@pytest.fixture
def settings(tmp_path: Path, contract: Contract, page: LeasePage) -> ProbeSettings:
    return ProbeSettings(run="r", state_dir=tmp_path, regime="bitwise", contract=contract)


def proven(settings: ProbeSettings, census: dict[str, bool | None] = CLEAN) -> ScoreSkip:
    skip = ScoreSkip(settings, one_in=ONE_IN, census=census)
    for step in (0, 1):
        assert chosen(skip, step) == len(SEQUENCES)
        assert skip.check(LOGPROBS, LOGPROBS, step=step)
    return skip


def chosen(skip: ScoreSkip, step: int, **more: Any) -> int:
    versions = {"rollout_version": 3, "trainer_version": 3} | more
    return int(skip.choose(SEQUENCES, step=step, **versions).sum())


def test_after_two_compared_steps_only_what_sampling_takes_is_scored(settings: ProbeSettings) -> None:
    skip = proven(settings)
    found = skip.choose(SEQUENCES, step=2, rollout_version=3, trainer_version=3)
    assert found.tolist() == [sampled(sequence_digest(s), ONE_IN) for s in SEQUENCES]
    assert 0 < found.sum() < len(SEQUENCES)
    assert skip.waiting is None
    assert skip.checked == 4


def test_a_step_is_never_wholly_unchecked(settings: ProbeSettings) -> None:
    skip = proven(settings)
    lonely = [s for s in SEQUENCES if not sampled(sequence_digest(s), ONE_IN)][:5]
    first = skip.choose(lonely, step=2, rollout_version=3, trainer_version=3)
    assert first.sum() == 1
    again = skip.choose(lonely[::-1], step=3, rollout_version=3, trainer_version=3)
    assert lonely[::-1][int(again.argmax())] == lonely[int(first.argmax())]


def test_one_bit_ends_it_at_once_and_a_restart_does_not_take_it_up(settings: ProbeSettings) -> None:
    skip = proven(settings)
    other = [np.nextafter(LOGPROBS[0], np.float32(0))]
    assert not skip.check(LOGPROBS, other, step=2)
    assert skip.ended is not None
    assert "step 2" in skip.ended
    assert "0x" in skip.ended
    assert chosen(skip, 3) == len(SEQUENCES)
    restarted = ScoreSkip(settings, one_in=ONE_IN, census=CLEAN)
    assert restarted.ended == skip.ended
    assert restarted.check(LOGPROBS, LOGPROBS, step=4)
    assert restarted.check(LOGPROBS, LOGPROBS, step=5)
    assert chosen(restarted, 6) == len(SEQUENCES)
    assert restarted.clear()
    assert chosen(restarted, 7) == len(SEQUENCES)  # it proves itself again first
    assert not ScoreSkip(settings, census=CLEAN).clear()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_equal_bits_of_no_number_are_no_proof(settings: ProbeSettings, value: float) -> None:
    broken = [logprobs(-0.5, value)]
    skip = proven(settings)
    assert not skip.check(broken, broken, step=2)


def test_zeros_of_both_signs_differ_for_they_are_compared_as_integers(settings: ProbeSettings) -> None:
    assert not proven(settings).check([logprobs(0.0)], [logprobs(-0.0)], step=2)


def test_logprobs_that_lack_a_token_or_are_of_another_dtype_end_it(settings: ProbeSettings) -> None:
    assert not proven(settings).check(LOGPROBS, [LOGPROBS[0][:1]], step=2)
    wide: Any = [LOGPROBS[0].astype(np.float64)]
    assert not proven_after_clear(settings).check(LOGPROBS, wide, step=2)


def proven_after_clear(settings: ProbeSettings) -> ScoreSkip:
    ScoreSkip(settings, census=CLEAN).clear()
    return proven(settings)


@pytest.mark.parametrize(
    ("state", "said"),
    [(LeaseState.WARN, "warn"), (LeaseState.UNKNOWN, "unknown"), (LeaseState.HALT, "topology, TP is 1")],
)
def test_a_verdict_that_is_not_ok_ends_what_has_begun_for_good(
    settings: ProbeSettings, page: LeasePage, state: LeaseState, said: str
) -> None:
    skip = proven(settings)
    assert chosen(skip, 2) < len(SEQUENCES)
    page.write(state, ttl_seconds=60.0, step=2, rule="topology", cause="TP is 1")
    assert chosen(skip, 3) == len(SEQUENCES)
    assert said in str(skip.ended)
    page.write(LeaseState.OK, ttl_seconds=60.0, step=3)
    assert chosen(skip, 4) == len(SEQUENCES)


def test_a_dead_daemon_ends_it(settings: ProbeSettings, page: LeasePage) -> None:
    skip = proven(settings)
    assert chosen(skip, 2) < len(SEQUENCES)
    page.write(LeaseState.OK, ttl_seconds=-1.0, step=2)
    assert chosen(skip, 3) == len(SEQUENCES)
    assert "nobody renews it" in str(skip.ended)


def test_before_it_has_begun_what_is_unknown_only_makes_it_wait(
    settings: ProbeSettings, page: LeasePage
) -> None:
    page.write(LeaseState.OK, ttl_seconds=60.0, step=-1)
    skip = proven(settings)
    assert chosen(skip, 2) == len(SEQUENCES)
    assert skip.waiting == "no step was judged yet"
    assert skip.ended is None
    page.write(LeaseState.OK, ttl_seconds=60.0, step=1)
    assert chosen(skip, 3) < len(SEQUENCES)


@pytest.mark.parametrize(
    ("census", "said"),
    [
        ({"engine": True}, "no census of the trainer"),
        ({"engine": None, "trainer": True}, "no census of the engine"),
        ({"engine": True, "trainer": False}, "the census of the trainer is not clean"),
    ],
)
def test_a_census_that_is_missing_or_not_clean_keeps_it_off(
    settings: ProbeSettings, census: dict[str, bool | None], said: str
) -> None:
    skip = proven(settings, census)
    assert chosen(skip, 2) == len(SEQUENCES)
    assert said in str(skip.waiting)


def test_weights_of_another_version_and_a_mode_that_stops_nothing_keep_it_off(
    settings: ProbeSettings, tmp_path: Path
) -> None:
    skip = proven(settings)
    assert chosen(skip, 2) < len(SEQUENCES)
    assert chosen(skip, 3, rollout_version=2) == len(SEQUENCES)
    assert "weights 2" in str(skip.waiting)
    assert chosen(skip, 4) < len(SEQUENCES)
    write_mode(StateDirectory(tmp_path), "r", Mode.DRYRUN, by="me", reason="test")
    assert chosen(skip, 5) == len(SEQUENCES)
    assert "dryrun" in str(skip.waiting)


def test_only_a_contract_that_claims_both_cases_bitwise_allows_it(
    settings: ProbeSettings, contract: Contract
) -> None:
    assert not_claimed(contract) is None
    loose = replace(contract, claims=replace(contract.claims, bitwise=()))
    for found in (None, loose):
        skip = proven(replace(settings, contract=found))
        assert chosen(skip, 2) == len(SEQUENCES)
        assert skip.waiting == not_claimed(found) != None  # noqa: E711
    assert "engine_decode and trainer_score" in str(not_claimed(loose))


def test_a_note_of_the_end_that_cannot_be_read_is_no_permission(settings: ProbeSettings) -> None:
    path = StateDirectory(settings.state_dir).run("r").path / "skip-ended.json"
    path.write_text("{")
    skip = ScoreSkip(settings, census=CLEAN)
    assert "cannot be read" in str(skip.ended)


def test_rows_are_aligned_with_right_padded_tokens() -> None:
    found = padded([logprobs(-1, -2), logprobs(-3)], [1, 2], 4)
    assert found.tolist() == [[0, -1, -2, 0], [0, 0, -3, 0]]
