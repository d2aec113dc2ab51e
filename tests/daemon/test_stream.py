# SPDX-License-Identifier: Apache-2.0
"""Shards behind a real nats-server: whatever is killed, every token that was published is paired, unpaired or in a drop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from isoexec.contracts import wire
from isoexec.contracts.broker import Broker, BrokerError
from isoexec.contracts.cli_halting import clear, halt
from isoexec.contracts.halting import LeaseState
from isoexec.contracts.shards import LEADER_KEY, TTL_SECONDS, Standing, verdict_key
from isoexec.daemon.cli import status
from isoexec.daemon.config import Config
from isoexec.daemon.jetstream import make_stream
from isoexec.daemon.joint import Joint, ShardTakenError
from isoexec.daemon.metrics import Metrics
from isoexec.daemon.stream import Stream
from isoexec.probes.client import Client, ProbeSettings
from isoexec.probes.verdicts import NatsVerdict

RUN = "job.1"
ROWS, LENGTH = 24, 4
CASES = {"engine": "engine_decode", "trainer": "trainer_score"}


def broker(server: Any, **credentials: Any) -> Broker:
    return Broker(host="127.0.0.1", port=server.port, name="t", **credentials)


def batch(step: int, only: slice = slice(None)) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 1000, (ROWS, LENGTH), dtype="<i4")[only]
    return {
        "digests": np.frombuffer(
            b"".join(xxhash.xxh3_128_digest(row.tobytes()) for row in ids), "|u1"
        ).reshape(-1, 16),
        "lengths": np.full(len(ids), LENGTH, "<i4"),
        "starts": np.zeros(len(ids), "<i4"),
        "logprobs": -rng.random(ids.size).astype("<f4"),
        "tokens": ids.reshape(-1),
    }


class Job:
    """An engine and a trainer of one run."""

    def __init__(self, state: Path, address: Broker, **limits: Any) -> None:
        settings = ProbeSettings(run=RUN, state_dir=state, address=address)
        self.clients = {role: Client(settings, role, versions={}, **limits) for role in CASES}
        for client in self.clients.values():
            client.connect(timeout=120)

    def say(self, role: str, step: int, **part: Any) -> bool:
        return self.clients[role].send(
            wire.Logprobs, case=CASES[role], step=step, weight_version=step, **batch(step, **part)
        )

    def end(self, step: int) -> None:
        self.clients["trainer"].send(wire.Step, step=step, weight_version=step, seconds={"step": 1.0})

    def step(self, step: int) -> None:
        for role in CASES:
            self.say(role, step)
        self.end(step)

    def flush(self) -> None:
        assert all(client.flush(120) for client in self.clients.values())

    def close(self) -> None:
        for client in self.clients.values():
            client.close(60)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        for client in job.clients.values():
            client.close(0.1)


@pytest.fixture
def shard(start: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Start shard I of N behind a server."""

    def begin(server: Any, index: int, count: int, **settings: Any) -> Any:
        return start(
            tmp_path / f"shard{index}",
            nats=f"nats://127.0.0.1:{server.port}/t",
            shard=index,
            shards=count,
            **{"nats_ack_seconds": 3.0, "window_seconds": 60.0, "log": "json", **settings},
        )

    return begin


def totals(daemons: list[Any]) -> dict[str, Any]:
    """What the journals of all shards account for."""
    found: dict[str, Any] = {"paired": 0, "engine": 0, "trainer": 0, "dropped": [], "steps": []}
    for one in daemons:
        with contextlib.closing(sqlite3.connect(one.state.journal)) as database:
            windows = [json.loads(row[0]) for row in database.execute("SELECT data FROM windows ORDER BY id")]
        for window in windows:
            for pair in window["pairs"]:
                found["paired"] += pair["tokens"]
                for role, tokens in pair["unpaired"].items():
                    found[role] += tokens
        found["dropped"].append(sum(window["dropped"] for window in windows))
        found["steps"].append([window["step"] for window in windows])
    return found


def settled(daemons: list[Any], tokens: int, wait_until: Callable[..., Any]) -> dict[str, Any]:
    """The totals once as many engine tokens are in them."""
    wait_until(
        lambda: (found := totals(daemons))["paired"] + found["engine"] >= tokens,
        f"{tokens} tokens accounted for",
        90,
    )
    return totals(daemons)


def test_a_killed_shard_and_a_killed_server_lose_nothing_and_are_unknown_meanwhile(
    nats_server: Callable[..., Any],
    shard: Callable[..., Any],
    jobs: list[Job],
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    server = nats_server()
    daemons = [shard(server, index, 2) for index in range(2)]
    job = Job(tmp_path / "job", broker(server))
    jobs.append(job)
    job.step(0)
    job.flush()
    assert settled(daemons, ROWS * LENGTH, wait_until)["steps"] == [[0], [0]]
    verdict = NatsVerdict(broker(server), RUN)
    wait_until(verdict.fine, "a verdict that stands", 60)

    # one side of a step is with the shard as it dies, the other comes while it is dead
    job.say("engine", 1)
    job.flush()
    wait_until(lambda: daemons[1].metric("isoexec_stream_frames_held") >= 4, "the frame is held")
    daemons[1].kill()
    job.say("trainer", 1)
    job.end(1)
    job.flush()
    wait_until(lambda: verdict.read().state is LeaseState.UNKNOWN, "a missing shard", 60)
    assert verdict.read().rule == "shard_silent"
    assert not verdict.fine()
    daemons[1] = shard(server, 1, 2)
    assert settled(daemons, 2 * ROWS * LENGTH, wait_until)["steps"] == [[0, 1], [0, 1]]
    wait_until(verdict.fine, "the shard is heard again", 60)

    server.kill()
    job.step(2)
    wait_until(lambda: not verdict.read().alive, "a server that is gone", 60)
    server.start()
    job.flush()
    job.step(3)
    job.close()
    found = settled(daemons, 4 * ROWS * LENGTH, wait_until)
    assert found == {
        "paired": 4 * ROWS * LENGTH, "engine": 0, "trainer": 0, "dropped": [0, 0], "steps": [[0, 1, 2, 3]] * 2,
    }  # fmt: skip
    assert all(client.stats.dropped == 0 for client in job.clients.values())
    verdict.close()

    async def waiting() -> int:
        client = await broker(server).connect("test", 10)
        infos = [await client.jetstream().consumer_info("t", f"shard-{index}") for index in range(2)]
        await client.close()
        return sum((one.num_ack_pending or 0) + (one.num_pending or 0) for one in infos)

    wait_until(lambda: asyncio.run(waiting()) == 0, "every frame is acknowledged once its run is over", 60)


def test_frames_that_keep_coming_again_do_not_hold_up_new_ones_where_one_of_them_is_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a server that was killed, whose count of what is not acknowledged is older than what it has stored."""
    monkeypatch.setattr("isoexec.daemon.stream._AGAIN_SECONDS", 0.3)
    frames = [SimpleNamespace(metadata=SimpleNamespace(sequence=SimpleNamespace(stream=n))) for n in (5, 4)]

    class Subscription:
        async def fetch(self, _batch: int, timeout: float) -> list[Any]:
            await asyncio.sleep(min(0.05, timeout))
            return frames

    async def play() -> list[int]:
        taken: list[Any] = []
        async with asyncio.timeout(5):
            await Stream._again(SimpleNamespace(_take=taken.append), Subscription(), 3)  # type: ignore[arg-type]
        return [one.metadata.sequence.stream for one in taken]

    assert asyncio.run(play()) == [4, 5]


def test_what_came_late_outlives_a_daemon_that_dies_before_the_step_it_was_moved_to_is_judged(
    nats_server: Callable[..., Any],
    shard: Callable[..., Any],
    jobs: list[Job],
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    server = nats_server()
    daemon = shard(server, 0, 1)
    job = Job(tmp_path / "job", broker(server))
    jobs.append(job)
    half = ROWS // 2
    for role in CASES:
        job.say(role, 0, only=slice(half))
    job.end(0)
    job.flush()
    assert settled([daemon], half * LENGTH, wait_until)["steps"] == [[0]]
    for role in CASES:  # the other half, too late for step 0
        job.say(role, 0, only=slice(half, None))
    job.flush()
    job.say("engine", 3)  # what is late goes with it
    job.flush()
    job.step(2)
    job.flush()
    assert settled([daemon], (half + ROWS) * LENGTH, wait_until)["steps"] == [[0, 2]]

    async def pending() -> int:
        client = await broker(server).connect("test", 10)
        info = await client.jetstream().consumer_info("t", "shard-0")
        await client.close()
        return info.num_ack_pending or 0

    wait_until(
        lambda: asyncio.run(pending()) == daemon.metric("isoexec_stream_frames_held"), "acknowledgements", 30
    )
    daemon.kill()
    job.say("trainer", 3)
    job.end(3)
    job.flush()
    daemon = shard(server, 0, 1)
    found = settled([daemon], 3 * ROWS * LENGTH, wait_until)
    assert found == {
        "paired": 3 * ROWS * LENGTH,
        "engine": 0,
        "trainer": 0,
        "dropped": [0],
        "steps": [[0, 2, 3]],
    }


def test_a_full_stream_refuses_and_what_the_queue_then_drops_is_what_the_verdict_counts(
    nats_server: Callable[..., Any],
    shard: Callable[..., Any],
    jobs: list[Job],
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    server = nats_server()
    daemon = shard(server, 0, 1, nats_bytes=1 << 20, window_seconds=1.0)
    job = Job(tmp_path / "job", broker(server), capacity=2)
    jobs.append(job)
    daemon.process.send_signal(signal.SIGSTOP)
    ballast = np.zeros(60_000, "<f4")
    one = {
        "digests": np.ones((1, 16), "|u1"),
        "lengths": np.array([ballast.size], "<i4"),
        "starts": np.zeros(1, "<i4"),
    }
    worst, kept = 0.0, 0
    for step in range(12):
        begun = time.perf_counter()
        kept += job.clients["engine"].send(
            wire.Logprobs, case="engine_decode", step=step, weight_version=step, logprobs=ballast,
            tokens=np.zeros(ballast.size, "<i4"), **one,
        )  # fmt: skip
        worst = max(worst, time.perf_counter() - begun)
        time.sleep(0.05)
    dropped = job.clients["engine"].stats.dropped
    assert dropped == 12 - kept > 0
    assert worst < 1.0  # a blocked send would wait for the server for ever
    daemon.process.send_signal(signal.SIGCONT)
    job.flush()
    job.step(20)
    found = settled([daemon], kept * ballast.size + ROWS * LENGTH, wait_until)
    assert (found["paired"], found["engine"], found["dropped"]) == (
        ROWS * LENGTH,
        kept * ballast.size,
        [dropped],
    )


def test_who_holds_no_credential_and_who_takes_a_shard_that_is_taken_is_refused(
    nats_server: Callable[..., Any],
    shard: Callable[..., Any],
    jobs: list[Job],
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    secret, probe, wrong = (tmp_path / name for name in ("shard", "probe", "wrong"))
    for path, words in (
        (secret, "shard:0123456789abcdef"),
        (probe, "probe:0123456789abcdef"),
        (wrong, "probe:fedcba9876543210"),
    ):
        path.write_text(words + "\n")
        path.chmod(0o600)
    # what docs/security.md gives the job's user
    publish = [
        "t.frames.>",
        "$JS.API.STREAM.INFO.KV_t",
        "$JS.API.STREAM.MSG.GET.KV_t",
        "$JS.API.DIRECT.GET.KV_t.>",
    ]
    permissions = {"publish": publish, "subscribe": ["_INBOX.>"]}
    users = [
        {"user": "shard", "password": "0123456789abcdef"},
        {"user": "probe", "password": "0123456789abcdef", "permissions": permissions},
    ]
    server = nats_server(f"authorization: {json.dumps({'users': users})}")
    first = shard(server, 0, 1, nats_user=str(secret))
    with pytest.raises(BrokerError, match="refuses our credentials"):
        Job(tmp_path / "job", broker(server, user=wrong))
    job = Job(tmp_path / "job", broker(server, user=probe))
    jobs.append(job)
    job.step(0)
    job.flush()
    verdict = NatsVerdict(broker(server, user=probe), RUN)
    wait_until(verdict.fine, "a verdict that the job's user may read", 60)
    verdict.close()
    for index, count, says in ((0, 1, "another daemon speaks for shard 0"), (0, 2, "shards: ")):
        state = tmp_path / f"second{count}"
        state.mkdir()
        with pytest.raises(RuntimeError, match=says):
            type(first)(
                state,
                {
                    "nats": f"nats://127.0.0.1:{server.port}/t",
                    "nats_user": str(secret),
                    "shard": index,
                    "shards": count,
                },
            )


def test_a_server_that_offers_no_tls_is_given_no_credential(
    nats_server: Callable[..., Any], tmp_path: Path
) -> None:
    import ssl

    secret = tmp_path / "token"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    server = nats_server('authorization: {token: "0123456789abcdef"}', "debug: true", "trace: true")
    authority = Path(ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt")
    with pytest.raises(BrokerError, match="wanted TLS"):
        asyncio.run(broker(server, token=secret, authority=authority).connect("test", 10))
    assert "0123456789abcdef" not in (server.folder / "server.log").read_text()


def test_of_two_that_would_lead_one_writes_and_one_that_was_stopped_is_refused(
    nats_server: Callable[..., Any],
) -> None:
    server = nats_server()
    now = [0.0]

    async def play() -> None:
        client = await broker(server).connect("test", 10)
        bucket = await client.jetstream().create_key_value(bucket="t")
        halted = {RUN: Standing(state=LeaseState.HALT, rule="topology")}
        fine = {RUN: Standing(state=LeaseState.OK)}
        a, b = (Joint(shard, 2, boot, clock=lambda: now[0]) for shard, boot in ((0, "a"), (1, "b")))

        async def wait(seconds: float) -> None:
            now[0] += seconds

        await a.claim(bucket, wait)
        await b.claim(bucket, wait)
        await a.beat(bucket, fine)
        await b.beat(bucket, fine)
        await a.beat(bucket, fine)
        assert (a.leads, b.leads) == (True, False)
        assert Standing.decode((await bucket.get(verdict_key(RUN))).value or b"").state is LeaseState.OK
        await b.beat(bucket, fine)
        now[0] += TTL_SECONDS + 1  # the leader is stopped for so long
        await b.beat(bucket, halted)
        assert b.leads
        stale = (await bucket.get(LEADER_KEY)).revision
        await a._lead(bucket)  # it wakes up, and believes that it leads
        assert not a.leads
        assert (await bucket.get(LEADER_KEY)).revision == stale
        await b.beat(bucket, halted)
        assert Standing.decode((await bucket.get(verdict_key(RUN))).value or b"").rule == "topology"
        other = Joint(1, 2, "c", clock=lambda: now[0])

        async def meanwhile(seconds: float) -> None:
            now[0] += seconds
            await b.beat(bucket, halted)

        with pytest.raises(ShardTakenError, match="shard 1"):
            await other.claim(bucket, meanwhile)
        await client.close()

    asyncio.run(play())


def test_what_waits_with_the_server_is_measured(nats_server: Callable[..., Any], tmp_path: Path) -> None:
    server = nats_server()
    config = Config(state_dir=tmp_path, nats=f"nats://127.0.0.1:{server.port}/t")
    metrics = Metrics(version="0")

    async def play() -> None:
        client = await broker(server).connect("test", 10)
        stream = Stream(config, broker(server), SimpleNamespace(metrics=metrics, runs={}))
        stream._client = client
        await make_stream(client.jetstream(), broker(server), config)
        await stream._subscribe(client.jetstream())
        for _ in range(3):
            await client.jetstream().publish("t.frames.0.lane", b"")
        await stream._measure_lag()
        await client.close()

    asyncio.run(play())
    assert metrics.get("stream_frames_waiting") == 3


def test_status_tells_every_shard_and_clear_names_those_that_still_halt(
    nats_server: Callable[..., Any],
    shard: Callable[..., Any],
    jobs: list[Job],
    tmp_path: Path,
    wait_until: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = nats_server()
    daemons = [shard(server, index, 2) for index in range(2)]
    places = [["--state-dir", str(one.state_dir), RUN] for one in daemons]
    job = Job(tmp_path / "job", broker(server))
    jobs.append(job)
    job.step(0)
    job.flush()
    settled(daemons, ROWS * LENGTH, wait_until)

    def told(command: Callable[[list[str]], int], place: int, *flags: str) -> tuple[int, str]:
        capsys.readouterr()
        code = command([*places[place], *flags])
        return code, capsys.readouterr().out

    def comes(command: Callable[[list[str]], int], wanted: str, code: int = 1) -> None:
        def has_come() -> bool:
            time.sleep(0.3)  # a shard's word is renewed twice a second
            found, text = told(command, 0)
            return found == code and re.search(wanted, text) is not None

        wait_until(has_come, wanted, 60)

    comes(status, "all 2 shards: (ok|warn)", 0)
    assert told(clear, 0) == (0, f"{RUN} is not halted by shard 0/2\n")

    assert halt([*places[1], "--reason", "it drifts"]) == 0
    comes(status, "all 2 shards: halt by operator")
    comes(status, "shard 1 of 2: halt by operator")
    code, text = told(status, 0)
    assert code == 1
    assert "shard 0 of 2, asked here: " in text
    assert "it drifts" in text
    assert RUN in json.loads(told(status, 0, "--json")[1])["shards"]["words"][1]["halted"]
    code, text = told(clear, 0)
    assert code == 1
    assert f"shard 1 of 2 halts {RUN}, at step -1 by operator" in text
    assert f"run `isoexec clear {RUN}` on its host" in text
    code, text = told(clear, 1)
    assert (code, text.startswith(f"cleared {RUN}, which was halted by shard 1/2")) == (0, True)
    comes(clear, "is not halted", 0)

    daemons[1].kill()
    comes(status, "shard 1 of 2: unknown, silent for")
    code, text = told(clear, 0)
    assert code == 1
    assert f"shard 1 of 2 is not heard: whether it halts {RUN} is unknown" in text
    assert "the daemon here does not answer" in told(clear, 1)[1]
    assert "It was shard 1/2: what the others say is unknown here" in told(status, 1)[1]
