# SPDX-License-Identifier: Apache-2.0
"""The daemon's actor without Ray: what its calls do to a real daemon. On real Ray: tests/probes/test_ray.py."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoexec.contracts import wire
from isoexec.contracts.errors import WireError
from isoexec.contracts.halting import LeaseState
from isoexec.contracts.ray import RayError, RayName, joined
from isoexec.contracts.shards import Standing
from isoexec.daemon.config import ConfigError
from isoexec.daemon.journal import JournalError
from isoexec.daemon.ray_actor import DaemonActor, launch

SOURCE = "host:1:engine0"
TOKENS = 40_000
FIELDS: dict[type[wire.Message], dict[str, Any]] = {
    wire.Hello: {"regime": "bitwise", "monitor_only": True, "rank": 0},
    wire.Probe: {"sent": 0, "dropped": 0},
    wire.Logprobs: {
        "case": "engine_decode",
        "step": 0,
        "weight_version": 0,
        "digests": np.zeros((1, 16), "|u1"),
        "lengths": np.full(1, TOKENS, "<i4"),
        "starts": np.zeros(1, "<i4"),
        "logprobs": np.zeros(TOKENS, "<f4"),
        "tokens": np.zeros(TOKENS, "<i4"),
    },
}


def frame(kind: type[wire.Message], seq: int, source: str = SOURCE, **fields: Any) -> bytes:
    whole = FIELDS[kind] | fields
    message = kind(run="r", role="engine", source=source, seq=seq, time=time.time(), **whole)
    return b"".join(wire.encode_frame(message))


def with_actor(path: Path, work: Callable[[DaemonActor], Awaitable[None]], **settings: Any) -> None:
    async def whole() -> None:
        actor = DaemonActor({"state_dir": str(path), "http_port": 0, **settings})
        try:
            async with asyncio.timeout(30):
                await work(actor)
        finally:
            await actor.close()

    asyncio.run(whole())


async def greeted(actor: DaemonActor, seq: int = 0) -> None:
    (welcome,) = wire.FrameReader().feed(await actor.greet(SOURCE, frame(wire.Hello, seq)))
    assert isinstance(welcome, wire.Welcome)
    assert welcome.accepted, welcome.message


async def heard(actor: DaemonActor, count: int, lost: int = 0) -> None:
    """Wait for so many messages of the process, and see that no more come."""
    assert actor._running is not None
    process = actor._running.service.runs["r"].processes[SOURCE]
    while process.received < count:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert (process.received, process.lost) == (count, lost)


def test_a_frame_whose_answer_was_late_is_taken_once_and_a_process_is_known_by_its_hello(
    tmp_path: Path,
) -> None:
    async def work(actor: DaemonActor) -> None:
        assert not await actor.take(SOURCE, 1, frame(wire.Probe, 1))
        await greeted(actor)
        assert await actor.take(SOURCE, 1, frame(wire.Probe, 1))
        assert await actor.take(SOURCE, 2, frame(wire.Probe, 2))
        assert await actor.take(SOURCE, 2, frame(wire.Probe, 2))
        await heard(actor, 3)
        before = actor._lines[SOURCE].task
        await greeted(actor, 3)  # it gave the answer up, and says hello again
        assert before is not None
        await before
        assert await actor.take(SOURCE, 2, frame(wire.Probe, 2))
        await heard(actor, 4)
        await greeted(actor, 0)  # another process of the same name: its numbers begin anew
        assert await actor.take(SOURCE, 2, frame(wire.Probe, 2))
        await heard(actor, 2, lost=1)
        with pytest.raises(WireError, match="wanted one hello of host:2"):
            await actor.greet("host:2", frame(wire.Hello, 0))

    with_actor(tmp_path, work)


def test_what_is_no_frame_ends_the_calls_of_its_process_and_of_no_other(tmp_path: Path) -> None:
    async def work(actor: DaemonActor) -> None:
        await greeted(actor)
        await actor.greet("other", frame(wire.Hello, 0, "other", replica="b"))
        assert await actor.take(SOURCE, 1, b"\xff" * 64)
        while SOURCE in actor._lines:
            await asyncio.sleep(0.01)
        assert not await actor.take(SOURCE, 2, frame(wire.Probe, 2))
        assert await actor.take("other", 1, frame(wire.Probe, 1, "other"))
        assert not actor._lines["other"].over

    with_actor(tmp_path, work)


def test_a_process_that_says_much_waits_for_the_daemon_to_read_it(tmp_path: Path) -> None:
    async def work(actor: DaemonActor) -> None:
        await greeted(actor)
        calls = [
            asyncio.ensure_future(actor.take(SOURCE, seq, frame(wire.Logprobs, seq))) for seq in range(1, 41)
        ]
        await asyncio.sleep(0)
        assert not actor._lines[SOURCE].room.is_set()
        assert sum(call.done() for call in calls) < 10
        assert all(await asyncio.gather(*calls))
        await heard(actor, 41)

    with_actor(tmp_path, work)


def test_a_run_stands_as_it_did_while_its_processes_find_the_actor_that_was_started_again(
    tmp_path: Path,
) -> None:
    async def first(actor: DaemonActor) -> None:
        assert await actor.standing("r") is None
        await greeted(actor)
        raw = await actor.standing("r")
        assert raw is not None
        assert Standing.decode(raw).state is LeaseState.OK

    async def second(actor: DaemonActor) -> None:
        raw = await actor.standing("r")
        assert raw is not None
        assert Standing.decode(raw).state is LeaseState.OK
        assert not await actor.take(SOURCE, 1, frame(wire.Probe, 1))
        await greeted(actor, 2)
        keeper = actor._running.service.keeper  # type: ignore[union-attr]
        for task in actor._running.service._tasks:  # type: ignore[union-attr]
            task.cancel()
        keeper._alive_at -= 60.0  # a loop that answers calls and judges nothing
        raw = await actor.standing("r")
        assert raw is not None
        assert Standing.decode(raw).state is LeaseState.UNKNOWN

    with_actor(tmp_path, first)
    with_actor(tmp_path, second)


def test_a_daemon_that_cannot_start_gives_back_what_it_held_and_starts_when_it_can(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").mkdir(parents=True)

    async def work(actor: DaemonActor) -> None:
        for _ in range(2):
            with pytest.raises(JournalError, match="cannot be opened"):
                await actor.standing("r")
        (tmp_path / "journal.sqlite").rmdir()
        assert await actor.standing("r") is None
        with pytest.raises(ConfigError, match="http_port: wanted 1, and the actor that is there has 0"):
            await actor.start({"state_dir": str(tmp_path), "http_port": 1})

    with_actor(tmp_path, work)


def test_an_actor_is_no_shard() -> None:
    with pytest.raises(ConfigError, match="an actor is a whole daemon"):
        DaemonActor({"state_dir": "/x", "nats": "nats://h"})


@pytest.mark.parametrize(
    "text", ["ray://10.0.0.1:10001", "ray://a", "ray://a/b/c", "ray:/a/b", "ray://a/", "ray://a/b c"]
)
def test_an_address_that_names_no_actor_is_refused(text: str) -> None:
    with pytest.raises(RayError, match="ISOEXEC_DAEMON: wanted ray://NAMESPACE/NAME"):
        RayName.parse(text, "ISOEXEC_DAEMON")
    assert str(RayName.parse("ray://a.b/c-d", "x")) == "ray://a.b/c-d"


def test_where_ray_is_missing_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayError, match=r"pip install 'isoexec\[ray\]'"):
        joined(RayName(namespace="a", name="b"))
    with pytest.raises(RayError, match=r"pip install 'isoexec\[ray\]'"):
        launch("ray://a/b", state_dir=tmp_path)
