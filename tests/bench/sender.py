# SPDX-License-Identifier: Apache-2.0
"""How long a step is held up by sending: `Client.send` of 65,536 tokens to a real daemon that reads, and to one that is stopped.

`python tests/bench/sender.py [--batches 500]`; goal: 0.5 ms at the 99th percentile. Batches are 64 sequences of 1,024 tokens, one
every 20 ms. `record` is what a caller of `LogprobTap.record` waits with token ids as int32 arrays: it also digests every
sequence and joins its arrays. Where other work runs beside it the scheduler is measured too; processor time is printed beside.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from isoexec.contracts import wire
from isoexec.probes.client import Client, ProbeSettings
from isoexec.probes.logprobs import LogprobTap, ScoredSequence

N, LENGTH = 64, 1024


def measure(call: Callable[[int], object], batches: int) -> dict[str, float]:
    """Milliseconds that `call` takes."""
    wall, cpu = np.zeros(batches), np.zeros(batches)
    for i in range(batches):
        time.sleep(0.02)
        start, used = time.perf_counter(), time.thread_time()
        call(i)
        wall[i], cpu[i] = time.perf_counter() - start, time.thread_time() - used
    return {
        "p50_ms": round(float(np.percentile(wall, 50)) * 1e3, 4),
        "p99_ms": round(float(np.percentile(wall, 99)) * 1e3, 4),
        "max_ms": round(float(wall.max()) * 1e3, 4),
        "cpu_p99_ms": round(float(np.percentile(cpu, 99)) * 1e3, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, default=500)
    batches = parser.parse_args().batches
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, (N, LENGTH + 16), dtype=np.int32)
    logprobs = -rng.exponential(1.0, (N, LENGTH)).astype(np.float32)
    fields = {
        "digests": rng.integers(0, 256, (N, 16), dtype=np.uint8),
        "lengths": np.full(N, LENGTH, np.int32),
        "starts": np.full(N, 16, np.int32),
        "logprobs": logprobs.reshape(-1),
        "tokens": ids[:, 16:].reshape(-1),
    }
    rows = [
        # an array does for the ids what a list does
        ScoredSequence(prompt=ids[i, :16], response=ids[i, 16:], logprobs=logprobs[i])  # type: ignore[arg-type]
        for i in range(N)
    ]
    with tempfile.TemporaryDirectory(prefix="isoexec-bench-") as folder:
        code = "import sys; from isoexec.daemon.cli import run; sys.exit(run())"
        daemon = subprocess.Popen(
            [sys.executable, "-P", "-c", code, "--state-dir", folder, "--http", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if daemon.stdout is not None:
            daemon.stdout.readline()
        client = Client(ProbeSettings(run="bench", state_dir=Path(folder)), "engine", capacity=64)
        client.connect()
        tap = LogprobTap(client)

        def send(step: int) -> None:
            client.send(wire.Logprobs, case="engine_decode", step=step // 100, weight_version=0, **fields)

        def record(step: int) -> None:
            tap.record("engine_decode", rows, step=step // 100, weight_version=0)

        measure(send, 20)
        print("send", json.dumps(measure(send, batches)))
        print("record", json.dumps(measure(record, batches)))
        client.flush(30)
        dropped = client.stats.dropped
        daemon.send_signal(signal.SIGSTOP)
        measure(send, 150)  # the queue is full from here on
        print("send, daemon stopped", json.dumps(measure(send, batches)))
        print(json.dumps({"dropped": client.stats.dropped - dropped, "dropped_before_the_stop": dropped}))
        daemon.send_signal(signal.SIGCONT)
        client.close(5)
        daemon.terminate()
        daemon.wait(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
