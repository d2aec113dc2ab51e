# SPDX-License-Identifier: Apache-2.0
"""Joining by content: multisets, ranges, versions, and what happens to what never meets a partner."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoexec.contracts.window import PAIRS
from isoexec.contracts.wire import Logprobs
from isoexec.daemon.pairing import Batch, Gone, Pairing

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
        **{"tokens": np.zeros(sum(lengths), np.int32), **fields},
    )


class Join:
    """A pairing and everything that came out of it."""

    def __init__(self, limit: int = 10_000) -> None:
        self.pairing = Pairing(limit_tokens=limit)
        self.lost: list[Gone] = []
        self.batches: list[Batch] = []

    def add(self, one: Logprobs, now: float = 0.0) -> list[Batch]:
        found = self.pairing.add(one, now, self.lost.append)
        self.batches += found
        return found

    def retire(self, step: int, lag_steps: int = 0, older_than: float = -1.0) -> None:
        self.pairing.retire(step, lag_steps=lag_steps, older_than=older_than, unpaired=self.lost.append)


def pairs_of(batches: list[Batch]) -> list[tuple[tuple[str, str], list[float], list[float]]]:
    found = []
    for batch in batches:
        cuts = np.cumsum(batch.lengths)[:-1]
        for a, b in zip(np.split(batch.first, cuts), np.split(batch.second, cuts), strict=True):
            found.append((batch.pair, a.tolist(), b.tolist()))
    return found


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


Waiting = tuple[str, str, int, list[float], int, set[str]]
"""(case, what the sequence is, start, logprobs, version, cases met) of one sequence, one by one."""


def one_by_one(held: list[Waiting], new: Waiting) -> list[tuple[tuple[str, str], list[float], list[float]]]:
    """What a sequence pairs with, by walking over all that came before it."""
    case, name, start, values, version, met = new
    found = []
    for pair in PAIRS:
        partner = pair[1] if pair[0] == case else pair[0]
        for other in held if case in pair else ():
            low, high = max(start, other[2]), min(start + len(values), other[2] + len(other[3]))
            versions = {version, other[4]}
            fits = other[:2] == (partner, name) and (len(versions) == 1 or -1 in versions) and low < high
            if fits and case not in other[5]:
                other[5].add(case)
                met.add(partner)
                ours, theirs = values[low - start : high - start], other[3][low - other[2] : high - other[2]]
                found.append((pair, *((ours, theirs) if pair[0] == case else (theirs, ours))))
                break
    held.append(new)
    return found


SEQUENCES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=5
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([pair[0] for pair in PAIRS[::3]] + [pair[1] for pair in PAIRS[:3]]),
                  st.sampled_from([-1, 1, 2]), SEQUENCES),
        max_size=8,
    )
)  # fmt: skip
def test_messages_of_many_sequences_pair_as_their_sequences_do(
    messages: list[tuple[str, int, list[tuple[str, int, int]]]],
) -> None:
    join, held = Join(), list[Waiting]()
    number = itertools.count()
    for case, version, sequences in messages:
        entries: list[Entry] = [
            (name, start, [float(next(number)) for _ in range(size)]) for name, start, size in sequences
        ]
        found = join.add(message(case, entries, version=version))
        wanted = []
        for name, start, values in entries:
            if values:
                wanted += one_by_one(held, (case, name, start, values, version, set()))
        assert sorted(pairs_of(found)) == sorted(wanted)
        assert all(batch.first.size == batch.lengths.sum() == batch.second_ids.size for batch in found)
    assert join.pairing.held_tokens == sum(len(one[3]) for one in held)
    join.retire(1)
    assert sum(gone.records for gone in join.lost) == len(held)
    reasons(join)
    assert join.pairing.held_tokens == join.pairing.pending("engine") == join.pairing.pending("trainer") == 0
    met = Counter(frozenset(one[5]) for one in held)
    assert sum((Counter({gone.met: gone.records}) for gone in join.lost), Counter()) == met


def test_ranges_are_aligned_by_position() -> None:
    join = Join()
    join.add(message("engine_decode", [("a", 5, [-5.0, -6.0, -7.0])]))
    join.add(message("trainer_score", [("a", 0, [-0.0, -1.0, -2.0, -3.0, -4.0, -5.5, -6.5, -7.5])]))
    join.add(message("engine_decode", [("b", 0, [-1.0])]))
    join.add(message("trainer_score", [("b", 4, [-1.0])]))
    assert pairs_of(join.batches) == [
        (("engine_decode", "trainer_score"), [-5.0, -6.0, -7.0], [-5.5, -6.5, -7.5])
    ]
    assert join.batches[0].positions.tolist() == [5]


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
    for step, name in enumerate("abcd"):
        join.add(message("engine_decode", [(name, 0, [-1.0] * 4)], step=step))
    assert join.pairing.held_tokens <= 10
    assert [gone.step for gone in join.lost] == [0, 1]
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


ENGINE, TRAINER = "engine_decode", "trainer_score"
IDS = list(range(100, 120))


def left(case: str, name: str, ids: list[int], start: int = 3, **fields: Any) -> Logprobs:
    """One sequence of given token ids."""
    return message(case, [(name, start, [-1.0] * len(ids))], tokens=np.array(ids, np.int32), **fields)


def reasons(join: Join) -> dict[str, Counter[str]]:
    """Tokens that never paired by case and reason; the reasons of what was let go of add up, or it fails."""
    found: dict[str, Counter[str]] = {}
    for gone in join.lost:
        assert sum(gone.reasons.values()) == (0 if gone.met_other_side else gone.tokens)
        found.setdefault(gone.case, Counter()).update(gone.reasons)
    return {case: counts for case, counts in found.items() if counts}


def swapped(at: int) -> list[int]:
    return [*IDS[:at], 7, *IDS[at + 1 :]]


@pytest.mark.parametrize(
    ("trained", "wanted"),
    [
        ({"name": "b", "ids": [7] * 20}, "only"),
        ({"name": "b", "ids": [*IDS[:5], *[7] * 15]}, "only"),  # of one group: they begin alike
        ({"name": "a", "ids": IDS, "version": 2}, "version"),
        ({"name": "b", "ids": [*IDS, 7]}, "length"),  # an end token that only the trainer has
        ({"name": "b", "ids": IDS[:15]}, "length"),
        ({"name": "b", "ids": IDS[5:], "start": 8}, "length"),
        ({"name": "a", "ids": IDS[:2], "start": 1}, "length"),  # another part of it
        ({"name": "b", "ids": swapped(10)}, "ids"),
        ({"name": "b", "ids": swapped(0)}, "ids"),
        ({"name": "b", "ids": [*IDS[:10], 7, 7, *IDS[11:]]}, "ids"),  # tokenised anew
        ({"name": "b", "ids": IDS}, "ids"),  # of another prompt
    ],
)
def test_what_never_paired_says_why_on_both_sides(trained: dict[str, Any], wanted: str) -> None:
    only = {ENGINE: "only_rollout", TRAINER: "only_trainer"}
    sizes = {ENGINE: 20, TRAINER: len(trained["ids"])}
    for order in (1, -1):
        join = Join()
        for one in (left(ENGINE, "a", IDS), left(TRAINER, **trained))[::order]:
            assert not join.add(one)
        join.retire(1)
        assert reasons(join) == {
            case: {only[case] if wanted == "only" else wanted: size} for case, size in sizes.items()
        }


def test_a_rollout_that_waits_longer_than_the_trainer_keeps_its_reason() -> None:
    join = Join()
    join.add(left(ENGINE, "a", IDS))
    join.add(left(TRAINER, "b", swapped(3)))
    join.retire(1, lag_steps=2)
    assert reasons(join) == {TRAINER: {"ids": 20}}
    join.retire(3, lag_steps=2)
    assert reasons(join) == {TRAINER: {"ids": 20}, ENGINE: {"ids": 20}}


def test_late_and_evicted_are_told_apart() -> None:
    join = Join(limit=30)
    join.add(left(ENGINE, "a", IDS))
    join.retire(1)
    join.add(left(TRAINER, "a", IDS))
    join.retire(2)
    assert reasons(join) == {ENGINE: {"only_rollout": 20}, TRAINER: {"late": 20}}
    crowded = Join(limit=30)
    crowded.add(left(ENGINE, "a", IDS))
    crowded.add(left(ENGINE, "b", [7] * 20))
    crowded.add(left(TRAINER, "a", IDS[:10]))  # its partner had to go
    crowded.retire(1)
    assert reasons(crowded) == {ENGINE: {"evicted": 20, "only_rollout": 20}, TRAINER: {"evicted": 10}}


def test_what_was_not_compared_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Join()
    short.add(left(ENGINE, "a", [1, 2, 3]))
    short.add(left(TRAINER, "b", [1, 2, 4]))
    short.retire(1)
    assert reasons(short) == {ENGINE: {"unknown": 3}, TRAINER: {"unknown": 3}}
    alike = Join()  # more begin as it does than are tried
    for name in "abcdefghijklmnopq":
        alike.add(left(ENGINE, name, [*IDS[:4], *[ord(name)] * 16]))
    alike.add(left(TRAINER, "z", [*IDS[:4], *[7] * 16]))
    alike.retire(1)
    assert reasons(alike)[TRAINER] == {"unknown": 20}
    monkeypatch.setattr("isoexec.daemon.unpaired._COMPARED", 1)
    monkeypatch.setattr("isoexec.daemon.unpaired._EXPLAINED", 1)
    many = Join()
    for name in "abc":
        many.add(left(ENGINE, name, [ord(name)] * 5))
    many.add(left(TRAINER, "z", [7] * 5))
    many.retire(1)
    # one of three was compared with all that the trainer has left, which has been compared with one of three
    assert reasons(many) == {ENGINE: {"only_rollout": 5, "unknown": 10}, TRAINER: {"unknown": 5}}
