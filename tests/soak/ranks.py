# SPDX-License-Identifier: Apache-2.0
"""Hundreds of ranks at one daemon: real clients in real processes, every token accounted for.

`python tests/soak/ranks.py [--minutes 1] [--ranks 512] [--runs 4] [--stall 20] [--step-seconds 1]`; not run by the suite. Each
run is a process that
holds the clients of its ranks, half of them engines and half trainers. Every step each engine sends sequences, the trainer of
the same number sends them too, but for one that only the engine has and one that only the trainer has. After a fifth of the
time the daemon is stopped for `--stall` seconds (SIGSTOP), so that queues fill and drop, and a daemon that goes on has much at
once; memory that it frees then it keeps, which is part of the warm-up. At the end, per run and side:

    tokens that `send` took = tokens paired + tokens unpaired
    messages that `send` dropped = messages dropped

as the daemon counts them; also the daemon's resident memory after warm-up, the time of a scrape, and how long `send` blocked.
Exit code 1 where an account does not close, memory grew by more than 3 % and 8 MiB, or the median scrape took more than 100 ms.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import xxhash
from common import start_daemon  # type: ignore[import-not-found]  # beside this script
from prometheus_client.parser import text_string_to_metric_families

from isoexec.contracts import wire
from isoexec.daemon.evidence import TOO_MANY
from isoexec.probes.client import Client, ProbeSettings

SEQUENCES, TOKENS = 16, 128
PAIR = "engine_decode:trainer_score"


def sequences(run: str, step: int, rank: int, side: str) -> dict[str, Any]:
    """The arrays of one rank's message: all but the last sequence are the same on both sides."""
    seed = xxhash.xxh32_intdigest(f"{run}/{step}/{rank}".encode())
    shared = np.random.default_rng(seed)
    ids = shared.integers(0, 150_000, (SEQUENCES, TOKENS), dtype=np.int32)
    logprobs = -shared.exponential(1.0, (SEQUENCES, TOKENS)).astype(np.float32)
    ids[-1, 0] = 1 if side == "engine" else 2
    if side == "trainer":
        logprobs += np.random.default_rng(seed + 1).normal(0, 2e-3, logprobs.shape).astype(np.float32)
        np.minimum(logprobs, 0, out=logprobs)
    digests = b"".join(xxhash.xxh3_128_digest(row.tobytes()) for row in ids)
    return {
        "digests": np.frombuffer(digests, np.uint8).reshape(SEQUENCES, 16),
        "lengths": np.full(SEQUENCES, TOKENS, np.int32),
        "starts": np.zeros(SEQUENCES, np.int32),
        "logprobs": logprobs.reshape(-1),
        "tokens": ids.reshape(-1),
    }


def drive(run: str, state_dir: Path, pairs: int, seconds: float, step_seconds: float, told: Any) -> None:
    """All ranks of one run; puts what they sent, dropped and waited into `told`."""
    settings = ProbeSettings(run=run, state_dir=state_dir, regime="bf16_dense")
    sides = {
        role: [Client(settings, role, rank=i, world=pairs, versions={}, capacity=2) for i in range(pairs)]
        for role in ("trainer", "engine")
    }
    for clients in sides.values():
        for client in clients:
            client.connect(timeout=60)
    cases = {"engine": "engine_decode", "trainer": "trainer_score"}
    sent = dict.fromkeys(cases, 0)
    blocked: list[float] = []
    deadline, step = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        step += 1
        next_step = time.monotonic() + step_seconds
        for rank in range(pairs):
            for role in ("engine", "trainer"):
                fields = sequences(run, step, rank, role)
                start = time.perf_counter()
                kept = sides[role][rank].send(
                    wire.Logprobs, case=cases[role], step=step, weight_version=step, **fields
                )
                blocked.append(time.perf_counter() - start)
                sent[role] += SEQUENCES * TOKENS * kept
            # spread over the step as ranks of a job are
            time.sleep(max(0.0, next_step - step_seconds * (1 - rank / pairs) - time.monotonic()))
        sides["trainer"][0].send(wire.Step, step=step, weight_version=step, seconds={"step": step_seconds})
        time.sleep(max(0.0, next_step - time.monotonic()))
    for clients in sides.values():
        for client in clients:
            client.flush(30)
            client.close(30)
    told.put(
        {
            "run": run,
            "steps": step,
            "tokens": sent,
            "dropped": {role: sum(one.stats.dropped for one in clients) for role, clients in sides.items()},
            "blocked_ms": np.percentile(np.array(blocked) * 1e3, [50, 99, 100]).tolist(),
        }
    )


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no VmRSS of {pid}")


def scrape(address: str) -> tuple[float, str]:
    start = time.perf_counter()
    with urllib.request.urlopen(address + "/metrics", timeout=60) as answer:  # noqa: S310
        text = answer.read().decode()
    return time.perf_counter() - start, text


def accounts(text: str, rows: list[dict[str, Any]]) -> list[str]:
    """What does not add up, as sentences."""
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]

    def value(name: str, **labels: str) -> int:
        return int(sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items()))

    wrong = []
    for row in rows:
        run = row["run"]
        paired = value("isoexec_tokens_total", run=run, pair=PAIR)
        for role in ("engine", "trainer"):
            unpaired = value("isoexec_tokens_unpaired_total", run=run, role=role)
            dropped = value("isoexec_messages_dropped_total", run=run, role=role)
            print(
                f"{run} {role}: {row['tokens'][role]} tokens sent = {paired} paired + {unpaired} unpaired; "
                f"{row['dropped'][role]} messages dropped, {dropped} counted"
            )
            if row["tokens"][role] != paired + unpaired:
                wrong.append(f"{run} {role}: {row['tokens'][role] - paired - unpaired} tokens are nowhere")
            if row["dropped"][role] != dropped:
                wrong.append(f"{run} {role}: {row['dropped'][role]} messages dropped, {dropped} counted")
    return wrong


def numbered(address: str, rows: list[dict[str, Any]]) -> list[str]:
    """Runs whose windows are numbered past what they did; one window may come after, of what was late at the end."""
    wrong = []
    for row in rows:
        with urllib.request.urlopen(f"{address}/api/v1/runs/{row['run']}", timeout=60) as answer:  # noqa: S310
            step = json.loads(answer.read())["step"]
        if step is None or step > row["steps"] + 1:
            wrong.append(f"{row['run']}: {row['steps']} steps were done, the last window is of step {step}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--stall", type=float, default=20.0, help="seconds of SIGSTOP early on; 0: none")
    parser.add_argument("--step-seconds", type=float, default=1.0, help="of each run's steps")
    chosen = parser.parse_args()
    seconds = chosen.minutes * 60
    with tempfile.TemporaryDirectory(prefix="isoexec-soak-") as folder:
        state_dir = Path(folder)
        settings = {"settle_seconds": 2.0, "window_seconds": 20.0}
        process, address = start_daemon(state_dir, settings, log=state_dir / "daemon.log")
        context = mp.get_context("spawn")
        told: Any = context.Queue()
        runs = [f"soak-{i}" for i in range(chosen.runs)]
        pairs = chosen.ranks // chosen.runs // 2
        workers = [
            context.Process(target=drive, args=(run, state_dir, pairs, seconds, chosen.step_seconds, told))
            for run in runs
        ]
        for worker in workers:
            worker.start()
        while "isoexec_step{" not in scrape(address)[1]:
            if not all(worker.is_alive() for worker in workers):
                process.terminate()
                raise SystemExit("a worker ended before its first step")
            time.sleep(0.5)
        began, stalled = time.monotonic(), chosen.stall <= 0
        memory: list[tuple[float, int]] = []
        scrapes: list[float] = []
        connections = 0.0
        while (now := time.monotonic() - began) < seconds - 2:
            took, text = scrape(address)
            scrapes.append(took)
            connections = max(connections, float(text.split("\nisoexec_connections ")[1].splitlines()[0]))
            memory.append((now, resident_bytes(process.pid)))
            if not stalled and now > seconds / 5:
                process.send_signal(signal.SIGSTOP)
                time.sleep(chosen.stall)
                process.send_signal(signal.SIGCONT)
                stalled = True
            time.sleep(1.0)
        rows = sorted((told.get(timeout=300) for _ in workers), key=lambda row: str(row["run"]))
        for worker in workers:
            worker.join(60)
        # a daemon that is behind has more to process, and then the last windows settle
        patience, wrong, text = time.monotonic() + 180, ["not looked at"], ""
        while wrong and time.monotonic() < patience:
            time.sleep(5)
            text = scrape(address)[1]
            wrong = accounts(text, rows)
        wrong += numbered(address, rows)
        cpu = (
            sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
            / 100
        )
        errors = [one for one in (state_dir / "daemon.log").read_text().splitlines() if '"error"' in one]
        # samples given up in the rush after the stall are counted
        given_up = [one for one in errors if TOO_MANY in one]
        errors = [one for one in errors if one not in given_up]
        process.terminate()
        process.wait(30)
        warm = [size for at, size in memory if 0.4 * seconds <= at < 0.6 * seconds] or [memory[0][1]]
        late = [size for at, size in memory if at >= 0.8 * seconds] or [memory[-1][1]]
        grown = statistics.median(late) - statistics.median(warm)
        if grown > max(8 << 20, 0.03 * statistics.median(warm)):
            wrong.append(f"memory grew by {grown / 2**20:.1f} MiB after warm-up")
        if statistics.median(scrapes) > 0.1:
            wrong.append(f"the median scrape took {statistics.median(scrapes) * 1e3:.0f} ms")
        wrong += [f"daemon log: {one}" for one in errors[:5]]
        tokens = sum(sum(row["tokens"].values()) for row in rows)
        print(
            json.dumps(
                {
                    "ranks": chosen.ranks,
                    "runs": chosen.runs,
                    "connections": connections,
                    "samples_given_up": len(given_up),
                    "steps": [row["steps"] for row in rows],
                    "tokens": tokens,
                    "daemon_cpu_seconds": cpu,
                    "scrape_ms": {
                        "p50": round(statistics.median(scrapes) * 1e3, 1),
                        "p95": round(float(np.percentile(scrapes, 95)) * 1e3, 1),
                        "max": round(max(scrapes) * 1e3, 1),
                        "bytes": len(text),
                    },
                    "rss_mib": {
                        "warm": round(statistics.median(warm) / 2**20, 1),
                        "late": round(statistics.median(late) / 2**20, 1),
                        "over_time": [
                            round(size / 2**20) for _, size in memory[:: max(len(memory) // 20, 1)]
                        ],
                    },
                    "send_blocked_ms_p50_p99_max": [[round(v, 3) for v in row["blocked_ms"]] for row in rows],
                }
            )
        )
    for one in wrong:
        print("WRONG:", one)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
