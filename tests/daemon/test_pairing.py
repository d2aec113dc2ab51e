# SPDX-License-Identifier: Apache-2.0
"""Joining by content: multisets, ranges, versions, and what happens to what never meets a partner."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isoexec.contracts.wire import Logprobs
from isoexec.daemon.pairing import Batch, Pairing, Record

Entry = tuple[str, int, list[float]]
"""(what the sequence is, start, logprobs)."""


def message(case: str, entries: list[Entry], *, step: int = 1, version: int = 1, **fields: Any) -> Logprobs:
    lengths = [len(values) for _, _, values in entries]
    return Logprobs(
        run="r",
        role="engine" if case.startswith("engine") else "trainer",
        source="s",
        case=case,
        step=step,
        weight_version=version,
        digests=np.array([list(name.encode().ljust(16, b"\0")) for name, _, _ in entries], np.uint8).reshape(
            -1, 16
        ),
        lengths=np.array(lengths, np.int32),
        starts=np.array([start for _, start, _ in entries], np.int32),
        logprobs=np.array([v for _, _, values in entries for v in values], np.float32),
        tokens=np.zeros(sum(lengths), np.int32),
        **fields,
    )


class Join:
    """A pairing and everything that came out of it."""

    def __init__(self, limit: int = 10_000) -> None:
        self.pairing = Pairing(limit_tokens=limit)
        self.lost: list[Record] = []
        self.batches: list[Batch] = []

    def add(self, one: Logprobs, now: float = 0.0) -> list[Batch]:
        found = self.pairing.add(one, now, self.lost.append)
        self.batches += found
        return found

    def retire(self, step: int, lag_steps: int = 0, older_than: float = -1.0) -> None:
        self.pairing.retire(step, lag_steps=lag_steps, older_than=older_than, unpaired=self.lost.append)


def pairs_of(batches: list[Batch]) -> list[tuple[tuple[str, str], list[float], list[float]]]:
    return [
        (batch.pair, a.tolist(), b.tolist())
        for batch in batches
        for a, b in zip(batch.first, batch.second, strict=True)
    ]


def test_the_same_sequence_meets_whichever_side_comes_first() -> None:
    for order in (("engine_decode", "trainer_score"), ("trainer_score", "engine_decode")):
        join = Join()
        values = {"engine_decode": [-1.0, -2.0], "trainer_score": [-1.5, -2.5]}
        for case in order:
            join.add(message(case, [("a", 3, values[case])]))
        assert pairs_of(join.batches) == [(("engine_decode", "trainer_score"), [-1.0, -2.0], [-1.5, -2.5])]


def test_one_sequence_meets_every_case_it_belongs_to_once() -> None:
    join = Join()
    for case in ("engine_decode", "trainer_score", "trainer_fwd", "engine_prefill"):
        join.add(message(case, [("a", 0, [-1.0])]))
    assert Counter(pair for pair, _, _ in pairs_of(join.batches)) == {
        ("engine_decode", "trainer_score"): 1,
        ("engine_decode", "trainer_fwd"): 1,
        ("engine_prefill", "trainer_score"): 1,
        ("engine_prefill", "trainer_fwd"): 1,
        ("engine_decode", "engine_prefill"): 1,
    }


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=30))
def test_duplicates_pair_as_a_multiset_in_any_order(events: list[tuple[bool, str]]) -> None:
    join = Join()
    for engine, name in events:
        join.add(message("engine_decode" if engine else "trainer_score", [(name, 0, [-1.0])]))
    rollouts = Counter(name for is_engine, name in events if is_engine)
    trained = Counter(name for is_engine, name in events if not is_engine)
    alone = (rollouts - trained) + (trained - rollouts)
    assert len(pairs_of(join.batches)) == (rollouts & trained).total()
    assert join.pairing.waiting(1) == bool(alone)
    assert join.pairing.pending("engine") == (rollouts - trained).total()
    join.retire(1)
    assert len(join.lost) == len(events)
    assert sum(not record.met_other_side for record in join.lost) == alone.total()
    assert not join.pairing.waiting(1)
    assert join.pairing.held_tokens == 0


def test_ranges_are_aligned_by_position() -> None:
    join = Join()
    join.add(message("engine_decode", [("a", 5, [-5.0, -6.0, -7.0])]))
    join.add(message("trainer_score", [("a", 0, [-0.0, -1.0, -2.0, -3.0, -4.0, -5.5, -6.5, -7.5])]))
    join.add(message("engine_decode", [("b", 0, [-1.0])]))
    join.add(message("trainer_score", [("b", 4, [-1.0])]))
    assert pairs_of(join.batches) == [
        (("engine_decode", "trainer_score"), [-5.0, -6.0, -7.0], [-5.5, -6.5, -7.5])
    ]
    assert join.batches[0].positions == [5]


def test_other_versions_do_not_pair_and_are_remembered() -> None:
    join = Join()
    join.add(message("engine_decode", [("a", 0, [-1.0])], version=3))
    join.add(message("trainer_score", [("a", 0, [-1.0])], version=4))
    assert not join.batches
    join.retire(1)
    assert [record.other_versions for record in join.lost] == [{(3, 4)}, {(3, 4)}]
    join.add(message("engine_decode", [("b", 0, [-1.0])], version=-1))
    join.add(message("trainer_score", [("b", 0, [-1.0])], version=4))
    assert len(join.batches) == 1


def test_the_trainer_says_which_step_it_is() -> None:
    join = Join()
    join.add(message("engine_decode", [("a", 0, [-1.0])], step=6))
    assert join.add(message("trainer_score", [("a", 0, [-1.0])], step=9))[0].step == 9


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    join = Join(limit=10)
    for name in "abcd":
        join.add(message("engine_decode", [(name, 0, [-1.0] * 4)]))
    assert join.pairing.held_tokens <= 10
    assert [record.digest[:1] for record in join.lost] == [b"a", b"b"]
    assert join.pairing.evicted_tokens == 8


def test_a_lag_keeps_rollouts_and_only_rollouts() -> None:
    join = Join()
    join.add(message("engine_decode", [("a", 0, [-1.0])], step=1))
    join.add(message("trainer_score", [("b", 0, [-1.0])], step=1))
    join.retire(1, lag_steps=1)
    assert [record.case for record in join.lost] == ["trainer_score"]
    join.retire(2, lag_steps=1)
    assert [record.case for record in join.lost] == ["trainer_score", "engine_decode"]


def test_what_states_no_step_goes_by_age() -> None:
    join = Join()
    join.add(message("engine_decode", [("a", 0, [-1.0])], step=-1), now=10.0)
    join.retire(5, older_than=9.0)
    assert not join.lost
    join.retire(5, older_than=11.0)
    assert len(join.lost) == 1


def test_sampling_that_differs_is_seen_where_it_can_matter() -> None:
    join = Join()
    join.add(message("engine_decode", [("a", 0, [-1.0])], temperature=0.6, logprobs_mode="raw_logprobs"))
    join.add(
        message("trainer_score", [("a", 0, [-1.0])], temperature=1.0, logprobs_mode="processed_logprobs")
    )
    assert {name for name, _, _ in join.batches[0].sampling} == {"temperature", "logprobs_mode"}
    join.add(message("engine_decode", [("b", 0, [-1.0])], logprobs_mode="raw_logprobs"))
    join.add(message("trainer_score", [("b", 0, [-1.0])], logprobs_mode="processed_logprobs"))
    assert not join.batches[1].sampling
