# SPDX-License-Identifier: Apache-2.0
"""A real daemon over its real socket: what raw pairs show reaches the journal, the API and `isoexec status`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from isoexec.contracts.window import Window
from isoexec.daemon.cli import check, status
from isoexec.daemon.journal import Journal

MANY, LENGTH = 60, 20


def sequences(logprobs: Any) -> list[tuple[list[int], int, Any]]:
    ids = np.random.default_rng(5).integers(0, 1000, (MANY, LENGTH + 4))
    return [(ids[i].tolist(), 4, logprobs[i]) for i in range(MANY)]


def test_what_raw_pairs_show_is_said_by_verdict_status_and_replay(
    start: Callable[..., Any],
    peer: Callable[..., Any],
    wait_until: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon = start()
    rng = np.random.default_rng(3)
    rollout = -rng.exponential(1.0, (MANY, LENGTH)).astype(np.float32)
    trained = np.minimum(rollout + rng.normal(0, 0.005, rollout.shape), -1e-6).astype(np.float32)
    trained[:, -1] = rollout[:, -1] - 1.5
    engine = peer(daemon, "engine", regime="bf16_dense")
    trainer = peer(daemon, "trainer", regime="bf16_dense")
    engine.logprobs("engine_decode", 1, sequences(rollout))
    trainer.logprobs("trainer_score", 1, sequences(trained))
    trainer.step(1)

    def told() -> Any:
        rows = daemon.json("/api/v1/runs")["runs"]
        return [one for row in rows for one in row["failing"] if one["cause"] == "sequence_end"]

    (verdict, *_) = wait_until(told, "a verdict that names the last token")
    sentence = "only the last token of each sequence is off, there 1.5 nats, elsewhere 0.00"
    assert f"likely cause: {sentence}" in verdict["message"]

    status(["--state-dir", str(daemon.state_dir)])
    assert sentence in capsys.readouterr().out
    check([str(daemon.state_dir)])
    assert sentence in capsys.readouterr().out
    journal = Journal.open(daemon.state.journal)
    window = Window.from_dict(journal.windows("r")[-1]["window"])
    journal.close()
    assert [one.cause for one in window.diagnosis] == ["sequence_end"]
    assert window.diagnosis[0].evidence["tokens_there"] == MANY


def test_the_one_engine_that_is_off_is_named_by_its_process(
    start: Callable[..., Any], peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    daemon = start()
    rng = np.random.default_rng(4)
    rollout = -rng.exponential(1.0, (MANY, LENGTH)).astype(np.float32)
    trained = np.minimum(rollout + rng.normal(0, 0.002, rollout.shape), -1e-6).astype(np.float32)
    half = MANY // 2
    trained[half:] -= rng.exponential(0.4, trained[half:].shape).astype(np.float32)
    good = peer(daemon, "engine", regime="bf16_dense")
    bad = peer(daemon, "engine", rank=1, regime="bf16_dense")
    trainer = peer(daemon, "trainer", regime="bf16_dense")
    good.logprobs("engine_decode", 1, sequences(rollout)[:half])
    bad.logprobs("engine_decode", 1, sequences(rollout)[half:])
    trainer.logprobs("trainer_score", 1, sequences(trained))
    trainer.step(1)

    def told() -> Any:
        rows = daemon.json("/api/v1/runs")["runs"]
        return [one for row in rows for one in row["failing"] if one["cause"] == "one_engine"]

    (verdict, *_) = wait_until(told, "a verdict that names one engine")
    assert f"only engine {bad.source} is off" in verdict["message"]
