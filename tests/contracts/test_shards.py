# SPDX-License-Identifier: Apache-2.0
"""Both sides of a sequence meet at one shard, and of what the shards say the worst wins."""

from __future__ import annotations

import numpy as np
import pytest

from isoexec.contracts.broker import Broker, BrokerError
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.halting import LeaseState, Policy
from isoexec.contracts.shards import TTL_SECONDS, ShardWord, Standing, join, parts_of, shard_of
from isoexec.contracts.wire import Logprobs


def message(n: int, case: str = "engine_decode") -> Logprobs:
    rng = np.random.default_rng(n)
    lengths = rng.integers(0, 9, n).astype("<i4")
    total = int(lengths.sum())
    return Logprobs(
        run="r",
        role="engine" if case.startswith("engine") else "trainer",
        source="s",
        seq=7,
        case=case,
        step=3,
        weight_version=1,
        digests=rng.integers(0, 256, (n, 16)).astype("|u1"),
        lengths=lengths,
        starts=np.arange(n, dtype="<i4"),
        logprobs=rng.standard_normal(total).astype("<f4"),
        tokens=np.arange(total, dtype="<i4"),
        prefix_hit=np.arange(n, dtype="<i4"),
    )


def sequences(part: Logprobs) -> list[tuple[bytes, int, bytes, bytes]]:
    ends = np.cumsum(part.lengths)
    return [
        (d.tobytes(), int(s), part.logprobs[e - n : e].tobytes(), part.tokens[e - n : e].tobytes())
        for d, s, e, n in zip(part.digests, part.starts, ends, part.lengths, strict=True)
    ]


def test_each_sequence_goes_whole_to_the_shard_of_its_digest_and_every_shard_hears_of_the_message() -> None:
    whole = message(200)
    parts = parts_of(whole, 4)
    owners = shard_of(whole.digests, 4)
    assert [part.seq for part in parts] == [7] * 4
    assert [part.prefix_hit.tolist() for part in parts] == [part.starts.tolist() for part in parts]  # type: ignore[union-attr]
    for shard, part in enumerate(parts):
        assert sequences(part) == [
            one for one, at in zip(sequences(whole), owners, strict=True) if at == shard
        ]
    empty = parts_of(message(0), 3)
    assert [len(part.digests) for part in empty] == [0, 0, 0]


def test_what_is_sampled_by_the_digest_is_spread_over_the_shards() -> None:
    digests = np.random.default_rng(0).integers(0, 256, (8000, 16)).astype("|u1")
    sampled = digests[digests[:, 7] % 4 == 0]  # one in four, as probes.pairing.sampled takes them
    counts = np.bincount(shard_of(sampled, 4), minlength=4)
    assert counts.min() > 0.2 * len(sampled)


def word(state: LeaseState, **fields: object) -> ShardWord:
    return ShardWord.decode(ShardWord(boot="b", runs={"r": Standing(state=state, **fields)}).encode())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("states", "joined"),
    [
        ([LeaseState.OK, LeaseState.OK], LeaseState.OK),
        ([LeaseState.WARN, LeaseState.OK], LeaseState.WARN),
        ([LeaseState.WARN, LeaseState.UNKNOWN], LeaseState.UNKNOWN),
        ([LeaseState.UNKNOWN, LeaseState.HALT], LeaseState.HALT),
    ],
)
def test_the_worst_of_the_shards_wins(states: list[LeaseState], joined: LeaseState) -> None:
    words = {i: (word(state, cause="why"), 0.0) for i, state in enumerate(states)}
    found = join(words, 2)["r"]
    assert found.state is joined
    assert found.cause == f"why (shard {states.index(joined)})"


def test_a_shard_that_is_missing_old_or_unaware_leaves_the_run_unknown_and_the_policy_stands() -> None:
    fine = (word(LeaseState.OK, policy=Policy.FAIL_CLOSED), 0.0)
    old = (word(LeaseState.OK), TTL_SECONDS + 0.1)
    for words, rule in (
        ({0: fine}, "shard_silent"),
        ({0: fine, 1: old}, "shard_silent"),
        ({0: fine, 1: (ShardWord(boot="c"), 0.0)}, "shard_unaware"),
    ):
        found = join(words, 2)["r"]
        assert (found.state, found.rule, found.policy) == (LeaseState.UNKNOWN, rule, Policy.FAIL_CLOSED)
        assert "shard 1 of 2" in found.cause


def test_a_shard_that_said_halt_and_fell_silent_still_says_halt() -> None:
    words = {0: (word(LeaseState.OK), 0.0), 1: (word(LeaseState.HALT, rule="topology"), 1000.0)}
    assert join(words, 2)["r"].rule == "topology"


def test_what_is_no_word_of_a_shard_is_said() -> None:
    for raw in (
        b"",
        b"[]",
        b'{"boot": "b", "runs": {"r": {}}}',
        b'{"boot": "b", "runs": {"r": {"state": "GOOD"}}}',
    ):
        with pytest.raises(IsoExecError, match="what a shard says"):
            ShardWord.decode(raw)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("http://h:1", "wanted nats://"),
        ("nats://user:secret@h:1", "credentials in files"),
        ("nats://h:x", "wanted nats://"),
        ("nats://h/a.b", "wanted a NAME"),
        ("nats+tls://h", "go together"),
    ],
)
def test_an_address_that_does_not_fit_is_refused_and_no_secret_repeated(text: str, says: str) -> None:
    with pytest.raises(BrokerError, match=says) as refused:
        Broker.parse(text, "ISOEXEC_DAEMON", token=None, user=None, authority=None)
    assert "secret" not in str(refused.value)
