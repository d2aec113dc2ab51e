# SPDX-License-Identifier: Apache-2.0
"""The attach guide's two scripts, run as a user would, with a real daemon beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isoexec.adapters.demo.report import mismatch_of
from isoexec.adapters.demo.services import Daemon, get_json
from isoexec.adapters.demo.tiny import make_qwen3
from isoexec.contracts.schema import library

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2

pytestmark = [pytest.mark.vllm, pytest.mark.megatron]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    running = Daemon(folder / "state", folder / "daemon.log")
    yield running
    running.close()


def attach(daemon: Daemon, folder: Path, run: str, contract: Path | None) -> list[dict[str, object]]:
    model = make_qwen3(folder / "model", seed=5)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "ISOEXEC_RUN": run,
        "ISOEXEC_STATE_DIR": str(daemon.state.path),
    }
    env.pop("ISOEXEC_CONTRACT", None)
    if contract is not None:
        env["ISOEXEC_CONTRACT"] = str(contract)
    shared = ["--model", str(model), "--exchange", str(folder), "--steps", str(STEPS)]
    ranks = 2 if contract is not None else 1
    launch = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    log = (folder / "log").open("w")
    sides = [
        subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "examples/rollout.py"), *shared],
            env=env,
            stdout=log,
            stderr=log,
        ),
        subprocess.Popen(
            [*launch, str(ROOT / "examples/train.py"), *shared, "--tp", str(ranks)],
            env=env,
            stdout=log,
            stderr=log,
        ),
    ]
    try:
        codes = [side.wait(240) for side in sides]
    finally:
        for side in sides:
            side.kill()
        log.close()
    assert codes == [0, 0], (folder / "log").read_text()[-4000:]
    rows = get_json(f"{daemon.url}/api/v1/runs/{run}/windows")["windows"]
    return [row["window"] for row in rows]


def test_a_watched_job_shows_its_mismatch(daemon: Daemon, tmp_path: Path) -> None:
    found = mismatch_of(attach(daemon, tmp_path, "attached", None))
    assert found.tokens == STEPS * 16 * 32
    assert found.bitwise_equal < found.tokens
    assert found.mean_abs_d > 0


def test_the_same_job_under_the_contract_is_bitwise_equal(daemon: Daemon, tmp_path: Path) -> None:
    found = mismatch_of(attach(daemon, tmp_path, "contracted", library("qwen3-dense-cpu")))
    assert found.tokens == STEPS * 16 * 32
    assert found.bitwise_equal == found.tokens
    assert found.max_abs_d == 0
