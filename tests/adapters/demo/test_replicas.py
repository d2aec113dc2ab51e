# SPDX-License-Identifier: Apache-2.0
"""A step of the demo's job on the real engines whose trainer has two data-parallel replicas."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from isoexec.contracts.schema import library

pytestmark = [pytest.mark.vllm, pytest.mark.megatron, pytest.mark.timeout(400)]


def test_two_replicas_share_the_rows_of_a_step_and_every_token_pairs_bitwise(tmp_path: Path) -> None:
    from isoexec.adapters.demo.faults import edited_contract
    from isoexec.adapters.demo.job import Layout
    from isoexec.adapters.demo.phases import Stage
    from isoexec.adapters.demo.services import Daemon
    from isoexec.adapters.demo.task import Task
    from isoexec.adapters.demo.tiny import make_qwen3

    daemon = Daemon(tmp_path / "state", tmp_path / "daemon.log")
    contract = edited_contract(
        library("qwen3-dense-cpu"),
        tmp_path / "contract.yaml",
        {"claims.topology.trainer.DP": {"invariant": [1, 2]}},
    )
    task = Task(prompts=3, group=3, prompt_lengths=(6, 20), response=16)
    try:
        stage = Stage(
            daemon=daemon,
            prometheus=None,
            model=make_qwen3(tmp_path / "model", seed=21),
            work=tmp_path,
            contract=contract,
            tick=lambda _name, _done, _of: None,
        )
        layout = Layout(trainer_dp=2, microbatch=2)
        with stage.job("dp2", layout, contract=contract, regime="bitwise", task=task) as job:
            assert len(job.trainers) == 2
            record = job.step(0)
        (window,) = stage.wait_windows("dp2", 1)
        verdict = daemon.run("dp2")["outcome"]
    finally:
        daemon.close()
    tokens = task.batch * task.response
    pairs = {tuple(p["pair"]): p for p in window["pairs"]}
    for case in ("trainer_score", "trainer_fwd"):
        pair = pairs["engine_decode", case]
        assert pair["tokens"] == pair["bitwise_equal"] == tokens
        assert not pair["unpaired"]
    assert record.scored == task.batch
    assert math.isfinite(record.loss)
    assert record.grad_norm > 0.0
    assert verdict == "pass"
