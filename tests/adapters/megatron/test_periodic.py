# SPDX-License-Identifier: Apache-2.0
"""Between weight syncs too: what is exchanged in a running trainer halts the run, by the real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from isoexec.adapters.megatron.logprobs import score
from isoexec.adapters.megatron.watch import Watch
from isoexec.contracts.errors import HaltedError, IsoExecError
from isoexec.contracts.halting import HaltMarker, StateDirectory
from isoexec.contracts.schema import library
from isoexec.kernels import registry
from isoexec.probes.client import connect
from isoexec.probes.timing import VerifyPeriod

pytestmark = pytest.mark.megatron

SECONDS = "0.2"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Path]:
    """The state directory of a daemon in a process of its own."""
    state = tmp_path / "state"
    state.mkdir()
    settings = state / "settings.yaml"
    settings.write_text(yaml.safe_dump({"settle_seconds": 0.5, "window_seconds": 1.0}))
    code = "import sys; from isoexec.daemon.cli import run; sys.exit(run())"
    words = ["--state-dir", str(state), "--http", "127.0.0.1:0", "--log", "json", "--config", str(settings)]
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *words], stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith("isoexec daemon:"), (state / "log").read_text()[-2000:]
        yield state
        process.terminate()
        process.wait(15)
        process.stdout.close()


@pytest.fixture
def pinned(tmp_path: Path) -> Path:
    """The shipped contract, pinned to the kernels as they are here."""
    data = yaml.safe_load(library("qwen3-dense-cpu").read_text())
    for provider in data["providers"]:
        provider["source"] = registry.source_digest(provider["function"])
    path = tmp_path / "pinned.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def _hook(model: Any) -> None:
    """Nothing that a canary's ten tokens could show."""
    module = model.decoder.layers[1].mlp.linear_fc1
    module.register_forward_hook(lambda _m, _a, out: (out[0] * 1.01, None) if out[0].shape[0] > 40 else None)


def _switch(_: Any) -> None:
    torch.set_flush_denormal(True)


@pytest.mark.parametrize(
    ("tamper", "rule", "words"),
    [
        (_hook, "kernel_replaced", "linear_fc1.forward_hooks were 0 and are 1"),
        (_switch, "environment", "flush_denormal"),
    ],
    ids=["a hook in one layer", "a switch"],
)
def test_a_swap_between_syncs_halts_the_run_within_one_period_and_names_it(
    launch: Any,
    make: Any,
    contract: Any,
    one: Any,
    tokens: torch.Tensor,
    daemon: Path,
    pinned: Path,
    tamper: Any,
    rule: str,
    words: str,
) -> None:
    def work() -> tuple[int, str, float]:
        os.environ |= {
            "ISOEXEC_RUN": "periodic",
            "ISOEXEC_STATE_DIR": str(daemon),
            "ISOEXEC_CONTRACT": str(pinned),
            "ISOEXEC_VERIFY_SECONDS": SECONDS,
        }
        model = make(one, torch.bfloat16, contract)
        client = connect("trainer")
        watch = Watch(model, client)
        quiet = 0
        until = time.monotonic() + 2.5
        while time.monotonic() < until:  # several periods in which nothing is wrong
            watch.boundary(quiet)
            score(model, tokens[:2])
            quiet += 1
            time.sleep(0.05)
        tamper(model)
        swapped = time.monotonic()
        step = quiet
        while time.monotonic() < swapped + 20:
            try:
                watch.boundary(step)
            except HaltedError as halted:
                client.close()
                return quiet, str(halted), time.monotonic() - swapped
            step += 1
            time.sleep(0.05)
        client.close()
        return quiet, "not halted", 0.0

    quiet, said, seconds = launch(work)[0]
    assert quiet > 3
    assert f"by rule {rule}" in said
    marker = HaltMarker.read(StateDirectory(daemon).run("periodic").path)
    assert marker is not None
    assert words in json.dumps(dict(marker.evidence)), marker
    print(f"halted {seconds:.2f} s after the swap, period {SECONDS} s")


def test_a_period_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("never", "-1", "inf", "nan"):
        monkeypatch.setenv("ISOEXEC_VERIFY_SECONDS", text)
        with pytest.raises(IsoExecError, match="ISOEXEC_VERIFY_SECONDS"):
            VerifyPeriod()
    monkeypatch.setenv("ISOEXEC_VERIFY_SECONDS", "")
    assert VerifyPeriod().seconds == 60.0
    assert not VerifyPeriod().due
    monkeypatch.setenv("ISOEXEC_VERIFY_SECONDS", "0")
    assert VerifyPeriod().due
