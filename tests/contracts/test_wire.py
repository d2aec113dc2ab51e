# SPDX-License-Identifier: Apache-2.0
"""Frames: what goes in comes out bit for bit however the stream is cut; nothing malformed gets through."""

from __future__ import annotations

import itertools
import os
import stat
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoexec.contracts import sockets, wire
from isoexec.contracts.errors import WireError


def logprobs(lengths: tuple[int, ...] = (3, 0, 2), seed: int = 0, **changes: Any) -> wire.Logprobs:
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    bits = rng.integers(0, 2**32, total, dtype=np.uint32)  # NaN payloads, infinities and -0.0 among them
    fields: dict[str, Any] = {
        "run": "r",
        "role": "engine",
        "source": "h:1:0",
        "case": "engine_decode",
        "step": 1,
        "weight_version": 2,
        "digests": rng.integers(0, 256, (len(lengths), 16), dtype=np.uint8),
        "lengths": np.asarray(lengths, np.int32),
        "starts": np.asarray([7] * len(lengths), np.int32),
        "logprobs": bits.view(np.float32),
        "tokens": rng.integers(0, 1000, total).astype(np.int32),
    }
    return wire.Logprobs(**{**fields, **changes})


def one_of_each() -> list[wire.Message]:
    who: dict[str, Any] = {"run": "r", "role": "trainer", "source": "host:12:0", "seq": 3, "time": 1.5}
    return [
        wire.Hello(**who, regime="bitwise", monitor_only=False, contract={"a": [1, {"b": None}]}, pid=12),
        wire.Welcome(
            **{**who, "role": "daemon"}, accepted=False, differences=(("a.b", 1, None),), message="no"
        ),
        wire.Attestation(
            **who,
            reason="sync",
            step=4,
            weight_version=4,
            topology={"TP": 2},
            environment={"torch": "2.13"},
            regions={"norm": {"ok": True, "canary": None}},
        ),
        logprobs(),
        logprobs(prefix_hit=np.asarray([0, 16, -1], np.int32)),
        wire.Weights(
            **who,
            weight_version=1,
            step=1,
            tensors={"w": (2**64 - 1, 5)},
            numel={"w": 4},
            total={"w": 8},
            unknown=("v",),
        ),
        wire.Step(**who, step=1, seconds={"step": 0.5}, values={"loss": float("nan")}),
        wire.Probe(**who, sent=1, dropped=2, bytes=3, probe_seconds=0.25),
        wire.Bye(**who),
    ]


def frame(message: wire.Message) -> bytes:
    return b"".join(bytes(part) for part in wire.encode_frame(message))


def raw(header: Any, body: bytes = b"", *, magic: bytes = b"IXF1", header_len: int | None = None) -> bytes:
    packed = msgpack.packb(header)
    return (
        struct.pack("<4sII", magic, len(packed) if header_len is None else header_len, len(body))
        + packed
        + body
    )


def assert_same(a: wire.Message, b: wire.Message) -> None:
    assert type(a) is type(b)
    assert msgpack.packb(a.header()) == msgpack.packb(b.header())
    for name, array in a.arrays().items():
        other = b.arrays()[name]
        assert array.dtype == other.dtype
        assert array.shape == other.shape
        assert array.tobytes() == other.tobytes()


def test_every_message_comes_back_with_the_same_bits() -> None:
    sent = one_of_each()
    assert {message.TYPE for message in sent} == set(wire.MESSAGES)
    got = wire.FrameReader().feed(b"".join(frame(message) for message in sent))
    assert len(got) == len(sent)
    for a, b in zip(sent, got, strict=True):
        assert_same(a, b)


def test_a_golden_frame_keeps_its_bytes() -> None:
    message = wire.Bye(run="r", role="driver", source="h:1:0", seq=7, time=0.5)
    assert frame(message).hex() == (
        "495846313f00000000000000"
        "87a474797065a3627965a17601a372756ea172a4726f6c65a6647269766572a6736f75726365a5683a313a30a373657107"
        "a474696d65cb3fe0000000000000"
    )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=4),
    st.lists(st.integers(0, 2000), max_size=12),
)
def test_any_split_of_the_stream_gives_the_same_messages(
    batches: list[tuple[int, ...]], cuts: list[int]
) -> None:
    sent = [logprobs(lengths, seed) for seed, lengths in enumerate(batches)]
    stream = b"".join(frame(message) for message in sent)
    edges = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    reader = wire.FrameReader()
    got: list[wire.Message] = []
    for first, last in itertools.pairwise(edges):
        got += reader.feed(stream[first:last])
    assert reader.pending == 0
    assert len(got) == len(sent)
    for a, b in zip(sent, got, strict=True):
        assert_same(a, b)


def test_one_byte_at_a_time_is_a_split_too() -> None:
    reader = wire.FrameReader()
    stream = frame(logprobs())
    got = [message for at in range(len(stream)) for message in reader.feed(stream[at : at + 1])]
    assert len(got) == 1
    assert_same(got[0], logprobs())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_never_escapes_as_another_error(at: int, mask: int) -> None:
    stream = bytearray(frame(logprobs()))
    stream[at % len(stream)] ^= mask
    reader = wire.FrameReader()
    try:
        reader.feed(stream)
    except WireError:
        with pytest.raises(WireError):
            reader.feed(b"")


HEADER = one_of_each()[-1].header()


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (b"GET / HTTP/1.1\r\n", "magic"),
        (b"I", None),
        (raw(HEADER, magic=b"IXF2"), "magic"),
        (raw(HEADER, header_len=wire.HEADER_LIMIT + 1), "admitted"),
        (struct.pack("<4sII", b"IXF1", 1, wire.BODY_LIMIT + 1), "admitted"),
        (raw([1, 2]), "wanted a map"),
        (raw({**HEADER, "v": 2}), "header.v"),
        (raw({**HEADER, "type": "exec"}), "header.type"),
        (raw({**HEADER, "type": ["bye"]}), "header.type"),
        (raw({**HEADER, "extra": 1}), "unknown field"),
        (raw({k: v for k, v in HEADER.items() if k != "run"}), "missing"),
        (raw({**HEADER, "role": "root"}), "bye.role"),
        (raw({**HEADER, "seq": -1}), "bye.seq"),
        (raw({**HEADER, "time": float("nan")}), "bye.time"),
        (raw(HEADER, b"rest"), "arrays need 0 bytes"),
        (raw({**HEADER, "arrays": [["logprobs", "<f4", [1]]]}, b"\0" * 4), "not an array of this message"),
        (struct.pack("<4sII", b"IXF1", 2, 0) + b"\xc1\xc1", "msgpack"),
    ],
)
def test_a_malformed_frame_is_refused_with_what_was_wanted(stream: bytes, says: str | None) -> None:
    reader = wire.FrameReader()
    if says is None:
        assert reader.feed(stream) == []
        return
    with pytest.raises(WireError, match=says):
        reader.feed(stream)


@pytest.mark.parametrize(
    "arrays",
    [
        {"arrays": 3},
        {"arrays": [["logprobs", "|O8", [5]]]},
        {"arrays": [["logprobs", "<f4", [-1]]]},
        {"arrays": [["logprobs", "<f4", [2**62, 2**62]]]},
        {"arrays": [["logprobs", "<f4", [5]], ["logprobs", "<f4", [5]]]},
    ],
)
def test_array_descriptions_cannot_reach_outside_the_body(arrays: dict[str, Any]) -> None:
    header = {**logprobs().header(), **arrays}
    with pytest.raises(WireError):
        wire.FrameReader().feed(raw(header, b"\0" * 40))


def test_messages_before_a_malformed_frame_are_delivered() -> None:
    reader = wire.FrameReader()
    got: list[wire.Message] = []
    with pytest.raises(WireError):
        got.extend(reader.feed_each(frame(one_of_each()[-1]) + b"nonsense"))
    assert [message.TYPE for message in got] == ["bye"]


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": np.zeros(5, np.float64)},
        {"logprobs": np.zeros(4, np.float32)},
        {"digests": np.zeros((3, 8), np.uint8)},
        {"starts": np.zeros(2, np.int32)},
        {"lengths": np.asarray([-1, 4, 2], np.int32)},
        {"prefix_hit": np.asarray([0, 1], np.int32)},
        {"pack_index": np.asarray([0, 1, -2], np.int32)},
        {"padding": np.zeros(3, np.int64)},
        {"case": "somewhere"},
        {"step": True},
    ],
)
def test_a_message_that_does_not_fit_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        logprobs(**changes)


def test_an_oversized_message_is_refused_by_the_sender() -> None:
    big = wire.Hello(
        run="r", role="driver", source="s", regime="x", monitor_only=True, contract={"a": "x" * 2**20}
    )
    with pytest.raises(WireError, match="several messages"):
        wire.encode_frame(big)


def test_the_socket_is_private_and_works_under_a_long_path(tmp_path: Path) -> None:
    state = tmp_path / ("x" * 120)
    state.mkdir()
    with sockets.listen(state) as server, sockets.connect(state) as client:
        other, _ = server.accept()
        with other:
            client.sendmsg(wire.encode_frame(one_of_each()[-1]))
            assert [m.TYPE for m in wire.FrameReader().feed(other.recv(4096))] == ["bye"]
    assert stat.S_IMODE((state / "isoexec.sock").stat().st_mode) == 0o600
    fds = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(OSError, match="refused"):
        sockets.connect(state)
    assert len(os.listdir("/proc/self/fd")) == fds  # noqa: PTH208
