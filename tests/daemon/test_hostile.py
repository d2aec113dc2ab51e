# SPDX-License-Identifier: Apache-2.0
"""A rank of the job itself that lies or floods: what it says counts for itself alone, and what it fills is bounded."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoexec.contracts import wire
from isoexec.contracts.errors import WireError
from isoexec.contracts.halting import StateDirectory
from isoexec.contracts.window import Window
from isoexec.daemon.config import Config
from isoexec.daemon.evidence import EvidenceKeeper
from isoexec.daemon.ingest import Connection
from isoexec.daemon.metrics import Metrics
from isoexec.daemon.service import Service
from isoexec.daemon.weights import WeightLedger

BITS = np.array([-1.0], np.float32)


def test_a_stream_speaks_for_the_process_that_greeted_on_it_and_in_its_role(
    daemon: Any, peer: Callable[..., Any]
) -> None:
    liar, honest = peer(daemon, "engine", run="liar"), peer(daemon, "trainer", run="liar")
    liar.source, liar.role = honest.source, honest.role
    liar.logprobs("trainer_score", 1, [([1, 2], 1, BITS)])
    assert liar.closed()
    other = peer(daemon, "engine", run="liar", rank=1)
    other.role = "trainer"  # both sides of a pair from one mouth
    other.logprobs("trainer_score", 1, [([1, 2], 1, BITS)])
    assert other.closed()
    heard = {"run": "liar", "type": "logprobs"}
    assert daemon.metric("isoexec_messages_received_total", **heard, role="trainer") == 0


@pytest.mark.parametrize(
    ("role", "case"), [("engine", "trainer_score"), ("trainer", "engine_decode"), ("driver", "trainer_fwd")]
)
def test_a_case_is_told_by_its_own_side_only(role: str, case: str) -> None:
    with pytest.raises(WireError, match=f"case {case} .* found {role}"):
        wire.Logprobs(
            run="r", role=role, source="s", case=case, step=1, weight_version=1, digests=np.zeros((0, 16), np.uint8),
            lengths=np.zeros(0, np.int32), starts=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32),
            tokens=np.zeros(0, np.int32),
        )  # fmt: skip


def test_a_step_far_ahead_does_not_carry_the_run_away(daemon: Any, peer: Callable[..., Any]) -> None:
    sides = {role: peer(daemon, role, run="ahead") for role in ("engine", "trainer")}
    liar = peer(daemon, "trainer", run="ahead", rank=1)

    def one_step(step: int) -> None:
        for role, case in (("engine", "engine_decode"), ("trainer", "trainer_score")):
            sides[role].logprobs(case, step, [([step, 2], 1, BITS)])
        sides["trainer"].step(step)

    one_step(7)
    assert daemon.windows("ahead")[0]["step"] == 7
    liar.step(1 << 53)
    assert liar.closed()
    one_step(8)
    rows = daemon.windows("ahead", count=2)
    assert {row["step"] for row in rows} == {7, 8}
    assert [row["pairs"][0]["tokens"] for row in rows] == [1, 1]


class Writer:
    """The way back to a peer that does not listen."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...


def test_attestations_without_end_are_judged_and_not_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isoexec.daemon.runs._KEPT_A_SECOND", 1.0)
    service = Service(Config(state_dir=tmp_path))
    stream: Any = Connection(pid=0, writer=Writer())  # type: ignore[arg-type]
    told: dict[str, Any] = {"run": "chatty", "role": "engine", "source": "host:1:engine0"}
    service.process(stream, wire.Hello(**told, regime="bitwise", monitor_only=True))
    topology = {"TP": 1}
    for seq in range(1, 201):
        attested = wire.Attestation(
            **told, seq=seq, reason="periodic", step=1, weight_version=seq, topology=topology
        )
        service.process(stream, attested)
    kept = len(service.journal.attestations("chatty", limit=1000))
    assert 0 < kept < 200
    assert service.journal.lost == 200 - kept
    assert service.runs["chatty"].processes["host:1:engine0"].attested[0].message.weight_version == 200
    service.journal.close()


def test_runs_share_the_tokens_that_may_wait(
    start: Callable[..., Any], peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    daemon = start(pending_tokens=1000, window_seconds=60)
    greedy = peer(daemon, "engine", run="greedy")

    def send(first: int, count: int) -> None:
        for i in range(first, first + count):
            greedy.logprobs("engine_decode", 1, [([1, *[i] * 100], 1, np.full(100, -1.0, np.float32))])

    def waiting() -> Any:
        return daemon.metric("isoexec_tokens_pending", run="greedy", role="engine")

    send(0, 9)
    wait_until(lambda: waiting() == 900, "what waits")
    peer(daemon, "engine", run="other")
    send(9, 1)
    wait_until(lambda: waiting() == 500, "its half")


def test_seconds_in_which_the_daemon_was_stopped_are_not_the_jobs(
    start: Callable[..., Any], peer: Callable[..., Any]
) -> None:
    daemon = start(settle_seconds=2.0, window_seconds=5.0)
    engine, first = peer(daemon, "engine"), peer(daemon, "trainer")
    second = peer(daemon, "trainer", rank=1)
    engine.logprobs("engine_decode", 1, [([i, 2], 1, BITS) for i in (1, 2)])
    first.logprobs("trainer_score", 1, [([1, 2], 1, BITS)])
    first.step(1)
    time.sleep(0.3)
    daemon.process.send_signal(signal.SIGSTOP)
    second.logprobs("trainer_score", 1, [([2, 2], 1, BITS)])
    time.sleep(3.0)
    daemon.process.send_signal(signal.SIGCONT)
    (window,) = daemon.windows()
    assert [(one["tokens"], one["unpaired"]) for one in window["pairs"]] == [(2, {})]


def test_windows_are_written_one_at_a_time_and_few_of_them_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, state = Config(state_dir=tmp_path, sample_windows=2), StateDirectory(tmp_path).make()
    metrics = Metrics(version="x")
    keeper = EvidenceKeeper(config, state, metrics)
    arrays = {"a:b/first": BITS}

    async def keep(count: int) -> None:
        made = [
            Window(run="r", regime="bitwise", monitor_only=True, step=i, weight_version=1)
            for i in range(count)
        ]
        await asyncio.gather(
            *(keeper.keep(one, [], one.step, arrays, {}, bundled=False, time=0.0) for one in made)
        )

    async def keep_all() -> None:
        await keep(16)
        assert metrics.get("evidence_errors") == 0  # none removed a file that another was looking at
        await keep(20)

    asyncio.run(keep_all())
    assert metrics.get("evidence_errors") == 4
    assert sorted(one.name for one in (tmp_path / "runs" / "r" / "samples").iterdir()) == [
        "step-0000000014-14.npz",
        "step-0000000015-15.npz",
    ]


def weights(version: int, names: list[str], source: str = "s", role: str = "engine") -> wire.Weights:
    counts = dict.fromkeys(names, 4)
    return wire.Weights(
        run="r", role=role, source=source, weight_version=version, step=version, tensors=dict.fromkeys(names, (1, 2)),
        numel=counts, total=counts,
    )  # fmt: skip


def test_names_of_tensors_without_end_are_refused_and_older_versions_go_first() -> None:
    ledger = WeightLedger(limit_bytes=100_000)
    for version in range(1, 5):
        ledger.add(weights(version, [f"layers.{i}.weight" for i in range(100)]))
    assert ledger.held_bytes <= 100_000
    assert not ledger.has("engine", 1)  # there was room for three
    assert ledger.has("engine", 4)

    def flood() -> None:
        for more in range(100):
            ledger.add(weights(5, [f"made.up.{more}.{i}" for i in range(100)]))

    with pytest.raises(WireError, match="100000 bytes"):
        flood()
    assert ledger.held_bytes <= 100_000
    ledger.add(weights(6, ["w"]))  # what follows is taken again
    assert ledger.has("engine", 6)


def test_a_version_far_ahead_does_not_push_out_the_true_ones() -> None:
    ledger = WeightLedger()
    for made_up in range(20):
        ledger.add(weights((1 << 53) - made_up, ["w"]))
    for role in ("engine", "trainer"):
        ledger.add(weights(3, ["w"], role=role))
    assert ledger.has("engine", 3)
    assert ledger.breaks(3) == ()
