# SPDX-License-Identifier: Apache-2.0
"""Sending never makes a step wait, and every loss is counted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoexec.contracts import wire
from isoexec.contracts.errors import HandshakeError, WireError
from isoexec.probes import client as client_module
from isoexec.probes.client import Client, ProbeSettings
from isoexec.probes.logprobs import LogprobTap, ScoredSequence, from_packed, from_padded
from isoexec.probes.pairing import sequence_digest
from isoexec.probes.timing import StepTimer


def settings(path: Path) -> ProbeSettings:
    return ProbeSettings(run="r", state_dir=path)


def test_messages_arrive_in_order_and_numbered_without_a_gap(tmp_path: Path, listener: Any) -> None:
    client = Client(settings(tmp_path), "trainer")
    assert client.connect().accepted
    for step in range(50):
        assert client.send(wire.Step, step=step, seconds={"step": 0.5})
    client.close()
    found = listener.wait(wire.Bye) and listener.messages
    assert [m.seq for m in found] == list(range(len(found)))
    assert [m.step for m in found if isinstance(m, wire.Step)] == list(range(50))


def test_a_refused_process_learns_which_fields_differ(tmp_path: Path, listener: Any) -> None:
    listener.accept = False
    with pytest.raises(HandshakeError, match=r"composition\.x"):
        Client(settings(tmp_path), "engine").connect()


def test_no_daemon_is_an_error_and_not_a_silent_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No such file|refused"):
        Client(settings(tmp_path), "engine").connect(timeout=0.3)


def test_a_stalled_daemon_costs_a_step_nothing_and_drops_are_counted(tmp_path: Path, listener: Any) -> None:
    client = Client(settings(tmp_path), "engine", capacity=8)
    client.connect()
    listener.stalled.set()
    big = np.zeros(1 << 16, "<f4")
    worst = 0.0
    for step in range(200):
        start = time.perf_counter()
        client.send(
            wire.Logprobs,
            case="engine_decode",
            step=step,
            weight_version=0,
            digests=np.zeros((1, 16), np.uint8),
            lengths=np.array([big.size], "<i4"),
            starts=np.array([0], "<i4"),
            logprobs=big,
            tokens=np.zeros(big.size, "<i4"),
        )
        worst = max(worst, time.perf_counter() - start)
    stats = client.stats
    assert stats.dropped > 100
    assert worst < 0.05  # an order above what a busy machine's scheduler costs; a blocked send waits for ever


def test_a_bad_field_is_refused_at_the_call_and_leaves_no_gap(tmp_path: Path, listener: Any) -> None:
    client = Client(settings(tmp_path), "engine")
    client.connect()
    with pytest.raises(WireError, match="step"):
        client.send(wire.Step, step="three")
    client.send(wire.Step, step=3)
    client.close()
    assert [m.seq for m in listener.wait(wire.Step)] == [1]


def test_the_client_comes_back_when_the_daemon_does(tmp_path: Path, listener: Any) -> None:
    client = Client(settings(tmp_path), "engine")
    client.connect()
    client._link.lost()  # the connection is gone under the thread
    assert client.send(wire.Step, step=1)
    assert [m.step for m in listener.wait(wire.Step)] == [1]
    assert len(listener.wait(wire.Hello, 2)) == 2


def test_a_tap_names_sequences_by_content_and_keeps_the_bits(tmp_path: Path, listener: Any) -> None:
    client = Client(settings(tmp_path), "engine")
    client.connect()
    values = np.array([-0.1, -2.5, -1e-9], np.float32)
    tap = LogprobTap(client)
    sent = tap.record(
        "engine_decode",
        [ScoredSequence(prompt=[1, 2], response=[7, 8, 9], logprobs=values)],
        step=4,
        weight_version=2,
    )
    (message,) = listener.wait(wire.Logprobs)
    assert sent == 3
    assert bytes(message.digests[0]) == sequence_digest([1, 2, 7, 8, 9])
    assert message.starts.tolist() == [2]
    assert np.array_equal(message.logprobs.view(np.int32), values.view(np.int32))


def test_ids_may_be_lists_or_arrays_of_any_width(tmp_path: Path, listener: Any) -> None:
    client = Client(settings(tmp_path), "engine")
    client.connect()
    tap = LogprobTap(client)
    lists = [([1, 2], [7, 8, 9]), ([], [5]), ([3], []), ([4, 5], [6, 7])]
    widths = [np.int32, np.uint64, np.int64, np.int16]
    for as_arrays in (False, True):
        rows = [
            ScoredSequence(
                prompt=np.array(p, width) if as_arrays else p,  # type: ignore[arg-type]
                response=np.array(r, width) if as_arrays else r,  # type: ignore[arg-type]
                logprobs=np.arange(len(r), dtype=np.float32),
            )
            for (p, r), width in zip(lists, widths, strict=True)
        ]
        assert tap.record("engine_decode", rows, step=0, weight_version=0) == 6
    first, second = listener.wait(wire.Logprobs, 2)
    for name, array in first.arrays().items():
        assert np.array_equal(array, second.arrays()[name]), name
    assert [bytes(digest) for digest in first.digests] == [sequence_digest([*p, *r]) for p, r in lists]
    assert first.tokens.tolist() == [7, 8, 9, 5, 6, 7]
    with pytest.raises(ValueError, match="token ids must be in"):
        tap.record(
            "engine_decode",
            [ScoredSequence(prompt=[1 << 31], response=[2], logprobs=np.zeros(1, np.float32))],
            step=0,
            weight_version=0,
        )


def test_both_sides_of_a_job_send_the_same_sample(tmp_path: Path, listener: Any) -> None:
    taps = {}
    for role in ("engine", "trainer"):
        client = Client(settings(tmp_path), role)
        client.connect()
        taps[role] = LogprobTap(client, one_in=3)
    rows = [[1, i, i + 1, i + 2] for i in range(40)]
    engine = [ScoredSequence(prompt=r[:2], response=r[2:], logprobs=np.zeros(2, np.float32)) for r in rows]
    trainer = from_padded(np.array(rows), np.zeros((40, 4), np.float32), [2] * 40, [4] * 40)
    assert taps["engine"].record("engine_decode", engine, step=0, weight_version=0) == taps["trainer"].record(
        "trainer_score", trainer, step=0, weight_version=0
    )
    first, second = listener.wait(wire.Logprobs, 2)
    assert 0 < len(first.digests) < 40
    assert np.array_equal(first.digests, second.digests)


def test_what_is_known_of_a_sequence_goes_with_it_and_the_rest_is_left_out(
    tmp_path: Path, listener: Any
) -> None:
    client = Client(settings(tmp_path), "trainer")
    client.connect()
    values = np.arange(7, dtype=np.float32)
    packed = from_packed(np.arange(7), values, [1, 2], [0, 3, 7])
    assert [(s.prompt, s.response, s.logprobs.tolist()) for s in packed] == [
        ([0], [1, 2], [1.0, 2.0]),
        ([3, 4], [5, 6], [5.0, 6.0]),
    ]
    bare = ScoredSequence(prompt=[1], response=[2], logprobs=np.zeros(1, np.float32))
    LogprobTap(client).record("trainer_score", [*packed, bare], step=0, weight_version=0)
    (message,) = listener.wait(wire.Logprobs)
    assert message.pack_index.tolist() == [0, 1, -1]
    assert message.prefix_hit is None
    assert message.padding is None
    for edges, prompts in (([1, 3, 7], [1, 2]), ([0, 3, 8], [1, 2]), ([0, 5, 3], [1, 2]), ([0, 3, 7], [1])):
        with pytest.raises(ValueError, match="wanted"):
            from_packed(np.arange(7), values, prompts, edges)


def test_logprobs_of_another_dtype_or_length_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        ScoredSequence(prompt=[1], response=[2], logprobs=np.zeros(1, np.float64))
    with pytest.raises(ValueError, match=r"\[2\]"):
        ScoredSequence(prompt=[1], response=[2, 3], logprobs=np.zeros(1, np.float32))


def test_weights_too_many_for_one_header_are_sent_in_several_and_none_is_lost(
    tmp_path: Path, listener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_TENSORS_A_MESSAGE", 3)
    client = Client(settings(tmp_path), "engine")
    client.connect()
    names = [f"layer.{i}" for i in range(7)]
    counts = dict.fromkeys(names, 1)
    digests = {name: (i, i + 1) for i, name in enumerate(names)}
    assert client.send_weights(
        weight_version=2, step=1, tensors=digests, numel=counts, total=counts, zero=["layer.4"], unknown=["u"]
    )
    parts = listener.wait(wire.Weights, 3)
    assert [len(p.tensors) for p in parts] == [3, 3, 1]
    assert {n: tuple(w) for p in parts for n, w in p.tensors.items()} == digests
    assert [tuple(p.zero) for p in parts] == [(), ("layer.4",), ()]
    assert [tuple(p.unknown) for p in parts] == [("u",), (), ()]
    assert client.send_weights(weight_version=3, step=2, tensors={}, numel={}, total={}, unknown=["all"])
    assert listener.wait(wire.Weights, 4)[-1].unknown == ["all"]


def test_step_times_are_sent_by_phase(tmp_path: Path, listener: Any) -> None:
    client = Client(settings(tmp_path), "driver")
    client.connect()
    timer = StepTimer()
    with timer.phase("generation"):
        time.sleep(0.01)
    sent = timer.send(client, step=0, weight_version=0, values={"reward": 0.5})
    (message,) = listener.wait(wire.Step)
    assert message.seconds == sent
    assert 0.01 <= sent["generation"] <= sent["step"]
