# SPDX-License-Identifier: Apache-2.0
"""A frame is acknowledged once the journal has what it says, not before, and is known when it comes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isoexec.contracts import wire
from isoexec.daemon.accounts import Accounts, Lane, Spans
from isoexec.daemon.config import Config
from isoexec.daemon.window import StepBuilder


@given(st.lists(st.integers(0, 60)))
def test_spans_are_the_set_of_what_was_added(numbers: list[int]) -> None:
    spans = Spans()
    for number in numbers:
        spans.add(number)
    again = Spans(str(spans))
    for one in (spans, again):
        assert [n for n in range(62) if n in one] == sorted(set(numbers))
        assert len(one) == len(set(numbers))
    if numbers:
        assert (again.first, again.last) == (min(numbers), max(numbers))


def said(kind: type[wire.Message], seq: int, **fields: Any) -> wire.Message:
    return kind(run="r", role="engine", source="s", seq=seq, **fields)


def test_data_waits_for_its_last_sequence_and_its_last_window_and_then_for_the_journal() -> None:
    accounts, lane = Accounts(), Lane("0" * 16, "r")
    frame = accounts.hold(lane, said(wire.Step, 4, step=2), "ticket")
    frame.left = 1
    frame.counted_in(3)
    assert accounts.settle(9) == []
    frame.left = 0
    assert accounts.settle(2) == []
    ((key, run, taken, _),) = accounts.settle(3)
    assert (key, run, taken) == (lane.key, "r", "4")
    assert list(accounts.ready()) == []
    accounts.kept()
    assert list(accounts.ready()) == ["ticket"]
    assert list(accounts.ready()) == []
    assert accounts.rows() == []
    assert lane.knows(4)


def test_what_a_process_says_of_itself_is_held_until_it_says_something_newer_or_its_run_ends() -> None:
    accounts, lane = Accounts(), Lane("0" * 16, "r")
    attested = {"reason": "start", "step": 0, "weight_version": 0, "topology": {}}
    weights = {"step": 0, "tensors": {}, "numel": {}, "total": {}}
    for seq, message in enumerate(
        [
            said(wire.Hello, 0, regime="bitwise", monitor_only=True),
            said(wire.Attestation, 1, **attested),
            said(wire.Weights, 2, weight_version=1, **weights),
            said(wire.Weights, 3, weight_version=1, **weights),  # a second part of the same version
            said(wire.Attestation, 4, **attested),
            said(wire.Weights, 5, weight_version=2, **weights),
        ]
    ):
        accounts.hold(lane, message, seq)
    accounts.kept()
    assert sorted(accounts.ready()) == [1, 2, 3]
    assert sorted(lane.held) == [0, 4, 5]
    accounts.finish()
    accounts.kept()
    assert sorted(accounts.ready()) == [0, 4, 5]
    assert str(lane.taken) == "0-5"


def test_what_came_late_is_held_until_the_step_it_was_moved_to_is_judged() -> None:
    accounts, lane = Accounts(), Lane("0" * 16, "r")
    builder = StepBuilder(Config(state_dir=Path()), pending_tokens=100)

    def end(step: int, seq: int) -> None:
        message = wire.Step(run="r", role="trainer", source="s", seq=seq, step=step)
        builder.step(message, 0.0, accounts.hold(lane, message, seq))

    def judged(step: int) -> str:
        builder.close(builder.open[step], 0.0)
        accounts.settle(builder.closed)
        return str(lane.taken)

    end(5, 0)
    end(6, 1)
    assert judged(5) == "0"
    assert judged(6) == "0-1"
    late = wire.Logprobs(
        run="r", role="engine", source="s", seq=2, case="engine_decode", step=6, weight_version=6,
        digests=np.ones((1, 16), np.uint8), lengths=np.ones(1, np.int32), starts=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32), tokens=np.zeros(1, np.int32),
    )  # fmt: skip
    builder.logprobs(late, 0.0, accounts.hold(lane, late, 2))
    end(9, 3)  # takes the late one in
    end(8, 4)
    assert sorted(builder.open) == [8, 9]
    assert judged(8) == "0-1,4"
    assert judged(9) == "0-4"
