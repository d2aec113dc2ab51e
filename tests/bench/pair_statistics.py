# SPDX-License-Identifier: Apache-2.0
"""How fast token pairs are taken in, paired and turned into statistics, in one process on one core.

`python tests/bench/pair_statistics.py [--tokens N] [--length N] [--rounds N]`. For each kind of pair: statistics alone, and
frames read, paired and added up, as a daemon does it without its socket. The best round is given beside the median: on a
machine with other work only the former says something of the code. Processor time is that of this process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt
import xxhash

from isoexec.contracts.wire import FrameReader, Logprobs, Message, encode_frame
from isoexec.daemon.config import Config
from isoexec.daemon.memory import keep_freed
from isoexec.daemon.statistics import PairAccumulator
from isoexec.daemon.window import StepBuilder

GOAL_MS = 15.0
GOAL_RATE = 20.0
BATCH = 1 << 16
"""Tokens of a message."""
RUN = "bench"

Floats = npt.NDArray[np.float32]


def kinds(n: int) -> dict[str, tuple[Floats, Floats]]:
    """Pairs of sides: bitwise equal, one token in a hundred differs, noise of bf16 and of fp8, shifted by one."""
    rng = np.random.default_rng(0)
    q = (-rng.exponential(1.0, n) - 1e-6).astype(np.float32)

    def noisy(scale: float) -> Floats:
        return np.minimum(q + rng.normal(0, scale, n), -1e-6).astype(np.float32)

    rare = np.where(rng.random(n) < 0.01, q * np.float32(1.0001), q)
    return {
        "bitwise": (q, q.copy()),
        "near bitwise": (q, rare),
        "bf16": (q, noisy(0.01)),
        "fp8": (q, noisy(0.06)),
        "shifted": (q, np.roll(q, 1)),
    }


def source_of(case: str) -> str:
    return f"host:1:{case}"


def frames(case: str, step: int, values: Floats, length: int, batch: int) -> list[bytes]:
    """The messages of one side of one step, as bytes."""
    found = []
    for at in range(0, values.size, batch):
        part = values[at : at + batch]
        count = part.size // length
        digests = [xxhash.xxh3_128_digest(f"{step}:{at}:{i}".encode()) for i in range(count)]
        message = Logprobs(
            run=RUN,
            role=case.split("_")[0],
            source=source_of(case),
            case=case,
            step=step,
            weight_version=step,
            digests=np.frombuffer(b"".join(digests), np.uint8).reshape(count, 16),
            lengths=np.full(count, length, np.int32),
            starts=np.zeros(count, np.int32),
            logprobs=part,
            tokens=np.arange(part.size, dtype=np.int32),
        )
        found.append(b"".join(bytes(piece) for piece in encode_frame(message)))
    return found


def alone(q: Floats, p: Floats, length: int, batch: int, rounds: int) -> Callable[[int], None]:
    ids = np.arange(batch, dtype=np.int32)
    lengths = np.full(batch // length, length)
    sums = PairAccumulator(("engine_decode", "trainer_score"))

    def act(turn: int) -> None:
        for at in range(0, q.size, batch):
            sums.add(q[at : at + batch], p[at : at + batch], lengths, ids, ids)

    return act


def whole(q: Floats, p: Floats, length: int, batch: int, rounds: int) -> Callable[[int], None]:
    builder = StepBuilder(Config(state_dir=Path()), pending_tokens=8 * q.size)
    steps = [
        (frames("engine_decode", step, q, length, batch), frames("trainer_score", step, p, length, batch))
        for step in range(rounds)
    ]
    sides = FrameReader(), FrameReader()

    def take(reader: FrameReader, data: bytes) -> None:
        messages: list[Message] = list(reader.feed(data))
        for message in messages:
            if isinstance(message, Logprobs):
                builder.logprobs(message, 0.0)

    def act(turn: int) -> None:
        for left, right in zip(*steps[turn], strict=True):
            take(sides[0], left)
            take(sides[1], right)
        builder.close(builder.open[turn], 0.0).stats()

    return act


def measured(act: Callable[[int], None], tokens: int, rounds: int) -> tuple[float, float, float]:
    """Give best and median of the time that passed, and the processor time, in ms for a million pairs."""
    passed = []
    spent = time.process_time()
    for turn in range(rounds):
        start = time.perf_counter()
        act(turn)
        passed.append((time.perf_counter() - start) * 1e9 / tokens)
    spent = (time.process_time() - spent) * 1e9 / tokens / rounds
    return min(passed), statistics.median(passed), spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1 << 18, help="pairs of one round")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=BATCH, help="tokens of a message")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    keep_freed()  # as the daemon does
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, numpy {np.__version__}")
    print(
        f"{'':28}{'best':>9}{'median':>9}{'cpu':>9}   ms a million pairs, then million pairs a second at best"
    )
    for name, (q, p) in kinds(args.tokens).items():
        for what, make in (("statistics", alone), ("read, pair, statistics", whole)):
            best, median, cpu = measured(
                make(q, p, args.length, args.batch, args.rounds), args.tokens, args.rounds
            )
            print(f"{name:13}{what:>24}{best:8.1f}{median:9.1f}{cpu:9.1f}{1e3 / best:9.1f}")
    print(f"goal: at most {GOAL_MS:.0f} ms a million, at least {GOAL_RATE:.0f} million a second")


if __name__ == "__main__":
    main()
