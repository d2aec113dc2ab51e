# SPDX-License-Identifier: Apache-2.0
"""A guard on another host reads the verdict from the daemon's bucket on a real nats-server, and halts as it does by a page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts.broker import Broker
from isoexec.contracts.errors import HaltedError
from isoexec.contracts.halting import LeaseError, LeaseState
from isoexec.contracts.shards import Standing, verdict_key
from isoexec.probes import verdicts
from isoexec.probes.client import ProbeSettings
from isoexec.probes.guard import Guard


def say(broker: Broker, standing: Standing) -> None:
    """Be the leader of the shards, once."""

    async def put() -> None:
        client = await broker.connect("test", 30)
        bucket = await client.jetstream().create_key_value(bucket=broker.name)
        await bucket.put(verdict_key("r"), standing.encode())
        await client.close()

    asyncio.run(put())


def test_a_verdict_in_the_bucket_halts_and_one_that_nobody_renews_is_unknown(
    nats_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = nats_server()
    broker = Broker(host="127.0.0.1", port=server.port, name="t")
    settings = [
        ProbeSettings(run="r", state_dir=tmp_path / policy, policy=policy, address=broker)
        for policy in ("fail_open", "fail_closed")
    ]
    monkeypatch.setattr(verdicts, "_FIRST_SECONDS", 0.3)
    with pytest.raises(LeaseError, match="has this run said hello"):
        Guard(settings[0])
    monkeypatch.setattr(verdicts, "_FIRST_SECONDS", 60.0)
    monkeypatch.setattr(verdicts, "TTL_SECONDS", 600.0)
    say(broker, Standing(state=LeaseState.WARN))
    open_, closed = (Guard(one) for one in settings)
    for guard in (open_, closed):
        guard.check(1)
    server.kill()
    monkeypatch.setattr(verdicts, "TTL_SECONDS", 0.0)  # whatever was read last is too old by now
    open_.check(2)
    with pytest.raises(HaltedError, match="stopped renewing") as lost:
        closed.check(2)
    assert lost.value.marker.rule == "lease_lost"  # type: ignore[attr-defined]
    server.start()
    monkeypatch.setattr(verdicts, "TTL_SECONDS", 600.0)
    say(broker, Standing(state=LeaseState.HALT, rule="topology", cause="TP is 1 (shard 1)"))

    def told() -> bool:
        return open_._page.read().state is LeaseState.HALT

    for _ in range(600):
        if told():
            break
        asyncio.run(asyncio.sleep(0.1))
    saved: list[int] = []
    with pytest.raises(HaltedError, match=r"TP is 1 \(shard 1\)"):
        open_.check(3, checkpoint=lambda: saved.append(3))
    assert saved == [3]
    with pytest.raises(HaltedError, match="TP is 1"):
        Guard(settings[0])
