# SPDX-License-Identifier: Apache-2.0
"""How many token pairs a second a real daemon takes from its socket, and what processor time a million costs it.

`python tests/bench/daemon_rate.py [--steps N] [--tokens N] [--length N]`. Two streams, an engine's and a trainer's, send prepared
messages of 65,536 tokens as fast as they are taken; the clock runs until the daemon has counted every pair of the last step in a
window. Processor time is the daemon process's, all threads, with its share of the kernel's work on the socket, journal and
verdicts; the sender has a process of its own. Goals: 20 million pairs a second, 15 ms a million.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "soak")]

from common import start_daemon  # type: ignore[import-not-found]  # noqa: E402  of the soaks
from pair_statistics import (  # type: ignore[import-not-found]  # noqa: E402  beside this script
    BATCH,
    RUN,
    Floats,
    frames,
    kinds,
    source_of,
)

from isoexec.contracts.sockets import connect  # noqa: E402
from isoexec.contracts.wire import Hello, Step, encode_frame  # noqa: E402

SETTINGS = {
    "quiet_seconds": 0, "settle_seconds": 5, "frames_per_second": 1 << 20, "bytes_per_second": 1 << 40,
    "pending_tokens": 1 << 26,
}  # fmt: skip
CASES = {"engine": "engine_decode", "trainer": "trainer_score"}


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def judged(address: str) -> int:
    """The last step of which there is a window, -1 for none."""
    with urllib.request.urlopen(f"{address}/api/v1/runs", timeout=60) as answer:  # noqa: S310
        steps = [row["step"] for row in json.load(answer)["runs"]]
    return max((step for step in steps if step is not None), default=-1)


class Side(threading.Thread):
    """One stream, which sends what it is told to on its own."""

    def __init__(self, state: Path, role: str, values: Floats, steps: int, length: int) -> None:
        super().__init__(daemon=True)
        self.stream = connect(state)
        self.stream.settimeout(None)
        self.common = {"run": RUN, "role": role, "source": source_of(CASES[role])}
        self.send(Hello(**self.common, regime="bf16_dense", monitor_only=True))
        if not self.stream.recv(1 << 16):
            raise RuntimeError("hello was not answered")
        case = CASES[role]
        self.steps = [frames(case, step, values, length, BATCH) for step in range(steps + 1)]

    def send(self, message: Hello | Step) -> None:
        self.stream.sendall(b"".join(bytes(part) for part in encode_frame(message)))

    def put(self, step: int) -> None:
        for data in self.steps[step]:
            self.stream.sendall(data)
        self.send(Step(**self.common, step=step, weight_version=step))

    def run(self) -> None:
        for step in range(1, len(self.steps)):
            self.put(step)


def measure(name: str, sides: tuple[Floats, Floats], steps: int, length: int) -> None:
    with tempfile.TemporaryDirectory(prefix="isoexec-rate-") as folder:
        state = Path(folder) / "state"
        process, address = start_daemon(state, SETTINGS, log=Path(folder) / "daemon.log")
        try:
            both = [
                Side(state, role, values, steps, length) for role, values in zip(CASES, sides, strict=True)
            ]
            for side in both:
                side.put(0)  # with the first step the daemon loads what takes statistics
            while judged(address) < 0:
                time.sleep(0.05)
            spent, start = processor_seconds(process.pid), time.perf_counter()
            for side in both:
                side.start()
            while judged(address) < steps:
                time.sleep(0.1)
            passed, spent = time.perf_counter() - start, processor_seconds(process.pid) - spent
        finally:
            process.terminate()
            process.wait(30)
        million = steps * sides[0].size / 1e6
        print(f"{name:14}{million / passed:10.1f}{spent / million * 1e3:12.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="pairs of one step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print(f"{'':14}{'M pairs/s':>10}{'cpu ms/M':>12}")
    for name, sides in kinds(args.tokens).items():
        measure(name, sides, args.steps, args.length)


if __name__ == "__main__":
    main()
