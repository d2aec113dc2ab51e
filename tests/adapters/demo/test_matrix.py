# SPDX-License-Identifier: Apache-2.0
"""A cell of the demo's matrix, on the real engines: another model, and a trainer of two sequence-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from isoexec.contracts.schema import library

pytestmark = [pytest.mark.vllm, pytest.mark.megatron, pytest.mark.timeout(400)]


def test_a_mimo_is_bitwise_equal_over_a_weight_sync_with_a_trainer_of_two_sequence_parallel_ranks(
    tmp_path: Path,
) -> None:
    from isoexec.adapters.demo.phases import Stage
    from isoexec.adapters.demo.scenes import matrix_scene
    from isoexec.adapters.demo.services import Daemon
    from isoexec.adapters.demo.tiny import make_mimo

    daemon = Daemon(tmp_path / "state", tmp_path / "daemon.log")
    try:
        stage = Stage(
            daemon=daemon,
            prometheus=None,
            model=make_mimo(tmp_path / "model", seed=20),
            work=tmp_path,
            contract=library("mimo-dense-cpu"),
            tick=lambda _name, _done, _of: None,
        )
        (found,) = matrix_scene(stage, dtypes=["bfloat16"], names=["TP1xTP2+SP"], tokens=8192)
    finally:
        daemon.close()
    assert found.mismatch.tokens == found.mismatch.bitwise_equal == 2 * 4096
    assert found.verdict == "pass"
